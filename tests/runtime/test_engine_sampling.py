"""Sampling through the engine: coupled texts equal plain ones, rejection is exact in distribution; seeds, logprobs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specrun.models_cache.errors import UsageError
from specrun.runtime.calibration import Calibration
from specrun.runtime.options import SamplingOptions
from specrun.runtime.round_costs import RoundCosts
from specrun.runtime.sampling import TokenCounts, distribution

from .checks import check_counters, close_logprobs, make_speculation_pay, same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .toys import TOY_IDS, TOY_LOGITS, TOY_SIZE

PLACE = {token: place for place, token in enumerate(TOY_IDS)}
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 2.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.2, "min_p": 0.1},
    "repetition": {"temperature": 0.7, "repetition_penalty": 1.3},
    "presence": {"temperature": 0.7, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.7, "frequency_penalty": -1.0},
    "everything": {
        "temperature": 0.9,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 10,
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", ["self", "mix", "rnd"])
def test_coupled_equals_plain(models: TinyModels, monkeypatch: pytest.MonkeyPatch, draft: str, setting: str) -> None:
    """The same seed gives the same text for every method and K, with every filter and penalty."""
    engine = models.engine("tgt", draft)
    make_speculation_pay(engine, monkeypatch)
    texts = set()
    for seed in (1, 2):
        options = {"raw": True, "max_tokens": 40, "seed": seed, **SETTINGS[setting]}
        plain = engine.generate(PROMPT, method="none", **options)
        texts.add(plain.token_ids)
        for method, draft_length in itertools.product(("draft", "ngram"), (1, 2, 3, 4, 5, 8, 16, None)):
            result = engine.generate(PROMPT, method=method, draft_length=draft_length, **options)
            same_output(result, plain)
            if draft == "self" and method == "draft" and draft_length is not None:
                assert result.speculation.acceptance_rate == 1.0  # it shares the noise
    assert len(texts) == 2


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.05},
        {"repetition_penalty": 0.8},
        {},
    ],
)
def test_greedy_penalties(models: TinyModels, penalty: dict[str, float]) -> None:
    """vllm#18902, TensorRT-LLM#17701: each penalty alone equals plain decoding, and changes the text."""
    engine = models.engine("tgt", "mix")
    options = {"raw": True, "max_tokens": 120, "ignore_eos": True}
    plain = engine.generate(PROMPT, method="none", **penalty, **options)
    for method, draft_length in (("draft", 1), ("draft", 4), ("draft", 16), ("ngram", 4)):
        same_output(engine.generate(PROMPT, method=method, draft_length=draft_length, **penalty, **options), plain)
    unchanged = engine.generate(PROMPT, method="none", **options)
    assert (plain.token_ids != unchanged.token_ids) == bool(penalty)


def test_fifty_prompts_under_a_repetition_penalty(models: TinyModels) -> None:
    """vllm#22987: 50 prompts at 1.05: 50 equal."""
    engine = models.engine("tgt", "mix")
    equal = 0
    for index in range(50):
        prompt = f"{index * 13} the ring {index}"
        options = {"raw": True, "max_tokens": 24, "repetition_penalty": 1.05}
        plain = engine.generate(prompt, method="none", **options)
        equal += plain.token_ids == engine.generate(prompt, draft_length=4, **options).token_ids
    assert equal == 50


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_no_temperature_is_greedy(models: TinyModels, temperature: float) -> None:
    """llama.cpp#5657: temperature 0, 0.0, 1e-6: greedy, with the usual acceptance."""
    engine = models.engine("tgt", "mix")
    options = {"raw": True, "max_tokens": 60, "draft_length": 4, "ignore_eos": True}
    greedy = engine.generate(PROMPT, **options)
    result = engine.generate(PROMPT, temperature=temperature, seed=9, **options)
    same_output(result, greedy)
    assert result.speculation.accepted == greedy.speculation.accepted > 0
    assert result.seed is None


def test_the_drafted_count_follows_k(models: TinyModels) -> None:
    """llama.cpp#3919: filters of the request do not shorten proposals: K tokens a round, whatever the temperature."""
    engine = models.engine("tgt", "rnd")
    for draft_length in (2, 5, 8):
        for options in ({}, {"temperature": 1.0, "top_k": 40, "min_p": 0.05, "seed": 1}):
            result = engine.generate(
                PROMPT, draft_length=draft_length, max_tokens=40, raw=True, ignore_eos=True, **options
            )
            full = result.speculation.rounds - draft_length - 1  # the last rounds are cut short by the limit
            assert result.speculation.proposed >= draft_length * full > 0
            assert result.speculation.acceptance_rate < 0.5


