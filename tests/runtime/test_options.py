"""Options are checked once, and say the fix."""

import dataclasses
import math

import numpy as np
import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.options import GenerationOptions, SamplingOptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
            for value in (math.nan, math.inf, -math.inf, True, "1", None)
        ),
        ("temperature", -0.1),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("top_k", None),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 3),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("seed", False),
        ("mode", "exact"),
        ("mode", None),
    ],
)
def test_sampling_values_that_cannot_be(name, value):
    with pytest.raises(UsageError) as caught:
        SamplingOptions(**{name: value})
    message = str(caught.value)
    assert message.startswith(name)
    assert repr(value) in message
    assert message.endswith(".")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", None),
        ("logprobs", -1),
        ("draft_length", -2),
        ("draft_length", "4"),
        ("stop", "END"),
        ("stop", ("",)),
        ("stop", (b"END",)),
        ("stop", None),
        ("sampling", {"temperature": 1}),
        ("ignore_eos", 1),
    ],
)
def test_generation_values_that_cannot_be(name, value):
    with pytest.raises(UsageError, match=f"^{name} must be"):
        GenerationOptions(**{name: value})


def test_min_tokens_above_max_tokens_names_both():
    with pytest.raises(UsageError, match=r"min_tokens \(8\) is above max_tokens \(5\)"):
        GenerationOptions(max_tokens=5, min_tokens=8)
    assert GenerationOptions(max_tokens=5, min_tokens=5).min_tokens == 5


def test_unknown_names_are_errors():
    with pytest.raises(TypeError):
        SamplingOptions(temprature=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_llama_cpp_5657_tiny_temperatures_are_greedy(temperature):
    """llama.cpp#5657: temperature 0, 0.0 and 1e-6 are greedy."""
    assert SamplingOptions(temperature=temperature).greedy
    assert not SamplingOptions(temperature=1e-5).greedy


def test_limits_of_the_ranges_are_legal():
    options = SamplingOptions(
        temperature=np.float32(2), top_k=np.int64(3), top_p=1, min_p=1, presence_penalty=-2, frequency_penalty=2,
        seed=2**64 - 1,
    )  # fmt: skip
    assert (options.temperature, options.top_k, options.top_p, options.seed) == (2.0, 3, 1.0, 2**64 - 1)
    assert [type(value) for value in (options.temperature, options.top_k, options.top_p)] == [float, int, float]


@pytest.mark.parametrize(
    ("penalty", "penalised"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 3}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_penalised(penalty, penalised):
    assert SamplingOptions(**penalty).penalised is penalised


def test_frozen_and_slotted():
    for options, name in ((SamplingOptions(), "seed"), (GenerationOptions(), "max_tokens")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, name, 1)
        assert not hasattr(options, "__dict__")
    assert GenerationOptions(stop=["END"]).stop == ("END",)


def test_a_missing_seed_is_drawn_once_and_a_given_one_kept():
    assert SamplingOptions(seed=7).seeded().seed == 7
    drawn = [SamplingOptions(temperature=0.7).seeded() for _ in range(8)]
    assert len({options.seed for options in drawn}) > 1
    assert {options.temperature for options in drawn} == {0.7}


def test_vllm_21987_min_tokens_is_one_rule():
    """vllm#21987: with min_tokens 20 the text may end at token 21 and not before."""
    options = GenerationOptions(min_tokens=20)
    assert [number for number in range(1, 25) if options.may_end(number)] == [21, 22, 23, 24]
    assert GenerationOptions().may_end(1)
