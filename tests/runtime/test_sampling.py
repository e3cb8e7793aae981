"""Logits to distributions, distributions to tokens."""

import itertools
import math
import threading

import numpy as np
import pytest
import scipy.special
import scipy.stats

from specrun.models_cache.errors import BackendError, UsageError
from specrun.runtime.coupled_noise import CoupledNoise
from specrun.runtime.logprobs import logprob, top_logprobs
from specrun.runtime.options import SamplingOptions
from specrun.runtime.sampling import (
    Distribution,
    RandomStream,
    TokenCounts,
    coupled_token,
    distribution,
    greedy_tokens,
    sample,
)


def reference(logits, prompt, output, o, tokens, banned=()):
    """The distribution, dense, written for reading: plain Python, one step after the other."""
    scores = {token: float(logit) for token, logit in enumerate(logits) if token < tokens}
    for token in scores:
        if token in prompt or token in output:
            factor = o.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        count = output.count(token)
        scores[token] -= o.frequency_penalty * count + (o.presence_penalty if count else 0.0)
    for token in banned:
        scores.pop(token, None)
    ranked = sorted(scores, key=lambda token: (-np.float32(scores[token]), token))
    if o.greedy:
        ranked = ranked[:1]
        weights = [1.0]
    else:
        if o.top_k:
            ranked = ranked[: o.top_k]
        weights = [math.exp((scores[token] - scores[ranked[0]]) / o.temperature) for token in ranked]
    total, running, kept = sum(weights), 0.0, 0
    while kept < len(ranked):
        running += weights[kept] / total
        kept += 1
        if o.top_p < 1 and running >= o.top_p:
            break
    dense = np.zeros(len(logits))
    for token, weight in zip(ranked[:kept], weights[:kept], strict=True):
        if weight >= o.min_p * weights[0]:
            dense[token] = weight
    return dense / dense.sum()


def random_options(rng):
    pick = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    return SamplingOptions(
        temperature=pick(0.0, 0.3, 0.7, 1.0, 2.0),
        top_k=pick(0, 0, 1, 3, 7, 100),
        top_p=pick(1.0, 1.0, 0.3, 0.77, 0.93),
        min_p=pick(0.0, 0.0, 0.07, 0.31),
        repetition_penalty=pick(1.0, 1.0, 1.3, 0.8),
        presence_penalty=pick(0.0, 0.0, 0.9, -0.6),
        frequency_penalty=pick(0.0, 0.0, 0.7, -2.0),
    )


def test_distribution_equals_the_plain_reference():
    rng = np.random.default_rng(1)
    for _ in range(1500):
        size = int(rng.integers(5, 30))
        logits = rng.normal(0, 2.5, size).astype(np.float32)
        prompt, output = rng.integers(0, size, 6).tolist(), rng.integers(0, size, 5).tolist()
        options = random_options(rng)
        tokens = int(size - rng.integers(0, 3))
        banned = rng.integers(0, size, int(rng.integers(0, 3))).tolist()
        before = logits.copy()
        got = distribution(logits, TokenCounts(prompt, output), options, tokens=tokens, banned=banned)
        np.testing.assert_array_equal(logits, before)
        np.testing.assert_allclose(
            got.dense(size), reference(logits, prompt, output, options, tokens, banned), atol=1e-6, err_msg=str(options)
        )
        assert np.all(np.diff(got.ids) > 0)
        assert np.all(got.probs > 0)
        assert got.probs.sum() == pytest.approx(1.0, abs=1e-12)


def test_wide_rows_take_the_same_path():
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal(20_000) * 2).astype(np.float32)
    for options in (
        SamplingOptions(temperature=1.0, top_p=0.9),
        SamplingOptions(temperature=2.0, top_p=0.99, min_p=0.001),
        SamplingOptions(temperature=0.5, top_k=5000, top_p=0.8),
        SamplingOptions(temperature=1.0, min_p=0.01),
    ):
        got = distribution(logits, None, options, tokens=19_990)
        want = reference(logits, [], [], options, 19_990)
        np.testing.assert_array_equal(got.ids, np.flatnonzero(want))
        np.testing.assert_allclose(got.probs, want[got.ids], rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (SamplingOptions(temperature=1.0, top_k=3), [1, 2, 4]),
        (SamplingOptions(temperature=1.0, top_k=1), [2]),
        (SamplingOptions(temperature=1.0, top_p=0.55), [1, 2]),
        (SamplingOptions(temperature=1.0, min_p=1.0), [2]),
        (SamplingOptions(temperature=0.0), [2]),
    ],
)
def test_ties_at_a_border_keep_the_lowest_ids(options, kept):
    logits = np.log(np.array([0.05, 0.2, 0.4, 0.05, 0.2, 0.05, 0.05], np.float32))
    assert distribution(logits, None, options, tokens=7).ids.tolist() == kept


