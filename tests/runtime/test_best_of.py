"""Best of N: samples behind one stored prompt are those of plain decoding, and cost what is said."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import SHARED_GRAPH
from specrun.runtime import BestOfResult, Candidate, Engine
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.best_of.result import choose
from specrun.runtime.best_of.run import BestOf, Progress
from specrun.runtime.best_of.siblings import SiblingTexts
from specrun.runtime.cost_model import pass_at_k
from specrun.runtime.ngram_table import Match

from .checks import text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .toys import TOY_IDS, TOY_LOGITS

RAW: dict[str, Any] = {"raw": True, "max_tokens": 24, "seed": 11}
LONG = "a b c a b d a b c a b e " * 6


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which wide rounds pay; those measured on a tiny model are mostly noise."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)


class Longest:
    """The longest text wins."""

    name = "longest"

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        return [float(len(candidate.text)) for candidate in candidates]


class Plain:
    """Nothing has a chance."""

    name = "none of them"

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        return [float("-inf")] * len(candidates)


def texts(result: BestOfResult) -> list[tuple[tuple[int, ...], str, str]]:
    return [(candidate.token_ids, candidate.text, candidate.finish_reason) for candidate in result.candidates]


@pytest.mark.parametrize("options", [{}, {"top_k": 30, "top_p": 0.9}, {"frequency_penalty": 0.4}, {"ignore_eos": True}])
@pytest.mark.parametrize("name", ["tgt", "tgt-int8", "tgt-source"])
def test_speculation_and_company_change_no_bit(
    models: TinyModels, wide: None, name: str, options: dict[str, Any]
) -> None:
    """The same text and log-probabilities whatever N, the method and K; rows end at different rounds."""
    engine = models.engine(name)
    options = {"temperature": 0.5, **RAW, **options}
    plain = engine.best_of(PROMPT, n=7, method="none", certainties=True, **options)
    assert plain.exactness == "bitwise"
    assert len({candidate.token_ids for candidate in plain.candidates}) > 1
    for n, own in ((7, {"method": "ngram"}), (7, {"method": "ngram", "draft_length": 5}), (3, {}), (1, {})):
        found = engine.best_of(PROMPT, n=n, certainties=True, **(options | own))
        assert found.candidates == plain.candidates[:n]
    assert plain.speculation.proposed == 0


def test_siblings_help_each_other(models: TinyModels, wide: None) -> None:
    engine = models.engine("tgt")
    found = engine.best_of(LONG, n=6, method="ngram", temperature=0.3, **RAW)
    counts = found.speculation
    assert 0 < counts.accepted <= counts.evaluated <= counts.proposed
    tokens = sum(len(candidate.token_ids) for candidate in found.candidates)
    assert tokens == 6 + counts.accepted + counts.corrections + counts.bonuses - counts.discarded
    assert counts.rounds < tokens - 6


def test_what_one_sample_wrote_another_finds() -> None:
    texts = SiblingTexts([1, 2, 3], max_n=3, eos_ids=(0,))
    texts.extend(0, [4, 5, 6, 7, 0], 3)
    assert texts.lookup([9, 4, 5], 4) == Match(2, (6, 7))
    assert texts.lookup([9, 8], 4) is None
    texts.extend(1, [4, 5, 6, 8], 3)
    found = texts.lookup([2, 3, 4, 5], 4)  # the prompt's last tokens lead to both; the newer one goes first
    assert found == Match(4, (6, 8))
    assert found is not None
    assert found.agreement == ("siblings", "sibling")
    texts.extend(1, [6, 8, 9], 5)  # of which the first two are known
    assert texts.lookup([6, 8], 4) == Match(2, (9,))
    assert texts.lookup([6, 7], 4) is None  # only the end followed


def test_samples_are_those_of_generate_up_to_rounding(models: TinyModels) -> None:
    """On fp32 the other graph differs by rounding alone, which flips no token here."""
    engine = models.engine("tgt")
    found = engine.best_of(PROMPT, n=4, **RAW)
    for candidate in found.candidates:
        alone = engine.generate(PROMPT, temperature=0.8, sample_index=candidate.index, logprobs=0, **RAW)
        assert candidate.token_ids == alone.token_ids
        assert candidate.finish_reason == alone.finish_reason
        expected = [token.logprob for token in alone.tokens]
        np.testing.assert_allclose(candidate.logprobs, np.array(expected, float), atol=1e-4)


def test_samples_follow_the_distribution(models: TinyModels) -> None:
    """Chi-squared of the pairs that 4,000 samples begin with, against the toy's own probabilities."""
    engine = models.engine("toy")
    pairs = np.zeros((8, 8))
    start = TOY_IDS[0]
    for seed in range(4):
        found = engine.best_of("a", n=1000, raw=True, max_tokens=2, ignore_eos=True, temperature=1.0, seed=seed)
        for candidate in found.candidates:
            first, second = (TOY_IDS.index(token) for token in candidate.token_ids)
            pairs[first, second] += 1
    logits = np.asarray(TOY_LOGITS)[np.ix_(TOY_IDS, TOY_IDS)]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = (p[TOY_IDS.index(start), :, None] * p).ravel() * pairs.sum()
    kept = expected >= 5
    observed, wanted = pairs.ravel()[kept], expected[kept]
    rest = pairs.sum() - observed.sum(), expected.sum() - wanted.sum()
    statistic = ((observed - wanted) ** 2 / wanted).sum() + (rest[0] - rest[1]) ** 2 / max(rest[1], 1e-9)
    assert scipy.stats.chi2.sf(statistic, kept.sum()) > 1e-3