def test_counters_of_a_random_draft(models: TinyModels) -> None:
    """openvino.genai#4190: RND, temperature 0.7: completion = 1 + accepted + corrections + bonuses - discarded."""
    engine = models.engine("tgt", "rnd")
    for mode, stop in itertools.product(("coupled", "rejection"), ([], ["e"], ["the"])):
        for seed in range(10):
            result = engine.generate(
                PROMPT, temperature=0.7, seed=seed, sampling=mode, stop=stop, draft_length=4, max_tokens=40, raw=True
            )
            check_counters(result)


# Distributions


def joint(options: dict[str, Any], prompt: int, length: int) -> dict[tuple[int, ...], float]:
    """The probability of each text of `length` tokens after the toy's token `prompt`."""
    keys = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    sampling = SamplingOptions(**{key: value for key, value in options.items() if key in keys})
    texts = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in texts.items():
            row = TOY_LOGITS[(prompt, *text)[-1]].astype(np.float32)
            p = distribution(row, TokenCounts([prompt], text), sampling, tokens=276)
            longer |= {(*text, token): chance * p.prob(token) for token in TOY_IDS}  # the others have 1e-12
        texts = longer
    return texts


def p_value(seen: Iterable[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-squared; rare texts are one cell."""
    counts = Counter(seen)
    total = counts.total()
    assert set(counts) <= {text for text, chance in expected.items() if chance > 0}
    common = [text for text, chance in expected.items() if chance * total >= 8]
    observed = [counts[text] for text in common]
    wanted = [expected[text] * total for text in common]
    if total - sum(wanted) >= 8:
        observed.append(total - sum(observed))
        wanted.append(total - sum(wanted))
    wanted = np.array(wanted) * sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, wanted).pvalue)


RUNS = 2000
RULES = {
    "rejection, draft": {"sampling": "rejection", "method": "draft"},
    "rejection, draft, cold": {"sampling": "rejection", "method": "draft", "temperature": 0.3},
    "rejection, draft, hot": {"sampling": "rejection", "method": "draft", "temperature": 2.0},
    "rejection, draft, top-k": {"sampling": "rejection", "method": "draft", "top_k": 3},
    "rejection, draft, top-p": {"sampling": "rejection", "method": "draft", "top_p": 0.7},
    "rejection, draft, penalty": {"sampling": "rejection", "method": "draft", "presence_penalty": 1.0},
    "rejection, ngram": {"sampling": "rejection", "method": "ngram"},
    "rejection, eagle, top-p": {"sampling": "rejection", "method": "eagle", "top_p": 0.7},
    "rejection, medusa tree": {"sampling": "rejection", "method": "medusa", "draft_length": None},
    "rejection, eagle tree": {"sampling": "rejection", "method": "eagle", "draft_length": None},
    "rejection, eagle+ngram": {"sampling": "rejection", "method": "eagle+ngram", "draft_length": None},
    "coupled, draft": {"sampling": "coupled", "method": "draft"},
    "coupled, ngram": {"sampling": "coupled", "method": "ngram"},
}


@pytest.mark.parametrize("rule", RULES)
def test_joint_distribution_of_three_tokens(models: TinyModels, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """transformers#32867, #47932, mlx-swift-lm#459, dflash#74: joint of 3 tokens over seeds, k 4, and token trees."""
    options: dict[str, Any] = {"temperature": 0.7, "draft_length": 4, **RULES[rule]}
    heads = options["method"].startswith(("medusa", "eagle"))
    engine = models.engine("toy-heads") if heads else models.engine("toy", "toy-draft")
    if options["draft_length"] is None:
        monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 17: 1.1}).cost))
    texts, proposed, accepted = [], 0, 0
    for seed in range(RUNS):
        result = engine.generate("abcabca", raw=True, max_tokens=3, seed=seed, **options)
        texts.append(result.token_ids)
        proposed += result.speculation.evaluated
        accepted += result.speculation.accepted
    assert 0 < accepted < proposed
    expected = joint(options, engine.encode("a", raw=True)[0], 3)
    if "penalty" in rule:  # the prompt counts for no presence penalty, so it is the last token that matters
        assert options["presence_penalty"]
    assert p_value(texts, expected) > 1e-4
    # The test could fail: three tokens of the draft's distribution, or of another temperature, do not pass.
    other = joint({**options, "temperature": options["temperature"] * 1.25}, engine.encode("a", raw=True)[0], 3)
    if "top_k" not in options:
        assert p_value(texts, other) < 1e-4


def test_the_target_runs_its_table(models: TinyModels) -> None:
    """The toy's logits are those of its table, so the distributions above are known."""
    engine = models.engine("toy")
    for token in TOY_IDS:
        got = engine.logits([TOY_IDS[0], token])
        np.testing.assert_allclose(got, TOY_LOGITS[token], atol=1e-4)
    assert len(PLACE) == TOY_SIZE


# Seeds