def test_all_equal_logits():
    logits = np.zeros(6, np.float32)
    assert distribution(logits, None, SamplingOptions(temperature=1.0, top_k=2), tokens=6).ids.tolist() == [0, 1]
    assert distribution(logits, None, SamplingOptions(temperature=1.0, top_p=0.6), tokens=6).ids.tolist() == [
        0,
        1,
        2,
        3,
    ]
    assert greedy_tokens(np.stack([logits, logits]), 6).tolist() == [0, 0]


def test_padded_vocabulary_is_never_emitted():
    """TensorRT-LLM#2789, vllm#7252: sizes 128 / 160 with 120 real tokens; what is missing has probability 0."""
    rng = np.random.default_rng(3)
    options = SamplingOptions(temperature=0.8)
    for size in (128, 160):
        logits = rng.standard_normal(size).astype(np.float32)
        logits[120:] = 50.0
        got = distribution(logits, None, options, tokens=120)
        assert got.ids.max() == 119
        assert got.prob(125) == 0.0
        assert greedy_tokens(logits[None], 120)[0] < 120
        assert all(token < 120 for token, _ in top_logprobs(logits, 5, tokens=120))
    smaller = distribution(rng.standard_normal(100).astype(np.float32), None, options, tokens=120)
    assert smaller.prob(110) == 0.0
    assert smaller.dense(120)[100:].sum() == 0.0


def test_history_beyond_a_smaller_draft_vocabulary():
    options = SamplingOptions(temperature=1.0, repetition_penalty=2.0, frequency_penalty=1.0)
    logits = np.array([1.0, -1.0, 0.5, 0.2], np.float32)
    got = distribution(logits, TokenCounts([0, 9], [1, 7]), options, tokens=10)
    np.testing.assert_allclose(got.dense(4), reference(logits, [0], [1], options, 4), rtol=1e-6)


def test_transformers_2302_negative_logits_fall_under_a_repetition_penalty():
    """transformers#2302: a repeated token becomes rarer whatever the sign of its logit."""
    logits = np.array([-2.0, -0.5, 1.5, 0.0, -3.0], np.float32)
    plain = distribution(logits, None, SamplingOptions(temperature=1.0), tokens=5)
    options = SamplingOptions(temperature=1.0, repetition_penalty=1.5)
    for token in (0, 1, 2, 4):
        assert distribution(logits, TokenCounts([token]), options, tokens=5).prob(token) < plain.prob(token)


def test_presence_and_frequency_count_the_output_only():
    logits = np.zeros(4, np.float32)
    options = SamplingOptions(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    got = distribution(logits, TokenCounts([0, 0, 1], [1, 2, 2]), options, tokens=4)
    weights = np.exp([0.0, -0.75, -1.0, 0.0])
    np.testing.assert_allclose(got.probs, weights / weights.sum(), rtol=1e-6)


def test_llama_cpp_3919_no_filter_is_on_by_default():
    """llama.cpp#3919: a filter nobody asked for leaves one candidate and makes every draft token right."""
    logits = np.linspace(-9, 9, 500).astype(np.float32)
    assert distribution(logits, None, SamplingOptions(temperature=1.0), tokens=500).ids.size == 500


def test_banned_ids():
    logits = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    got = distribution(logits, None, SamplingOptions(temperature=1.0), tokens=4, banned=[0, 2, 900])
    assert got.ids.tolist() == [1, 3]
    assert distribution(logits, None, SamplingOptions(), tokens=4, banned=np.array([0])).ids.tolist() == [1]
    assert greedy_tokens(logits[None], 4, banned=[0, 1]).tolist() == [2]
    assert logits[0] == 5.0
    with pytest.raises(UsageError, match="ban fewer"):
        distribution(logits, None, SamplingOptions(temperature=1.0), tokens=4, banned=[0, 1, 2, 3])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers(bad):
    logits = np.array([[0.0, 1.0, 2.0], [0.0, bad, 2.0]], np.float32)
    with pytest.raises(BackendError, match="not numbers"):
        greedy_tokens(logits, 3)
    with pytest.raises(BackendError, match="not numbers"):
        distribution(logits[1], None, SamplingOptions(temperature=1.0, top_k=2), tokens=3)
    with pytest.raises(BackendError, match="not numbers"):
        logprob(logits[1], 0, tokens=3)


def test_a_penalty_without_history_is_refused():
    with pytest.raises(UsageError, match="TokenCounts"):
        distribution(np.zeros(3, np.float32), None, SamplingOptions(presence_penalty=1.0), tokens=3)


def test_minus_infinity_logits_and_vanishing_probabilities_are_outside_the_support():
    logits = np.array([0.0, -np.inf, -2000.0, 1.0], np.float32)
    assert distribution(logits, None, SamplingOptions(temperature=1.0), tokens=4).ids.tolist() == [0, 3]


def test_token_counts_follow_push_pop_and_rewind():
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 200, 150).tolist()
    counts, output = TokenCounts(prompt), []
    for _ in range(600):
        if output and rng.random() < 0.3:
            length = int(rng.integers(0, len(output) + 1))
            if rng.random() < 0.5:
                assert counts.pop() == output.pop()
            else:
                counts.rewind_to(length)
                del output[length:]
        else:
            for token in rng.integers(0, 400, int(rng.integers(1, 9))).tolist():
                counts.push(token)
                output.append(token)
        ids, in_output = counts.arrays()
        assert dict(zip(ids.tolist(), in_output.tolist(), strict=True)) == {
            token: output.count(token) for token in {*prompt, *output}
        }
        assert len(counts) == len(output)
    with pytest.raises(ValueError, match="cannot rewind to"):
        counts.rewind_to(len(output) + 1)


