"""What a line asks for, and what is said about one that cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specrun.runtime.jobs import Defaults, Line, LineError, LineRequest, lines, parse_line

DEFAULTS = Defaults({"max_tokens": 9, "temperature": 0.0, "system": None, "raw": False}, 100, frozenset({"tiny"}))


def parse(value: Any, defaults: Defaults = DEFAULTS, number: int = 5) -> LineRequest:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return parse_line(Line(number, data, len(data)), defaults)


def refused(value: Any) -> LineError:
    with pytest.raises(LineError) as caught:
        parse(value)
    return caught.value


def batch_form(url: str | None = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


class TestForms:
    def test_the_short_form(self) -> None:
        found = parse({"id": "x", "prompt": "Hi", "max_tokens": 3})
        assert (found.number, found.custom_id, found.prompt) == (5, "x", "Hi")
        assert found.options["max_tokens"] == 3
        assert parse({"prompt": "Hi"}).custom_id is None
        assert parse({"id": 17, "prompt": "Hi"}).custom_id == 17
        assert parse({"prompt": "Hi"}).options["max_tokens"] == 9

    def test_the_batch_form(self) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        found = parse(batch_form(messages=messages, model="tiny", max_completion_tokens=4, n=1, user="u"))
        assert (found.custom_id, found.prompt) == ("a", messages)
        assert found.options["max_tokens"] == 4
        assert not found.options["raw"]

    def test_a_body_for_completions_is_raw_text(self) -> None:
        assert parse(batch_form("/v1/completions", prompt="Once")).options["raw"] is True
        assert parse(batch_form("/v1/completions", prompt="Once", raw=False)).options["raw"] is False
        assert parse(batch_form(prompt="Once")).options["raw"] is False

    def test_every_parameter_reaches_the_request(self) -> None:
        given = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "seed": 3,
            "stop": ["END"],
            "presence_penalty": 0.5,
            "frequency_penalty": -0.5,
            "repetition_penalty": 1.1,
            "draft_length": 2,
            "min_tokens": 1,
            "ignore_eos": True,
            "system": "Be terse.",
            "sampling": "rejection",
        }
        found = parse({"prompt": "Hi", "speculation_method": "ngram", **given}).options
        assert {name: found[name] for name in given} == given
        assert found["method"] == "ngram"

    def test_null_means_not_given(self) -> None:
        assert parse({"prompt": "Hi", "max_tokens": None, "stop": None, "tools": None}).options["max_tokens"] == 9

    @pytest.mark.parametrize(
        ("given", "logprobs"),
        [
            ({}, None),
            ({"logprobs": False}, None),
            ({"logprobs": True}, 0),
            ({"logprobs": True, "top_logprobs": 2}, 2),
            ({"logprobs": 3}, 3),
            ({"logprobs": 0}, 0),
        ],
    )
    def test_logprobs_of_both_apis(self, given: dict[str, Any], logprobs: int | None) -> None:
        found = parse({"prompt": "Hi", **given})
        assert found.options["logprobs"] == logprobs
        assert found.listed == (logprobs is not None)

    def test_text_parts_are_joined(self) -> None:
        parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
        assert parse({"messages": [{"role": "user", "content": parts}]}).prompt == [
            {"role": "user", "content": "Hello"}
        ]

    def test_a_sampled_line_without_a_seed_has_one_of_its_own(self) -> None:
        sampled = {"prompt": "Hi", "temperature": 1}
        assert [parse(sampled, number=number).options["seed"] for number in (1, 2)] == [101, 102]
        assert parse({**sampled, "seed": 7}).options["seed"] == 7
        assert parse({"prompt": "Hi"}).options.get("seed") is None
        assert parse(sampled, Defaults({"seed": 8})).options["seed"] == 8

    def test_the_system_message_of_the_job_is_for_prompts_that_bring_none(self) -> None:
        defaults = Defaults({"system": "Job."})
        own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
        assert parse({"prompt": "Hi"}, defaults).options["system"] == "Job."
        assert parse({"messages": own}, defaults).options["system"] is None
        assert parse({"messages": own[1:]}, defaults).options["system"] == "Job."
        assert parse({"prompt": "Hi", "raw": True}, defaults).options["system"] is None

    def test_u2028_is_text(self) -> None:
        assert parse('{"prompt": "a\u2028b"}'.encode()).prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("data", "code", "says"),
    [
        (b"[1,2]", "not_an_object", "[1,2]"),
        (b"null", "not_an_object", "null"),
        (b'"x"', "not_an_object", '"x"'),
        (b'{"prompt": "a"', "invalid_json", "not valid JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "invalid_json", "Extra data"),
        (b"\x00\x00", "invalid_json", "not valid JSON"),
        (b'{"prompt": "a", "prompt": "b"}', "invalid_json", "twice"),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
        (b'{"prompt": "a", "temperature": -Infinity}', "invalid_json", "Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "invalid_request", "temperature must be"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "invalid_json", "digits"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json", "nested too deeply"),
        (b'{"prompt": "a\xff"}', "invalid_utf8", "at byte 14"),
        ('{"prompt": "a"}'.encode("utf-16"), "invalid_utf8", "convert"),
        (b'{"prompt": "a\\ud800"}', "invalid_text", "surrogate"),
        (b'{"prompt": "a", "stop": ["\\udfff"]}', "invalid_text", "surrogate"),
    ],
)
def test_lines_that_cannot_be_read(data: bytes, code: str, says: str) -> None:
    error = refused(data)
    assert error.code == code
    assert says in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("record", "code", "says"),
    [
        ({}, "no_prompt", "no prompt"),
        ({"prompt": 3}, "no_prompt", "must be text, not 3"),
        ({"prompt": ["a"]}, "no_prompt", "must be text"),
        ({"prompt": " \n"}, "no_prompt", "empty"),
        ({"prompt": None}, "no_prompt", "no prompt"),
        ({"messages": []}, "no_prompt", "list of messages"),
        ({"messages": "Hi"}, "no_prompt", "list of messages"),
        ({"messages": ["Hi"]}, "invalid_request", "role and content"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "content of a message"),
        ({"messages": [{"role": 1, "content": "Hi"}]}, "invalid_request", "role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_request", "must be text"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "invalid_request", "one of them"),
        ({"prompt": "a", "temprature": 1}, "unknown_parameter", "did you mean 'temperature'"),
        ({"prompt": "a", "method": "ngram"}, "unknown_parameter", "speculation_method"),
        ({"prompt": "a", "tools": []}, "unknown_parameter", '"tools"'),
        ({"prompt": "a", "temperature": "hot"}, "invalid_request", "temperature must be"),
        ({"prompt": "a", "temperature": True}, "invalid_request", "temperature must be"),
        ({"prompt": "a", "max_tokens": 1.5}, "invalid_request", "max_tokens must be"),
        ({"prompt": "a", "max_tokens": -1}, "invalid_request", "max_tokens must be"),
        ({"prompt": "a", "max_tokens": 1, "max_completion_tokens": 2}, "invalid_request", "differ"),
        ({"prompt": "a", "min_tokens": 10}, "invalid_request", "min_tokens (10) is above max_tokens (9)"),
        ({"prompt": "a", "top_p": 2}, "invalid_request", "top_p must be"),
        ({"prompt": "a", "stop": 1}, "invalid_request", "stop must be"),
        ({"prompt": "a", "stop": ["", "x"]}, "invalid_request", "stop must be"),
        ({"prompt": "a", "stop": [1]}, "invalid_request", "stop must be"),
        ({"prompt": "a", "seed": -1}, "invalid_request", "seed must be"),
        ({"prompt": "a", "n": 0}, "invalid_request", "n must be a whole number from 1 to 1024, not 0"),
        ({"prompt": "a", "n": True}, "invalid_request", "n must be a whole number"),
        ({"prompt": "a", "best_of": "3"}, "invalid_request", "best_of must be a whole number"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "invalid_request", "best_of must be n or more"),
        ({"prompt": "a", "n": 2, "temperature": 0}, "invalid_request", "All 2 samples are the same"),
        ({"prompt": "a", "stream": True}, "invalid_request", "stream must be false"),
        ({"prompt": "a", "raw": 1}, "invalid_request", "raw must be true or false"),
        ({"prompt": "a", "system": []}, "invalid_request", "system must be text"),
        ({"prompt": "a", "speculation_method": "magic"}, "invalid_request", "Unknown method 'magic'"),
        ({"prompt": "a", "speculation_method": 1}, "invalid_request", "must be text"),
        ({"prompt": "a", "sampling": []}, "invalid_request", "mode must be"),
        ({"prompt": "a", "lookahead": 3}, "invalid_request", "lookahead"),
        ({"prompt": "a", "logprobs": "yes"}, "invalid_request", "logprobs must be"),
        ({"prompt": "a", "top_logprobs": 1}, "invalid_request", "needs logprobs"),
        ({"prompt": "a", "logprobs": True, "top_logprobs": True}, "invalid_request", "whole number"),
        ({"prompt": "a", "model": "other"}, "other_model", "this job runs 'tiny'"),
        ({"prompt": "a", "model": 1}, "invalid_request", "model must be text"),
        (batch_form("/v1/embeddings", prompt="a"), "invalid_request", "url must be"),
        (batch_form("/v1/completions", messages=[{"role": "user", "content": "a"}]), "invalid_request", "a prompt"),
        ({**batch_form(prompt="a"), "method": "GET"}, "invalid_request", "must be POST"),
        ({**batch_form(prompt="a"), "temperature": 1}, "unknown_parameter", '"temperature" in the line'),
        ({"body": "a"}, "invalid_request", "body must be an object"),
        ({"body": {"prompt": "a", "id": 1}}, "unknown_parameter", '"id"'),
    ],
    ids=repr,
)
def test_requests_that_cannot_be(record: dict[str, Any], code: str, says: str) -> None:
    error = refused({**record, "custom_id": "mine"})
    assert error.code == code
    assert says in str(error)
    assert error.custom_id == "mine"


@pytest.mark.parametrize("identity", [True, 1.5, [], {}])
def test_an_id_is_text_or_a_whole_number(identity: Any) -> None:
    assert refused({"id": identity, "prompt": "a"}).code == "invalid_id"


def test_any_model_if_the_job_says_so() -> None:
    assert parse({"prompt": "a", "model": "other"}, Defaults({})).prompt == "a"


def test_an_over_long_line_tells_both_numbers() -> None:
    with pytest.raises(LineError, match=f"has {lines.MOST_BYTES + 1} bytes and a line may have {lines.MOST_BYTES}"):
        parse_line(Line(1, b"x", lines.MOST_BYTES + 1), DEFAULTS)


def test_a_wanted_form_and_a_prediction() -> None:
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    assert parse({"prompt": "Hi", "response_format": wanted}).options["json_schema"] == schema
    assert parse({"prompt": "Hi", "regex": "a+"}).options["regex"] == "a+"
    assert "json_schema" not in parse({"prompt": "Hi", "response_format": {"type": "text"}}).options
    assert parse({"prompt": "Hi", "prediction": "Hello"}).options["prediction"] == "Hello"
    parts = {"type": "content", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}
    assert parse({"prompt": "Hi", "prediction": parts}).options["prediction"] == "Hello"
    assert refused({"prompt": "Hi", "prediction": 3}).code == "invalid_request"
    assert refused({"prompt": "Hi", "response_format": {"type": "xml"}}).code == "invalid_request"
    assert refused({"prompt": "Hi", "regex": "a", "grammar": "start: /b/"}).code == "invalid_request"
