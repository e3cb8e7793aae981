"""Where a text ends: end-of-text ids, stop strings, limits, alone and together, inside blocks of draft tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime import Engine, Result

from .checks import check_counters, close_logprobs, read, same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT, token_id
from .toys import LOWER, TURN_END_ID


@pytest.fixture
def table(models: TinyModels) -> Engine:
    """The table model drafted by itself: every draft token stands, so blocks are as long as they can be."""
    return models.engine("table", "table")


def speculative(engine: Engine, prompt: str, **options: Any) -> Iterator[Result]:
    """The request by every method and several K, each equal to plain decoding."""
    plain = engine.generate(prompt, method="none", raw=True, **options)
    check_counters(plain)
    yield plain
    for method in ("draft", "ngram"):
        for draft_length in (1, 2, 3, 4, 5, 8, 16, 20, None):
            if method == "draft" or draft_length in (4, 16, None):
                _, result = read(engine.stream(prompt, method=method, draft_length=draft_length, raw=True, **options))
                same_output(result, plain)
                yield result


def test_eos_inside_a_block(table: Engine) -> None:
    """transformers#47912: the block goes on after EOS (y z EOS 1 2 ...): "z", EOS come out, finish = stop."""
    for result in speculative(table, "y"):
        assert result.token_ids == (token_id("z"), TURN_END_ID)
        assert result.text == "z"
        assert result.finish_reason == "stop"
    drafted = table.generate("y", method="draft", draft_length=8, raw=True)
    assert drafted.speculation.proposed == 8
    assert drafted.speculation.evaluated == drafted.speculation.accepted == 1
    assert drafted.tokens[-1].source == "draft"


@pytest.mark.parametrize("offset", range(18))
def test_eos_at_every_offset(table: Engine, offset: int) -> None:
    """koboldcpp#1276: EOS at each place of the block, and as bonus: always cut there."""
    start = len(LOWER) - 1 - offset
    for draft_length in (1, 4, 8, 16):
        result = table.generate(chr(ord("a") + start), draft_length=draft_length, raw=True)
        assert result.token_ids == (*LOWER[start + 1 :], TURN_END_ID)
        assert result.finish_reason == "stop"
        check_counters(result)


def test_ids_go_on_when_eos_is_ignored(table: Engine) -> None:
    for result in speculative(table, "x", ignore_eos=True, max_tokens=9):
        assert result.token_ids == (*LOWER[-2:], TURN_END_ID, *map(token_id, "123456"))
        assert result.text == "yz123456"
        assert result.finish_reason == "length"


def test_a_second_end_of_text_id(models: TinyModels) -> None:
    """vllm#4180, openvino.genai#1951: generation_config names an id that the tokenizer does not: it ends the text."""
    engine = models.engine("table-eos", "table-eos")
    assert engine.tokenizer.special_ids.eos == (0, token_id("!"))
    for result in speculative(engine, "M", max_tokens=10):
        assert result.token_ids == (token_id("O"), token_id("!"))
        assert result.finish_reason == "stop"


def test_streamed_ids_are_the_returned_ones(table: Engine) -> None:
    """LookaheadDecoding#69: streamed ids = returned ids, cut at EOS."""
    for method in ("none", "draft", "ngram"):
        pieces, result = read(table.stream("t", method=method, draft_length=16, raw=True))
        streamed = [token.id for piece in pieces for token in piece.tokens]
        assert streamed == list(result.token_ids) == [*LOWER[-6:], TURN_END_ID]


def test_stop_string_inside_a_block(table: Engine) -> None:
    """sglang#23802, vllm#47616: "A b END c...", stop END: text, ids, logprobs and usage agree after the cut."""
    assert table.generate("A", method="none", raw=True, max_tokens=9).text == " b END cFGH"[:11]
    results = list(speculative(table, "A", stop=["END"], max_tokens=12, logprobs=2))
    for result in results:
        assert result.text == " b "
        assert result.finish_reason == "stop"
        assert result.token_ids == (token_id("Ġb"), token_id("Ġ"))
        assert result.usage.completion_tokens == 2
        close_logprobs(result, results[0])
    drafted = table.generate("A", stop=["END"], max_tokens=12, draft_length=16, raw=True)
    assert drafted.speculation.discarded > 3  # also what the block held after the stop


def test_nothing_of_a_stop_string_is_streamed(table: Engine) -> None:
    """vllm#3574: exactly " b " comes out piece by piece; no piece holds a beginning of the stop string."""
    for method in ("none", "draft"):
        stream = table.stream("A", method=method, stop=["END cF"], max_tokens=12, draft_length=8, raw=True)
        seen = ""
        for piece in stream:
            seen += piece.text
            assert " b ".startswith(seen)
        assert seen == " b "


def test_text_held_back_is_flushed(table: Engine) -> None:
    """llama.cpp#9867: the text ends inside what might have become a stop string: it is delivered."""
    for result in speculative(table, "A", stop=["END of all"], max_tokens=5):
        assert result.text == " b END"
        assert result.finish_reason == "length"
    for result in speculative(table, "v", stop=["yz and more"]):
        assert result.text == "wxyz"
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] == TURN_END_ID