def test_prob_lookups_agree():
    rng = np.random.default_rng(5)
    for size in (10, 3000):
        weights = rng.random(size) * (rng.random(size) < 0.5)
        dense = weights / weights.sum()
        made = Distribution.from_dense(weights)
        np.testing.assert_allclose(made.dense(size), dense)
        ids = np.flatnonzero(rng.random(size + 50) < 0.6)
        padded = np.concatenate((dense, np.zeros(50)))
        np.testing.assert_allclose(made.probs_of(ids), padded[ids])
        assert [made.prob(token) for token in ids.tolist()] == pytest.approx(padded[ids].tolist())
    for wrong in ([0.0, 0.0], [1.0, -0.1], [math.nan, 1.0], [[1.0]]):
        with pytest.raises(ValueError, match="weights"):
            Distribution.from_dense(wrong)


# --- coupled sampling


def plain_coupled(made, seed, sample_index, position, size=40_000):
    """Gumbel-max over the whole vocabulary, without short cuts."""
    key = np.array([seed, sample_index], np.uint64)
    upper, lower = (np.random.Philox(counter=[0, position, 0, lane], key=key).random_raw(size) for lane in (0, 3))
    upper = np.stack((upper & np.uint64(2**32 - 1), upper >> np.uint64(32)), axis=1).ravel()[:size]
    exponential = -np.log1p(-((upper << np.uint64(21)) + (lower >> np.uint64(43))).astype(np.float64) / 2.0**53)
    with np.errstate(divide="ignore"):
        return int(np.argmin(exponential / made.dense(size)))


def test_coupled_token_equals_the_plain_rule():
    rng = np.random.default_rng(6)
    for case in range(300):
        logits = (rng.standard_normal(40_000) * rng.choice([0.01, 2.0, 5.0])).astype(np.float32)
        options = SamplingOptions(temperature=1.0, top_k=int(rng.choice([0, 2, 20, 2000])))
        made = distribution(logits, None, options, tokens=40_000)
        got = coupled_token(made, seed=2**64 - 1 - case, sample_index=case % 3, position=case * 1000)
        assert got == plain_coupled(made, 2**64 - 1 - case, case % 3, case * 1000)


def test_noise_of_a_token_does_not_depend_on_the_support():
    rng = np.random.default_rng(7)
    noise = CoupledNoise(5, 6, 0)
    row = noise.of(np.arange(30_000), 7)
    assert row.dtype == np.uint64
    assert 2**53 - 2**40 < int(row.max()) < 2**53
    np.testing.assert_array_equal(noise.row(29_999, 7), (row >> np.uint64(21))[:29_999])
    for count in (1, 2, 5, 17, 29, 31, 500):
        ids = np.sort(rng.choice(30_000, count, replace=False))
        np.testing.assert_array_equal(noise.of(ids, 7), row[ids])
    near = np.array([28_000, 28_001, 28_002, 28_003, 28_004, 28_007])
    np.testing.assert_array_equal(noise.of(near, 7), row[near])


def test_a_winner_still_wins_in_any_smaller_support():
    rng = np.random.default_rng(8)
    for position in range(300):
        weights = rng.random(50)
        winner = coupled_token(Distribution.from_dense(weights), seed=1, sample_index=0, position=position)
        weights[(rng.random(50) < 0.5) & (np.arange(50) != winner)] = 0.0
        assert coupled_token(Distribution.from_dense(weights), seed=1, sample_index=0, position=position) == winner