def test_the_rejection_rule(models: TinyModels, wide: None) -> None:
    """Exact in distribution: the same seed gives the same samples by the same method."""
    engine = models.engine("tgt")
    options = RAW | {"sampling": "rejection", "temperature": 0.5}
    first = engine.best_of(PROMPT, n=4, method="none", **options)
    assert first.exactness == "distribution"
    assert engine.best_of(PROMPT, n=4, method="none", **options).candidates == first.candidates
    drafted = engine.best_of(PROMPT, n=4, method="ngram", **options)
    assert all(candidate.token_ids for candidate in drafted.candidates)


def test_a_constraint_holds_for_every_sample(models: TinyModels) -> None:
    found = models.engine("tgt").best_of("Yes or no?", n=5, raw=True, regex="(yes|no)", seed=1)
    assert {candidate.text for candidate in found.candidates} <= {"yes", "no"}


def test_more_samples_than_rows(models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    engine = models.engine("tgt")
    together = engine.best_of(PROMPT, n=9, **RAW)
    monkeypatch.setattr("specrun.runtime.best_of.run.MOST_ROWS", 2)
    two = engine.best_of(PROMPT, n=9, **RAW)
    assert two.candidates == together.candidates
    assert two.memory.kv_rows_bytes * 9 == together.memory.kv_rows_bytes * 2


def test_the_buffers_that_are_counted(models: TinyModels) -> None:
    """2 layers, 2 key/value heads of 16; a row has a slot for the prompt, its tokens and 8 spare ones."""
    engine = models.engine("tgt")
    prompt = text_of(200)
    found = engine.best_of(prompt, n=4, raw=True, max_tokens=100, ignore_eos=True, seed=1)
    position = 2 * 2 * 2 * 16 * 4
    memory, tokens = found.memory, found.usage.prompt_tokens
    assert memory.kv_prefix_bytes == tokens * position == engine.memory().kv_target_bytes
    assert memory.kv_rows_bytes == 4 * (1 + 100 + 8) * position
    assert memory.kv_copied_bytes == 4 * (tokens + 100 + 8) * position
    assert memory.kv_saved == pytest.approx(1 - (tokens + 4 * 109) / (4 * (tokens + 108)))


def test_prompts_share_their_beginning(models: TinyModels) -> None:
    engine = models.engine("tgt")
    first = engine.best_of("the rule is the same: one", n=2, **RAW)
    again = engine.best_of("the rule is the same: two", n=2, **RAW)
    assert first.usage.cached_tokens == 0
    assert 15 < again.usage.cached_tokens < again.usage.prompt_tokens
    engine.reset()
    assert engine.best_of("the rule is the same: two", n=2, **RAW).candidates == again.candidates


def test_the_engine_goes_on_as_before(models: TinyModels) -> None:
    engine = models.engine("tgt")
    before = engine.generate(PROMPT, method="none", max_tokens=40, raw=True)
    engine.best_of(PROMPT, n=3, **RAW)
    after = engine.generate(PROMPT, method="none", max_tokens=40, raw=True)
    assert after.token_ids == before.token_ids
    assert after.usage.cached_tokens == after.usage.prompt_tokens - 1
    assert engine.drafting.table.earlier_size == 0


def test_the_score_chooses(models: TinyModels) -> None:
    engine = models.engine("tgt")
    found = engine.best_of(PROMPT, n=6, score=Longest(), **RAW)
    assert found.score == "longest"
    assert found.winner is not None
    assert len(found.text) == max(found.scores)
    assert found.winner.index == found.scores.index(max(found.scores))
    by_logprob = engine.best_of(PROMPT, n=6, **RAW)
    expected = [float(np.mean(candidate.logprobs)) for candidate in by_logprob.candidates]
    np.testing.assert_allclose(by_logprob.scores, expected)
    nothing = engine.best_of(PROMPT, n=2, score=Plain(), **RAW)
    assert nothing.winner is None
    assert nothing.text == ""
    assert nothing.to_json(candidates=True)["candidates"][0]["score"] is None


def test_certainties(models: TinyModels) -> None:
    """KL(uniform || p), by the logits of the prompt."""
    engine = models.engine("tgt")
    (candidate,) = engine.best_of(PROMPT, n=1, certainties=True, **RAW).candidates
    logits = engine.logits(engine.encode(PROMPT, raw=True))[: engine.bundle.manifest.sizes.tokens].astype(float)
    logs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert candidate.certainties[0] == pytest.approx(-np.mean(np.log(len(logits)) + logs), abs=1e-4)
    assert candidate.logprobs[0] == pytest.approx(logs[candidate.token_ids[0]], abs=1e-4)
    assert len(candidate.certainties) == len(candidate.token_ids)
    assert engine.best_of(PROMPT, n=1, **RAW).candidates[0].certainties == ()


def test_hopeless_samples_are_ended(models: TinyModels) -> None:
    engine = models.engine("tgt")
    options = RAW | {"max_tokens": 60, "temperature": 1.5}
    whole = engine.best_of(PROMPT, n=16, **options)
    pruned = engine.best_of(PROMPT, n=16, prune=True, **options)
    assert pruned.winner == whole.winner
    assert pruned.pruned
    for index, candidate in enumerate(pruned.candidates):
        own = whole.candidates[index]
        assert candidate.token_ids == own.token_ids[: len(candidate.token_ids)]
        assert (candidate.finish_reason == "cancelled") == (index in pruned.pruned)
    with pytest.raises(UsageError, match="leave prune out"):
        engine.best_of(PROMPT, n=2, prune=True, score=Longest(), **RAW)


def test_budgets_end_all_samples(models: TinyModels) -> None:
    engine = models.engine("tgt")
    found = engine.best_of(PROMPT, n=4, budget_tokens=20, method="none", ignore_eos=True, **RAW)
    assert found.usage.completion_tokens == 20
    assert found.cut == (0, 1, 2, 3)
    assert {candidate.finish_reason for candidate in found.candidates} == {"length"}
    assert [len(candidate.token_ids) for candidate in found.candidates] == [5] * 4
    assert found.winner is not None
    late = engine.best_of(PROMPT, n=4, budget_s=1e-6, ignore_eos=True, **RAW)
    assert [len(candidate.token_ids) for candidate in late.candidates] == [1] * 4


def test_cancellation_leaves_the_engine_usable(models: TinyModels) -> None:
    engine = models.engine("tgt")
    whole = engine.best_of(PROMPT, n=3, ignore_eos=True, **RAW)

    def end(progress: Progress) -> None:
        if progress.tokens >= 12:
            run.cancel()

    run = BestOf(engine, PROMPT, {"ignore_eos": True, **RAW}, n=3, progress=end)
    found = run.run()
    assert {candidate.finish_reason for candidate in found.candidates} == {"cancelled"}
    for candidate, own in zip(found.candidates, whole.candidates, strict=True):
        assert 4 <= len(candidate.token_ids) < 24
        assert candidate.token_ids == own.token_ids[: len(candidate.token_ids)]
    assert engine.best_of(PROMPT, n=3, ignore_eos=True, **RAW).candidates == whole.candidates

    def fail(progress: Progress) -> None:
        raise RuntimeError("the reader has gone")

    with pytest.raises(RuntimeError):
        engine.best_of(PROMPT, n=3, progress=fail, **RAW)
    assert engine.best_of(PROMPT, n=3, ignore_eos=True, **RAW).candidates == whole.candidates
    early = BestOf(engine, PROMPT + "!", dict(RAW), n=3)  # type: ignore[arg-type]
    early.cancel()
    nothing = early.run()
    assert nothing.winner is None
    assert nothing.candidates == ()


def test_threads_and_tasks_take_turns(models: TinyModels) -> None:
    engine = models.engine("tgt")
    whole = engine.best_of(PROMPT, n=3, **RAW)
    found: list[BestOfResult] = []
    threads = [threading.Thread(target=lambda: found.append(engine.best_of(PROMPT, n=3, **RAW))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def both() -> list[Any]:
        return await asyncio.gather(engine.abest_of(PROMPT, n=3, **RAW), engine.agenerate(PROMPT, **RAW))

    first, _ = asyncio.run(both())
    assert [result.candidates for result in (*found, first)] == [whole.candidates] * 4

    async def cancelled() -> None:
        task = asyncio.create_task(engine.abest_of(PROMPT, n=3, ignore_eos=True, **(RAW | {"max_tokens": 400})))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert engine.best_of(PROMPT, n=3, **RAW).candidates == whole.candidates


def test_labels_give_pass_at_k(models: TinyModels) -> None:
    engine = models.engine("tgt")
    found = engine.best_of(PROMPT, n=6, right=lambda candidate: candidate.index < 2, **RAW)
    assert found.pass_at_k == {1: pytest.approx(2 / 6), 2: pytest.approx(1 - 6 / 15), 4: pytest.approx(14 / 15), 6: 1.0}
    assert pass_at_k(5, 0, 3) == 0.0
    assert engine.best_of(PROMPT, n=2, **RAW).pass_at_k is None


def test_what_cannot_be(models: TinyModels) -> None:
    engine = models.engine("tgt")
    for wrong, words in (
        ({"n": 0}, "n must be"),
        ({"n": True}, "n must be"),
        ({"temperature": 0.0}, "all 16 samples are the same"),
        ({"sample_index": 1}, "leave sample_index out"),
        ({"method": "lookahead"}, "one request at a time"),
        ({"budget_tokens": 0}, "budget_tokens must be 1"),
        ({"budget_s": -1.0}, "budget_s must be above 0"),
        ({"max_tokens": 0}, "max_tokens of 1"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.best_of(PROMPT, **wrong)
    assert engine.best_of(PROMPT, n=1, temperature=0.0, raw=True, max_tokens=3).seed is None
    candidate = Candidate(0, "x", (1,), "stop", (), ())
    with pytest.raises(UsageError, match="is no number"):
        choose([candidate], [float("nan")])

    class Short(Longest):
        def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
            return []

    with pytest.raises(SpecrunError, match="gave 0 numbers for 2"):
        engine.best_of(PROMPT, n=2, score=Short(), **RAW)


def test_a_bundle_without_the_graph(models: TinyModels) -> None:
    bundle = models.bundle("tgt")
    graphs = {name: graph for name, graph in bundle.manifest.graphs.items() if name != SHARED_GRAPH}
    old = Bundle(bundle.path, replace(bundle.manifest, graphs=graphs), bundle.digest)
    assert old.target_digest == bundle.target_digest
    with Engine(old, threads=1) as engine:
        assert engine.generate(PROMPT, max_tokens=2).token_ids
        with pytest.raises(UsageError, match="export it again"):
            engine.best_of(PROMPT, n=2)
        assert engine.generate(PROMPT, max_tokens=2).token_ids


def test_the_end_of_the_context(models: TinyModels) -> None:
    engine = models.engine("tgt-64")
    prompt = text_of(50)
    found = engine.best_of(prompt, n=5, raw=True, ignore_eos=True, seed=2)
    room = 64 - found.usage.prompt_tokens
    assert [len(candidate.token_ids) for candidate in found.candidates] == [room] * 5
    plain = engine.best_of(prompt, n=5, raw=True, ignore_eos=True, seed=2, method="none")
    assert texts(plain) == texts(found)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_bit_of_a_row(models: TinyModels, wide: None, threads: int) -> None:
    """With more threads than key/value heads the products over the prefix are grouped."""
    models.bundle("tgt")
    with Engine.load("tgt", threads=threads) as engine:
        prompt = text_of(300)
        plain = engine.best_of(prompt, n=5, method="none", **RAW)
        assert plain.exactness == "bitwise"
        for n in (5, 2, 1):
            assert engine.best_of(prompt, n=n, method="ngram", **RAW).candidates == plain.candidates[:n]
