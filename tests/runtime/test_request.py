"""Options of a request: names are checked, and what cannot be is refused in one sentence."""

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.grammar import Constraint
from specrun.runtime.lookahead import LookaheadShape
from specrun.runtime.request import RequestOptions, request_options


def test_every_documented_option_is_taken():
    values = {
        "method": "lookahead",
        "draft_length": 3,
        "lookahead": [4, 3, 2],
        "max_tokens": 5,
        "min_tokens": 1,
        "stop": ["a", "b"],
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 7,
        "sampling": "rejection",
        "logprobs": 2,
        "ignore_eos": True,
        "system": "terse",
        "raw": False,
        "sample_index": 2,
    }
    others = {"json_schema", "regex", "grammar", "prediction"}
    assert set(values) | others == set(RequestOptions.__annotations__)
    request = request_options(**values)
    options, sampling = request.options, request.options.sampling
    assert (request.method, request.system, request.raw, request.sample_index) == ("lookahead", "terse", False, 2)
    assert (options.draft_length, options.max_tokens, options.min_tokens) == (3, 5, 1)
    assert request.lookahead == LookaheadShape(4, 3, 2)
    assert (options.stop, options.logprobs, options.ignore_eos) == (("a", "b"), 2, True)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 4, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (sampling.seed, sampling.mode) == (7, "rejection")
    assert all(name in (RequestOptions.__doc__ or "") for name in {*values, *others})
    assert request_options(regex="a", prediction="b").constraint == Constraint("regex", "a")
    assert request_options(grammar="start: /a/").constraint == Constraint("grammar", "start: /a/")
    assert request_options(json_schema={}, prediction="b").prediction == "b"


def test_an_unknown_option_is_refused_with_the_nearest_one():
    with pytest.raises(UsageError, match="no option 'max_token': did you mean 'max_tokens'"):
        request_options(max_token=3)
    with pytest.raises(UsageError, match="known ones are method, draft_length"):
        request_options(zzz=3)


def test_one_stop_string_need_not_be_a_list():
    assert request_options(stop="END").options.stop == ("END",)


@pytest.mark.parametrize(
    "values",
    [
        {"method": "magic"},
        {"sample_index": -1},
        {"sample_index": True},
        {"stop": [""]},
        {"lookahead": (3, 3, 3)},
        {"method": "lookahead", "lookahead": (3, 3)},
    ],
)
def test_impossible_values_are_usage_errors(values):
    with pytest.raises(UsageError):
        request_options(**values)


def test_a_seed_is_drawn_only_where_it_matters():
    assert request_options().options.sampling.seed is None
    assert request_options(temperature=1.0).options.sampling.seed is not None