GOLDEN_TOKENS = [23, 10, 19, 23, 19, 24, 24, 31, 7, 31, 1, 27, 12, 27, 24, 27]
GOLDEN_UNIFORMS = [0.7988044735362144, 0.7160305204605244, 0.3050671127018323]


def test_coupled_tokens_are_the_same_on_every_platform():
    made = Distribution.from_dense(np.arange(1, 33))
    got = [coupled_token(made, seed=42, sample_index=0, position=position) for position in range(16)]
    assert got == GOLDEN_TOKENS
    stream = RandomStream(42, 1)
    assert [stream.uniform() for _ in range(3)] == GOLDEN_UNIFORMS


def texts(seed, count=1, length=12, temperature=2.0):
    """Plain coupled decoding of a fixed 8-token table."""
    table = np.random.default_rng(9).normal(0, 1.5, (8, 8)).astype(np.float32)
    options = SamplingOptions(temperature=temperature)
    result = []
    for sample_index in range(count):
        text = [0]
        for position in range(1, length + 1):
            made = distribution(table[text[-1]], None, options, tokens=8)
            text.append(coupled_token(made, seed=seed, sample_index=sample_index, position=position))
        result.append(tuple(text))
    return result


def test_vllm_6038_same_seed_same_ids():
    """vllm#6038: temperature 2, seed 42, twice."""
    assert texts(42) == texts(42)


def test_vllm_9441_parallel_seeds_do_not_disturb_each_other():
    """vllm#9441: interleaved in one thread, and in several threads."""
    alone = {seed: texts(seed)[0] for seed in range(4)}
    got = {}
    threads = [threading.Thread(target=lambda seed=seed: got.update({seed: texts(seed)[0]})) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == alone
    solo = [[stream.uniform() for _ in range(5)] for stream in map(RandomStream, range(3))]
    streams = list(map(RandomStream, range(3)))
    woven = [[stream.uniform() for stream in streams] for _ in range(5)]
    assert [list(column) for column in zip(*woven, strict=True)] == solo


def test_vllm_13196_seeds_differ():
    """vllm#13196: seeds 1..20 give several outputs; here, of 12 tokens at temperature 2, all differ."""
    assert len({texts(seed)[0] for seed in range(1, 21)}) == 20


def test_tokenspeed_1613_samples_of_one_seed_are_distinct_and_repeatable():
    """tokenspeed#1613: n = 8 gives 8 samples, and the same set on a rerun."""
    first = texts(3, count=8)
    assert len(set(first)) == 8
    assert texts(3, count=8) == first


def test_positions_are_independent():
    made = Distribution.from_dense(np.ones(4))
    pairs = np.zeros((4, 4))
    tokens = [coupled_token(made, seed=0, sample_index=0, position=position) for position in range(20_001)]
    for left, right in itertools.pairwise(tokens):
        pairs[left, right] += 1
    assert scipy.stats.chisquare(pairs.ravel()).pvalue > 1e-3


def test_sample_is_the_inverse_of_the_cumulative_distribution():
    made = Distribution(np.array([2, 5, 9]), np.array([0.25, 0.5, 0.25]))
    assert [sample(made, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [2, 2, 5, 5, 9, 9]


def test_stream_is_uniform():
    values = [stream.uniform() for stream in [RandomStream(1, 2)] for _ in range(20_000)]
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
    assert min(values) >= 0.0
    assert max(values) < 1.0


# --- log-probabilities


def test_logprobs_are_the_log_softmax_over_the_real_tokens():
    rng = np.random.default_rng(10)
    logits = (rng.standard_normal(64) * 4).astype(np.float32)
    want = scipy.special.log_softmax(logits[:60].astype(np.float64))
    assert [logprob(logits, token, tokens=60) for token in range(60)] == pytest.approx(want.tolist(), abs=1e-12)
    got = top_logprobs(logits, 5, tokens=60)
    assert [token for token, _ in got] == np.argsort(-want, kind="stable")[:5].tolist()
    assert [value for _, value in got] == pytest.approx(np.sort(want)[::-1][:5].tolist(), abs=1e-12)
    assert top_logprobs(logits, 0, tokens=60) == []
    assert len(top_logprobs(logits, 500, tokens=60)) == 60
    assert [token for token, _ in top_logprobs(np.zeros(5, np.float32), 3, tokens=5)] == [0, 1, 2]


def test_llama_cpp_27972_a_nearly_certain_token_is_not_zero():
    """llama.cpp#27972, vllm#17876: accepted tokens have a real log-probability, never 0.0."""
    logits = np.array([0.0, 60.0, 1.0], np.float32)
    assert logprob(logits, 1, tokens=3) == pytest.approx(-(math.exp(-60) + math.exp(-59)), rel=1e-12)
    assert logprob(logits, 1, tokens=3) < 0.0
