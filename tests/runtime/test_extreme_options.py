"""Options at the ends of what is allowed: an answer, or that request's own error, never the end of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from specrun.models_cache.errors import BackendError, SpecrunError
from specrun.runtime import BatchEngine, BatchRequest, Result

from .checks import same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT

OPTIONS: list[dict[str, Any]] = [
    *({"repetition_penalty": penalty} for penalty in (5e-324, 1e-300, 1e-38, 1e38, 1e308)),
    *({"repetition_penalty": penalty, "temperature": 0.9, "seed": 1} for penalty in (5e-324, 1e308)),
    *(
        {"repetition_penalty": penalty, "temperature": 0.9, "seed": 1, "top_k": 3, "min_p": 0.1}
        for penalty in (5e-324,)
    ),
    *({"temperature": temperature, "seed": 2} for temperature in (1e-5, 1e10, 1e308)),
    {"temperature": 1.0, "seed": 2**64 - 1, "top_k": 10**30, "top_p": 5e-324},
    {"temperature": 1.0, "seed": 0, "min_p": 1.0},
    {"temperature": 1.0, "seed": 0, "min_p": 5e-324, "top_p": 1e-9, "presence_penalty": -2, "frequency_penalty": 2},
    {"logprobs": 10**30},
    {"draft_length": 10**30},
    {"stop": ["x" * 100_000, *(f"{number}stop" for number in range(5000))]},
    {"prediction": "a" * 100_000},
    {"min_tokens": 20, "max_tokens": 20},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[repr(options)[:60] for options in OPTIONS])
def test_extremes(models: TinyModels, options: dict[str, Any]) -> None:
    """Plain, drafted and in a batch, beside a usual request, the text is one."""
    engine = models.engine("tgt")
    given: dict[str, Any] = {"raw": True, "max_tokens": 20, **options}
    plain = engine.generate(PROMPT, **{**given, "method": "none"})
    same_output(engine.generate(PROMPT, **{**given, "method": "ngram"}), plain)
    usual: dict[str, Any] = {"raw": True, "max_tokens": 20}
    requests = [BatchRequest(index, PROMPT, usual if index % 2 else given) for index in range(4)]
    found = {answer.index: answer.result for answer in BatchEngine(engine, batch_size=3).run(requests)}
    for index in range(4):
        result = found[index]
        assert isinstance(result, Result)
        same_output(result, engine.generate(PROMPT, **usual, method="none") if index % 2 else plain)


def test_a_penalty_beyond_all_numbers_is_the_smallest_or_largest(models: TinyModels) -> None:
    """A penalty near 0 makes tokens that came certain: the text repeats one of them."""
    engine = models.engine("tgt")
    result = engine.generate(PROMPT, raw=True, ignore_eos=True, max_tokens=12, repetition_penalty=5e-324)
    assert set(result.token_ids) <= {*engine.encode(PROMPT, raw=True)}


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "a", "min_tokens": 5},
        {"regex": "(a{1000}){1000}"},
        {"regex": "a{100000}"},
        {"json_schema": {"type": "array", "minItems": 10**9, "items": {"type": "null"}}},
        {"json_schema": {"type": "string", "minLength": 10**9}},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"anyOf": [{"const": number} for number in range(3000)]}},
        {"grammar": "start: start"},
        {"grammar": 'start: "a" start | "b" start | ""'},
    ],
    ids=lambda options: repr(options)[:60],
)
def test_grammars_that_go_too_far(models: TinyModels, options: dict[str, Any]) -> None:
    """Answered or refused alike by plain decoding and in a batch; the requests beside it do not notice."""
    engine = models.engine("tgt")
    given: dict[str, Any] = {"raw": True, "max_tokens": 20, **options}
    usual: dict[str, Any] = {"raw": True, "max_tokens": 20}
    try:
        alone: Result | SpecrunError = engine.generate(PROMPT, **given, method="none")
    except SpecrunError as error:
        alone = error
    assert not isinstance(alone, BackendError)
    requests = [BatchRequest(index, PROMPT, usual if index % 2 else given) for index in range(4)]
    found = {answer.index: answer.result for answer in BatchEngine(engine, batch_size=3).run(requests)}
    for index in (0, 2):
        result = found[index]
        if isinstance(alone, Result):
            assert isinstance(result, Result)
            same_output(result, alone)
        else:
            assert str(result) == str(alone)
            assert "\n" not in str(result)
    for index in (1, 3):
        result = found[index]
        assert isinstance(result, Result)
        same_output(result, engine.generate(PROMPT, **usual, method="none"))
