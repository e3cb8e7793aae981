"""Synthetic acceptance: the chance that was asked for, plain decoding's text, the cost of the real proposer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specrun.models_cache.errors import UsageError
from specrun.runtime import Engine, Stream
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.draft import DraftProposer
from specrun.runtime.proposers.synthetic import SyntheticProposer
from specrun.runtime.request import request_options
from specrun.runtime.session import ModelSession
from specrun.runtime.synthetic import (
    SyntheticCell,
    default_method,
    expected_tokens,
    run_synthetic,
    summarise_synthetic,
    synthetic_label,
    tokens_deviation,
)

from .bench_values import BENCH_PROMPTS, run
from .conftest import TinyModels
from .tiny_bundles import PROMPT


def synthetic_stream(
    engine: Engine, method: str, k: int, alpha: float, *, draws: int = 0, tokens: int = 60, **options: Any
) -> Stream:
    text = engine.generate(PROMPT, method="none", max_tokens=tokens, ignore_eos=True, **options).token_ids
    engine.reset()

    def wrap(inner: Any) -> SyntheticProposer:
        rng = np.random.default_rng(draws)
        size = engine.bundle.manifest.sizes.tokens
        return SyntheticProposer(inner, text, acceptance=alpha, draft_length=k, tokens=size, rng=rng)

    request = request_options(method=method, draft_length=k, max_tokens=tokens, ignore_eos=True, **options)
    return Stream(engine, PROMPT, request, wrap=wrap)


@pytest.mark.parametrize("method", ["none", "ngram", "draft", "eagle", "medusa"])
@pytest.mark.parametrize(("k", "alpha"), [(1, 0.5), (4, 0.0), (4, 0.7), (4, 1.0), (8, 0.9)])
def test_the_text_is_that_of_plain_decoding(models: TinyModels, method: str, k: int, alpha: float) -> None:
    engine = models.engine("heads")
    plain = engine.generate(PROMPT, method="none", max_tokens=60, ignore_eos=True)
    stream = synthetic_stream(engine, method, k, alpha)
    assert "".join(piece.text for piece in stream) == plain.text
    result = stream.result
    assert result.token_ids == plain.token_ids
    counts = result.speculation
    if alpha == 0.0:
        assert (counts.accepted, counts.rounds) == (0, 59)
    if alpha == 1.0:
        assert counts.accepted == counts.evaluated
        assert counts.rounds == -(-59 // (k + 1))
    # The draft's cache, which held guesses in place of the text, is not taken for true.
    engine.reset()
    assert engine.generate(PROMPT, method=method, max_tokens=60, ignore_eos=True).token_ids == plain.token_ids


@pytest.mark.parametrize("options", [{"temperature": 0.9, "seed": 7}, {"temperature": 0.7, "top_k": 20, "seed": 3}])
def test_sampled_texts_too(models: TinyModels, options: dict[str, Any]) -> None:
    engine = models.engine("tgt", "mix")
    plain = engine.generate(PROMPT, method="none", max_tokens=60, ignore_eos=True, **options)
    stream = synthetic_stream(engine, "draft", 4, 0.6, **options)
    for _ in stream:
        continue
    assert stream.result.token_ids == plain.token_ids


@pytest.mark.parametrize(("k", "alpha"), [(1, 0.3), (4, 0.7), (8, 0.9)])
def test_the_acceptance_is_realised(models: TinyModels, k: int, alpha: float) -> None:
    """Accepted counts have the distribution of independent draws (chi-squared), their share is alpha (binomial).

    The last round of a text, which its end may cut, is one in a hundred or so.
    """
    engine = models.engine("tgt")
    accepted: Counter[int] = Counter()
    stood = decided = 0
    for draws in range(100, 112):
        stream = synthetic_stream(engine, "none", k, alpha, draws=draws, tokens=250)
        for _ in stream:
            continue
        counts = stream.result.speculation
        stood, decided = stood + counts.accepted, decided + counts.evaluated
        accepted += counts.histogram
    assert stats.binomtest(stood, decided, alpha).pvalue > 0.01
    rounds = sum(accepted.values())
    chances = [alpha**n * (1 - alpha) for n in range(k)] + [alpha**k]
    observed = [accepted[n] for n in range(k + 1)]
    assert stats.chisquare(observed, [rounds * chance for chance in chances]).pvalue > 0.01


def test_draws_do_not_hang_together() -> None:
    """Draft tokens of a proposal stand independently: neighbours agree as often as chance has it."""
    rng = np.random.default_rng(1)
    text = list(range(100, 5100))
    proposer = SyntheticProposer(None, text, acceptance=0.6, draft_length=5000, tokens=10_000, rng=rng)
    proposer.start([1, 2, 3])
    proposal = proposer.propose([1, 2, 3], 5000)
    right = np.array(proposal.tokens) == np.array(text)
    assert stats.binomtest(int(right.sum()), 5000, 0.6).pvalue > 0.01
    table = [[int(((right[:-1] == a) & (right[1:] == b)).sum()) for b in (False, True)] for a in (False, True)]
    assert stats.chi2_contingency(table).pvalue > 0.01


def test_proposals_go_along_with_the_text() -> None:
    def propose(alpha: float, context: list[int], limit: int, k: int = 4) -> Proposal:
        rng = np.random.default_rng(0)
        proposer = SyntheticProposer(None, [7, 8, 9, 5, 6], acceptance=alpha, draft_length=k, tokens=10, rng=rng)
        proposer.start([1, 2])
        return proposer.propose(context, limit)

    assert propose(1.0, [1, 2, 7], 8).tokens == (8, 9, 5, 6)
    assert propose(0.0, [1, 2, 7], 8).tokens == (9, 0, 6, 7)  # each another token of the vocabulary
    assert propose(1.0, [1, 2], 8, k=2).tokens == (7, 8)
    assert propose(1.0, [1, 2, 7], 1).tokens == (8,)
    assert propose(1.0, [1, 2, 7, 8, 9, 5], 8).tokens == (6,)
    assert propose(1.0, [1, 2, 7], 0) == EMPTY
    assert propose(1.0, [1, 2, 7, 8, 9, 5, 6], 8) == EMPTY
    assert propose(1.0, [1, 2, 7], 8).kind == "deterministic"


@pytest.mark.parametrize("k", [1, 3])
def test_rounds_run_the_draft_as_often_as_real_ones(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """K runs of the draft in each round, the first one over what was committed since; the prompt is read before."""
    engine = models.engine("tgt", "mix")
    target = engine.target
    drafted: list[list[int]] = [[]]
    run_batch = ModelSession.run_batch

    def counted(self: ModelSession, tokens: Any, **options: Any) -> Any:
        if self is target:
            drafted.append([])
        else:
            drafted[-1].append(len(tokens[0]))
        return run_batch(self, tokens, **options)

    stream = synthetic_stream(engine, "draft", k, 0.8, tokens=80)
    monkeypatch.setattr(ModelSession, "run_batch", counted)
    for _ in stream:
        continue
    prefill, *rounds = [runs for runs in drafted if runs]
    assert prefill == [stream.result.usage.prompt_tokens]
    assert all(len(runs) == k and runs[0] in (1, 2) and runs[1:] == [1] * (k - 1) for runs in rounds[:-1])
    twos = sum(runs[0] == 2 for runs in rounds)  # after a round that stood as a whole the draft is two tokens behind
    assert twos == pytest.approx(stream.result.speculation.histogram[k], abs=1)


def test_what_the_inner_proposer_learns_fits_its_own_proposals() -> None:
    """It hears of no more draft tokens than it made."""
    heard: list[tuple[int, int, tuple[int, ...]]] = []

    class Short:
        name, needs_features = "short", True

        def start(self, prompt_tokens: Any) -> None: ...
        def take_features(self, position: int, features: Any) -> None: ...
        def rewind_to(self, length: int) -> None: ...
        def close(self) -> None: ...

        def propose(self, context: Any, limit: int) -> Proposal:
            return Proposal((5, 6), "deterministic")

        def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
            heard.append((evaluated, accepted, path))

    rng = np.random.default_rng(0)
    proposer = SyntheticProposer(Short(), range(20), acceptance=1.0, draft_length=4, tokens=99, rng=rng)
    assert proposer.needs_features
    proposer.start([])
    assert len(proposer.propose([], 8)) == 4
    for evaluated, accepted in ((4, 4), (3, 2), (1, 0), (0, 0)):
        proposer.observe(evaluated=evaluated, accepted=accepted, path=tuple(range(accepted)))
    assert heard == [(2, 2, (0, 1)), (2, 2, (0, 1)), (1, 0, ()), (0, 0, ())]
    assert (proposer.proposed, proposer.drafted) == (4, 2)


# the bench


def cells_of(engine: Engine, **options: Any) -> list[SyntheticCell]:
    return summarise_synthetic(run_synthetic(engine, BENCH_PROMPTS, **options).runs)


def test_cells(models: TinyModels) -> None:
    engine = models.engine("tgt", "mix")
    options: dict[str, Any] = {"acceptances": (0.5, 0.9), "draft_lengths": (2, 4), "max_tokens": 60, "repeats": 6}
    cells = cells_of(engine, **options)
    assert [(cell.draft_length, cell.acceptance) for cell in cells] == [(k, a) for k in (2, 4) for a in (0, 0.5, 0.9)]
    for cell in cells:
        assert (cell.model, cell.method) == ("tgt", "draft")
        assert cell.equal
        assert cell.draft > 0
        assert cell.verify > 0
        assert cell.rest > 0
        assert cell.expected_tokens == expected_tokens(cell.acceptance, cell.draft_length)
        # Whole rounds to a stopping time: the mean is that of a round (Wald), no round is cut short.
        assert abs(cell.mean_accepted_tokens - cell.expected_tokens) <= 3.5 * cell.tokens_error
        assert cell.predicted == pytest.approx(cell.expected_tokens / (cell.draft + cell.verify + cell.rest))
        assert cell.error == pytest.approx(cell.predicted / cell.speedup - 1)
    assert engine.generate(PROMPT, method="none", max_tokens=4).usage.cached_tokens == 0


def test_runs_differ_by_repeat_and_are_the_same_again(models: TinyModels, tmp_path: Any) -> None:
    engine = models.engine("tgt", "mix")
    options: dict[str, Any] = {"acceptances": (0.5,), "draft_lengths": (4,), "max_tokens": 40, "repeats": 3}
    first = run_synthetic(engine, BENCH_PROMPTS[:1], **options, output=tmp_path / "a.jsonl")
    again = run_synthetic(engine, BENCH_PROMPTS[:1], **options)

    def counts(found: Any) -> list[tuple[int, int]]:
        return [(r.accepted, r.evaluated) for r in found.runs if r.method.endswith("@0.5")]

    assert counts(first) == counts(again)
    assert len(set(counts(first))) > 1
    other = run_synthetic(engine, BENCH_PROMPTS[:1], **options, seed=1)
    assert counts(other) != counts(first)
    text = (tmp_path / "a.jsonl").read_text()
    assert run_synthetic(engine, BENCH_PROMPTS[:1], **options, output=tmp_path / "a.jsonl") == first
    assert (tmp_path / "a.jsonl").read_text() == text
    for change in ({"seed": 1}, {"max_tokens": 41}, {"draft_lengths": (8,)}):  # the last: texts of another length
        with pytest.raises(UsageError, match="other settings"):
            run_synthetic(engine, BENCH_PROMPTS[:1], **(options | change), output=tmp_path / "a.jsonl")


def test_whose_drafting_is_paid_for(models: TinyModels) -> None:
    assert default_method(models.engine("tgt")) == "none"
    assert default_method(models.engine("tgt", "mix")) == "draft"
    assert default_method(models.engine("heads")) == "draft"
    assert default_method(models.engine("heads", "eagle")) == "eagle"
    options: dict[str, Any] = {"acceptances": (0.5,), "draft_lengths": (2,), "max_tokens": 20, "repeats": 1}
    free = cells_of(models.engine("tgt"), **options)[-1]
    assert free.method == "none"
    assert 0 <= free.draft < 0.5  # nothing is run
    cells = cells_of(models.engine("heads"), **options, methods=["medusa", "eagle", "ngram"])
    assert [cell.method for cell in cells] == ["medusa", "medusa", "eagle", "eagle", "ngram", "ngram"]
    assert all(cell.equal for cell in cells)


def test_what_cannot_be_timed(models: TinyModels) -> None:
    engine = models.engine("tgt-64", "mix")
    options: dict[str, Any] = {"acceptances": (0.5,), "draft_lengths": (2,), "repeats": 1}
    with pytest.raises(UsageError, match=r"Prompt 1 needs \d+ positions and the context has 64"):
        run_synthetic(engine, BENCH_PROMPTS, max_tokens=40, **options)
    for method in ("draft+ngram", "ngram:4", "lookahead"):
        with pytest.raises(UsageError, match="no single way"):
            run_synthetic(engine, BENCH_PROMPTS, methods=[method], **options)
    with pytest.raises(UsageError, match="eagle"):
        run_synthetic(engine, BENCH_PROMPTS, methods=["eagle"], **options)
    assert len(engine.encode(BENCH_PROMPTS[0].prompt)) < 48
    short = models.engine("tgt", "mix-48")
    with pytest.raises(UsageError, match="does not fit the draft's context"):
        run_synthetic(short, BENCH_PROMPTS, max_tokens=40, **options)


# arithmetic


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_tokens_of_a_round(alpha: float, k: int) -> None:
    """Against the distribution written out, and Leviathan's closed form."""
    chances = np.array([alpha**n * (1 - alpha) for n in range(k)] + [alpha**k])
    tokens = np.arange(1, k + 2)
    mean = float(chances @ tokens)
    assert expected_tokens(alpha, k) == pytest.approx(mean)
    assert tokens_deviation(alpha, k) == pytest.approx(float(np.sqrt(chances @ (tokens - mean) ** 2)), abs=1e-6)
    closed = (1 - alpha ** (k + 1)) / (1 - alpha) if alpha < 1 else k + 1
    assert expected_tokens(alpha, k) == pytest.approx(closed)