def test_stop_before_the_limit_in_one_block(table: Engine) -> None:
    """sglang#31599: the stop string lies inside the budget, the block crosses it: stop, not length."""
    for limit in (5, 6, 7, 8):
        for result in speculative(table, "A", stop=["END"], max_tokens=limit):
            assert (result.text, result.finish_reason) == (" b ", "stop")
    for result in speculative(table, "A", stop=["END"], max_tokens=4):
        assert (result.text, result.finish_reason) == (" b EN", "length")


def test_eos_before_a_stop_string_and_after(table: Engine) -> None:
    """Whatever comes first ends the text: "z" EOS "1"."""
    for result in speculative(table, "x", stop=["1"]):
        assert result.token_ids[-1] == TURN_END_ID
    for result in speculative(table, "x", stop=["z"]):
        assert (result.text, result.token_ids) == ("y", (token_id("y"),))
    for result in speculative(table, "x", stop=["1"], ignore_eos=True):
        assert result.text == "yz"
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("draft", ["self", "mix"])
def test_every_window_as_a_stop_string(models: TinyModels, draft: str) -> None:
    """transformers#48039: each run of 1 .. 3 tokens of the greedy text, k 20: stops exactly where plain does."""
    engine = models.engine("tgt", draft)
    options: dict[str, Any] = {"raw": True, "max_tokens": 40, "ignore_eos": True}
    ids = engine.generate(PROMPT, method="none", **options).token_ids
    stopped = 0
    for length in (1, 2, 3):
        for start in range(len(ids) - length):
            text = engine.tokenizer.decode(ids[start : start + length])
            if not text:
                continue
            plain = engine.generate(PROMPT, method="none", stop=[text], logprobs=0, **options)
            result = engine.generate(PROMPT, method="draft", draft_length=20, stop=[text], logprobs=0, **options)
            same_output(result, plain)
            close_logprobs(result, plain)
            assert text not in result.text
            stopped += result.finish_reason == "stop"
    assert stopped > 100


def test_min_tokens(table: Engine) -> None:
    """vllm#21987: one rule with and without a draft: neither EOS nor a stop string ends the text before it."""
    for result in speculative(table, "S", stop=["\n"], min_tokens=20, max_tokens=30):
        assert result.text.startswith("\nTUVWXYZ?@#$%&*()+,-.")
        assert result.usage.completion_tokens == 30
    for minimum in range(8):
        for result in speculative(table, "v", min_tokens=minimum, max_tokens=8, stop=["y"]):
            if minimum < 3:  # "y" is the third token
                assert (result.text, result.finish_reason) == ("wx", "stop")
            else:
                assert result.text.startswith("wxyz")
                assert result.usage.completion_tokens > minimum or minimum == 8
    # EOS has no chance before: the row that would have chosen it takes the next best token.
    for minimum in (1, 2, 3, 4, 5, 8):
        for result in speculative(table, "x", min_tokens=minimum, max_tokens=12):
            early = [token for token in result.token_ids[:minimum] if token in (0, TURN_END_ID)]
            assert early == []


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_limits(models: TinyModels, limit: int) -> None:
    """lattice#245, transformers#46993: limits 1, 2, 3, 5 with k 4: exactly so many tokens."""
    for draft in ("self", "mix", "rnd"):
        engine = models.engine("tgt", draft)
        for result in speculative(engine, PROMPT, max_tokens=limit, ignore_eos=True):
            assert len(result.token_ids) == limit
            assert result.finish_reason == "length"
            assert result.speculation.discarded == 0


def test_no_counter_exceeds_what_was_delivered(models: TinyModels) -> None:
    """sglang#37450: draft tokens beyond the limit are never asked for, so none is counted."""
    engine = models.engine("tgt", "self")
    for limit in range(1, 12):
        result = engine.generate(PROMPT, method="draft", draft_length=16, max_tokens=limit, raw=True, ignore_eos=True)
        s = result.speculation
        assert s.proposed <= max(0, limit - 2)
        assert s.accepted + s.corrections + s.bonuses == limit - 1


def test_limit_zero_runs_no_model(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiny-llm#299: limit 0 makes no model call."""
    engine = models.engine("tgt", "self")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the model ran")

    monkeypatch.setattr(engine.target, "run_batch", fail)
    monkeypatch.setattr(engine.drafting.draft, "run_batch", fail)
    for method in ("none", "ngram", "draft"):
        pieces, result = read(engine.stream(PROMPT, method=method, max_tokens=0))
        assert pieces == []
        assert (result.text, result.token_ids, result.finish_reason) == ("", (), "length")
        assert result.usage.completion_tokens == 0


def test_sampling_options_count_on_the_speculative_path(models: TinyModels) -> None:
    """tiny-llm#299: temperature and penalties are honoured with a draft, not dropped."""
    engine = models.engine("tgt", "self")
    greedy = engine.generate(PROMPT, draft_length=4, max_tokens=32, raw=True)
    for options in ({"temperature": 1.5, "seed": 3}, {"repetition_penalty": 1.8}, {"frequency_penalty": 2.0}):
        changed = engine.generate(PROMPT, draft_length=4, max_tokens=32, raw=True, **options)
        assert changed.token_ids != greedy.token_ids, options


@pytest.mark.parametrize(
    "options", [{"stop": ""}, {"stop": ["a", ""]}, {"max_tokens": -1}, {"min_tokens": 9, "max_tokens": 3}]
)
def test_options_that_cannot_be(table: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        table.generate("a", raw=True, **options)