def test_seeds(models: TinyModels) -> None:
    """vllm#6038, #13196, tokenspeed#1613: a seed fixes the text; seeds differ; samples of one seed differ."""
    engine = models.engine("tgt", "mix")

    def ids(**options: Any) -> tuple[int, ...]:
        return engine.generate(PROMPT, raw=True, max_tokens=24, draft_length=4, **options).token_ids

    assert ids(temperature=2.0, seed=42) == ids(temperature=2.0, seed=42)
    assert len({ids(temperature=1.0, seed=seed) for seed in range(1, 21)}) > 10
    first = [ids(temperature=0.9, seed=7, sample_index=index) for index in range(8)]
    assert len(set(first)) == 8
    assert first[::-1] == [ids(temperature=0.9, seed=7, sample_index=index) for index in range(7, -1, -1)]
    for mode in ("coupled", "rejection"):
        assert ids(temperature=1.0, seed=3, sampling=mode) == ids(temperature=1.0, seed=3, sampling=mode)


def test_a_drawn_seed_is_told(models: TinyModels) -> None:
    engine = models.engine("tgt")
    first = engine.generate(PROMPT, raw=True, max_tokens=24, temperature=1.0)
    assert first.seed is not None
    again = engine.generate(PROMPT, raw=True, max_tokens=24, temperature=1.0, seed=first.seed)
    assert again.token_ids == first.token_ids
    others = {engine.generate(PROMPT, raw=True, max_tokens=24, temperature=1.0).token_ids for _ in range(5)}
    assert len(others) > 1


def test_requests_do_not_disturb_each_others_seeds(models: TinyModels) -> None:
    """vllm#9441: seeded requests between others give what they give alone."""
    engine = models.engine("tgt", "mix")
    options = {"raw": True, "max_tokens": 24, "temperature": 0.9, "draft_length": 4}
    for mode in ("coupled", "rejection"):
        alone = [engine.generate(PROMPT, seed=seed, sampling=mode, **options).token_ids for seed in range(6)]
        between = []
        for seed in (3, 1, 5, 0, 2, 4):
            engine.generate("something else", seed=seed + 1, **options)
            between.append((seed, engine.generate(PROMPT, seed=seed, sampling=mode, **options).token_ids))
        assert [ids for _, ids in sorted(between)] == alone


@pytest.mark.parametrize("sample_index", [-1, 2**64])
def test_sample_indices_that_cannot_be(models: TinyModels, sample_index: int) -> None:
    with pytest.raises(UsageError, match="sample_index"):
        models.engine("tgt").generate("a", raw=True, temperature=1.0, max_tokens=2, sample_index=sample_index)


# Log-probabilities


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}, {"frequency_penalty": 1.0}])
def test_logprobs_of_accepted_tokens(models: TinyModels, options: dict[str, Any]) -> None:
    """llama.cpp#27972, vllm#17876: within 1e-4 of plain decoding's, never 0.0, and the model's own log-softmax."""
    engine = models.engine("tgt", "mix")
    request = {"raw": True, "max_tokens": 60, "logprobs": 4, "ignore_eos": True, **options}
    plain = engine.generate(PROMPT, method="none", **request)
    for method, draft_length in (("draft", 1), ("draft", 4), ("draft", 16), ("ngram", 4)):
        result = engine.generate(PROMPT, method=method, draft_length=draft_length, **request)
        same_output(result, plain)
        close_logprobs(result, plain)
        assert all(token.logprob is not None and token.logprob < 0.0 for token in result.tokens)
    assert {token.source for token in engine.generate(PROMPT, draft_length=4, **request).tokens} >= {
        "prefill",
        "draft",
        "correction",
    }
    tokens = engine.encode(PROMPT, raw=True)
    for at in (0, 1, 17, 59):
        row = engine.logits([*tokens, *plain.token_ids[:at]])[:276].astype(np.float64)
        expected = row[plain.token_ids[at]] - np.log(np.exp(row - row.max()).sum()) - row.max()
        assert plain.tokens[at].logprob == pytest.approx(expected, abs=1e-5)
        assert len(plain.tokens[at].top_logprobs) == 4


def test_prompt_logprobs_are_no_option(models: TinyModels) -> None:
    """vllm#8047: log-probabilities of the prompt are refused, not silently wrong."""
    with pytest.raises(UsageError, match="prompt_logprobs"):
        models.engine("tgt").stream("a", prompt_logprobs=1)


def test_logprobs_are_left_out_unless_asked_for(models: TinyModels) -> None:
    result = models.engine("tgt").generate(PROMPT, raw=True, max_tokens=5)
    assert all(token.logprob is None and token.top_logprobs == () for token in result.tokens)
    zero = models.engine("tgt").generate(PROMPT, raw=True, max_tokens=5, logprobs=0)
    assert all(token.logprob is not None and token.top_logprobs == () for token in zero.tokens)