def test_cell_arithmetic() -> None:
    """Costs from rounds of acceptance 0, medians over repeats, prompts by their rounds."""
    runs = [run(decode_s=1.0), run(id="2", decode_s=3.0), run(method="none", decode_s=1.5)]  # 0.1, 0.3; 0.15
    runs += [run(id="2", method="none", decode_s=3.5)]  # 0.35
    wrong = {"method": synthetic_label("draft", 2, 0.0), "rounds": 10}
    for repeat, factor in enumerate((1.0, 1.0, 50.0)):  # the median leaves the slow one out
        runs += [run(repeat=repeat, decode_s=2.0 * factor, draft_s=0.5 * factor, verify_s=1.4 * factor, **wrong)]
    runs += [run(id="2", decode_s=6.0, draft_s=1.5, verify_s=4.4, **wrong)]
    label = synthetic_label("draft", 2, 0.5)
    runs += [run(method=label, tokens=13, rounds=6, decode_s=1.2, accepted=6, evaluated=11)]
    runs += [run(id="2", method=label, tokens=12, rounds=8, decode_s=4.8, accepted=4, evaluated=9)]
    zero, cell = summarise_synthetic(runs)
    assert (zero.acceptance, cell.acceptance, cell.draft_length, cell.method) == (0.0, 0.5, 2, "draft")
    base = (0.1 + 0.3) / 2
    assert cell.draft == pytest.approx((0.05 + 0.15) / 2 / base)
    assert cell.verify == pytest.approx((0.14 + 0.44) / 2 / base)
    assert cell.rest == pytest.approx((0.01 + 0.01) / 2 / base)
    assert zero.speedup == pytest.approx(base / ((30 * 0.2 + 10 * 0.6) / 40))
    assert cell.rounds == 14
    assert cell.acceptance_rate == pytest.approx(10 / 20)
    assert cell.mean_accepted_tokens == pytest.approx((12 + 11) / 14)
    assert cell.tokens_error == pytest.approx(tokens_deviation(0.5, 2) / np.sqrt(14))
    assert cell.expected_tokens == pytest.approx(1.75)
    assert cell.speedup == pytest.approx(23 * base / (6 * 0.2 + 8 * 0.6))
    assert cell.speedup_exact == pytest.approx(23 * 0.25 / (6 * 0.2 + 8 * 0.6))
    total = cell.draft + cell.verify + cell.rest
    assert cell.predicted == pytest.approx(1.75 / total)
    assert cell.predicted_realised == pytest.approx(23 / 14 / total)
    assert cell.theorem == pytest.approx(1.75 / (1 + cell.draft))
    assert cell.equal
    other = [*runs[:-1], run(id="2", method=label, tokens=12, rounds=8, decode_s=4.8, ids_digest="y")]
    assert not summarise_synthetic(other)[1].equal


def test_the_essays_table() -> None:
    """Theorem 3.8 at phi = 0.1: the values that its formula gives."""
    for alpha, k, wanted in ((0.5, 2, 1.46), (0.7, 5, 1.96), (0.75, 5, 2.19), (0.9, 8, 3.40)):
        assert expected_tokens(alpha, k) / (0.1 * k + 1) == pytest.approx(wanted, abs=0.005)


def test_the_draft_itself_drafts(models: TinyModels) -> None:
    """The wrapped proposer is the request's own."""
    engine = models.engine("tgt", "mix")
    inner: list[Any] = []

    def wrap(own: Any) -> Any:
        inner.append(own)
        return own

    request = request_options(method="draft", draft_length=2, max_tokens=4)
    for _ in Stream(engine, PROMPT, request, wrap=wrap):
        continue
    assert isinstance(inner[0], DraftProposer)
