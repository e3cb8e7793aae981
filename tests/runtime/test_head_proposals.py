"""What the proposers of heads propose: after any history the same as a fresh head, and draws as q says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.speculator import find_speculator
from specrun.runtime.backend import create_session
from specrun.runtime.calibration import Calibration
from specrun.runtime.coupled_noise import KEPT, CoupledNoise
from specrun.runtime.feature_rows import FeatureRows, pick_columns
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.options import SamplingOptions
from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.eagle import EagleProposer
from specrun.runtime.proposers.medusa import MedusaProposer
from specrun.runtime.round_costs import RoundCosts
from specrun.runtime.sampling import Distribution, coupled_token
from specrun.runtime.speculator import Candidates, EagleSession, MedusaSession
from specrun.runtime.tree_planner import Planned

from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .toys import TOY_DRAFT_LOGITS, TOY_IDS

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


class Fresh:
    """Gives a watched EagleProposer's features and context to a head with an empty cache at each round."""

    def __init__(self, models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        found = find_speculator(models.bundle("heads40"), name)
        sizes = found.manifest.sizes
        self.session = EagleSession(
            name,
            create_session(found.graph_path(), threads=1),
            feature_width=len(found.manifest.taps) * sizes.hidden,
            hidden=sizes.hidden,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            draft_vocabulary=sizes.draft_vocabulary,
            positions=sizes.positions,
        )
        self.rows: dict[int, np.ndarray] = {}
        self.compared = self.trees = 0
        self.begun: set[int] = set()
        plan, take = EagleProposer.plan, EagleProposer.take_features

        def watched_take(proposer: EagleProposer, position: int, features: np.ndarray) -> None:
            for index, row in enumerate(features[:, proposer._features._columns]):
                self.rows[position + index] = row.copy()
            take(proposer, position, features)

        def watched_plan(proposer: EagleProposer, context: Sequence[int], limit: int, copied: Any = ()) -> Planned:
            planned = plan(proposer, context, limit, copied)
            if limit > 0:
                self.check(context, planned.proposal, [token for token, _ in copied], proposer._known.first)
                self.begun.add(proposer._known.first)
            return planned

        monkeypatch.setattr(EagleProposer, "take_features", watched_take)
        monkeypatch.setattr(EagleProposer, "plan", watched_plan)

    def check(self, context: Sequence[int], proposal: Proposal, copied: list[int], first: int) -> None:
        """Every node is among the best candidates that a fresh head has there, each path by itself, as a chain.

        Unless it is a copied one. The head reads from position `first` on.
        """
        context = context[first:]
        rows = np.stack([self.rows[first + position] for position in range(len(context) - 1)])
        parents = proposal.parents or tuple(range(-1, len(proposal) - 1))
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        for node, parent in enumerate(parents):
            paths[node] = (*paths[parent], proposal.tokens[node])
        for node in range(-1, len(proposal)):
            tokens = [proposal.tokens[child] for child in range(len(proposal)) if parents[child] == node]
            children = [token for token in tokens if (*paths[node], token) != tuple(copied[: len(paths[node]) + 1])]
            if children:
                best = [
                    token for token in self.best(context, rows, paths[node]) if token not in tokens or token in children
                ]
                assert sorted(children) == sorted(best[: len(children)])  # the best branch, not child, comes first
                self.compared += 1
        self.trees += proposal.parents is not None

    def best(self, context: Sequence[int], rows: np.ndarray, path: Sequence[int]) -> list[int]:
        self.session.rewind_to(0)
        candidates = self.session.append(rows, context[1:])
        place = -1
        for depth, token in enumerate(path, 1):
            candidates, [place] = self.session.grow([token], [place], depth)
        return candidates.tokens[0]


@pytest.mark.parametrize("method", ["eagle", "eagle+ngram"])
@pytest.mark.parametrize("draft_length", [1, 3, None])
@pytest.mark.parametrize("name", ["eagle", "eagle1"])
def test_eagle_proposes_what_a_fresh_head_would(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, draft_length: int | None, method: str
) -> None:
    """After accepted, rejected and other proposers' rounds, side branches, and prompts that share a beginning."""
    fresh = Fresh(models, monkeypatch, name)
    engine = models.engine("heads40", name)
    monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 17: 1.2}).cost))
    monkeypatch.setattr("specrun.runtime.proposers.nodes.Outlook.waits", lambda self: False)
    text = engine.generate(PROMPT, method="none", max_tokens=30, **RAW)
    for prompt in (PROMPT, PROMPT[:20], PROMPT + "x", PROMPT + "ab" * 150, PROMPT + text.text[:9]):
        engine.generate(prompt, method=method, draft_length=draft_length, max_tokens=30, **RAW)
        engine.generate("between" + prompt, method="ngram", max_tokens=5, **RAW)
        engine.generate(prompt + text.text[:4], method="none", max_tokens=5, **RAW)
    assert fresh.compared > 30
    assert {0} < fresh.begun  # the long prompt's beginning was left out
    assert (fresh.trees > 5) == (draft_length is None)


def test_medusa_reads_the_newest_feature(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the round before came to: the feature of the token before the newest."""
    engine = models.engine("table-heads")
    seen: list[tuple[int, int]] = []
    plan = MedusaProposer.plan

    def watched(proposer: MedusaProposer, context: Sequence[int], limit: int, copied: Any = ()) -> Planned:
        seen.append((proposer._position, len(context) - 2))
        return plan(proposer, context, limit, copied)

    monkeypatch.setattr(MedusaProposer, "plan", watched)
    for draft_length in (1, 3, None):
        engine.generate("a", method="medusa+ngram", draft_length=draft_length, max_tokens=40, raw=True)
    assert len(seen) > 10
    assert all(ours == theirs for ours, theirs in seen)


# Draws


def toy_sampling(**options: Any) -> HeadSampling:
    return head_sampling(SamplingOptions(**options), np.array(sorted(TOY_IDS[:7])), 276)


def head_sampling(options: SamplingOptions, ids: np.ndarray, tokens: int) -> HeadSampling:
    return HeadSampling(options, ids, CoupledNoise(options.seed or 0, 0, tokens), tokens=tokens)


def toy_session(models: TinyModels) -> MedusaSession:
    found = find_speculator(models.bundle("toy-heads"), "medusa")
    return MedusaSession(
        "medusa", create_session(found.graph_path(), threads=1), heads=2, feature_width=288, draft_vocabulary=7
    )


def toy_feature(token: int) -> np.ndarray:
    feature = np.zeros(288, np.float32)
    feature[token] = 17.0
    return feature


def test_coupled_candidates_are_what_the_target_would_draw(models: TinyModels) -> None:
    """The best candidate is the token that `coupled_token` draws from the head's own distribution there."""
    session, sampling = toy_session(models), toy_sampling(temperature=0.7, seed=5)
    drawn = set()
    for position in range(60):
        choice = sampling.choice(position, position + 1)
        candidates = session.run(toy_feature(TOY_IDS[1])[None], [0], choice)
        sureness = sampling.sureness(candidates, choice)
        for head in range(2):
            logits = session.run(toy_feature(TOY_IDS[1])[None], [0], type(choice)(logits=True)).logits
            assert logits is not None
            q = sampling.distribution(logits[head])
            wanted = coupled_token(q, seed=5, sample_index=0, position=position + head)
            assert candidates.tokens[head][0] == wanted
            drawn.add(wanted)
            assert sureness[head] == sorted(sureness[head], reverse=True)
            assert np.exp(sureness[head]).sum() == pytest.approx(1.0)
    assert len(drawn) > 3
    assert sampling.kind == "deterministic"


def test_drawn_candidates_are_draws_without_replacement(models: TinyModels) -> None:
    """Pairs of the first two candidates against softmax(logits / T) drawn from twice without replacement."""
    from scipy import stats

    session, sampling = toy_session(models), toy_sampling(temperature=0.8, seed=1, mode="rejection")
    assert sampling.kind == "sampled"
    counts: dict[tuple[int, ...], int] = {}
    total = 6000
    for _ in range(total):
        candidates = session.run(toy_feature(TOY_IDS[2])[None], [0], sampling.choice(0, 0))
        pair = tuple(candidates.tokens[1][:2])
        counts[pair] = counts.get(pair, 0) + 1
    assert candidates.logits is not None
    q = sampling.distribution(candidates.logits[1])
    weights = np.exp(TOY_DRAFT_LOGITS[TOY_IDS[2]][sorted(TOY_IDS[:7])] / 0.8)
    np.testing.assert_allclose(q.probs, weights / weights.sum(), rtol=0.05)  # an 8-bit head
    expected = {}
    for first in q.ids.tolist():
        for second in q.ids.tolist():
            if first != second:
                expected[first, second] = q.prob(first) * q.prob(second) / (1 - q.prob(first))
    keys = [pair for pair in expected if expected[pair] * total >= 5]
    observed = np.array([counts.get(pair, 0) for pair in keys])
    wanted = np.array([expected[pair] for pair in keys])
    assert stats.chisquare(observed, wanted / wanted.sum() * observed.sum()).pvalue > 1e-4


def test_padding_ids_are_never_drawn(models: TinyModels) -> None:
    ids = np.array(sorted(TOY_IDS[:7]))
    sampling = head_sampling(SamplingOptions(temperature=1.0, seed=1, mode="rejection"), ids, int(ids[4]))
    session = toy_session(models)
    for _ in range(50):
        candidates = session.run(toy_feature(TOY_IDS[2])[None], [0], sampling.choice(0, 0))
        assert {*candidates.tokens[0][:4]} == {*ids[:4].tolist()}
    assert candidates.logits is not None
    assert sampling.distribution(candidates.logits[0]).ids.tolist() == ids[:4].tolist()


def test_a_tree_of_draws_carries_its_distributions(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings share the q that they were drawn from; the shape does not depend on what was drawn."""
    engine = models.engine("toy-heads")
    monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 17: 1.1}).cost))
    for kind, method in ((MedusaProposer, "medusa"), (EagleProposer, "eagle")):
        proposals: list[Proposal] = []
        propose = kind.propose

        def watched(
            self: Any, context: Sequence[int], limit: int, inner: Any = propose, found: list[Proposal] = proposals
        ) -> Proposal:
            found.append(inner(self, context, limit))
            return found[-1]

        monkeypatch.setattr(kind, "propose", watched)
        for seed in range(5):
            engine.reset()
            engine.generate(
                "a", method=method, temperature=0.9, sampling="rejection", seed=seed, max_tokens=4, raw=True
            )
        trees = [proposal for proposal in proposals if proposal.parents is not None]
        assert trees
        assert all(proposal.kind == "sampled" for proposal in proposals if len(proposal))
        first = [proposal.parents for proposal in proposals[:1]]
        assert all(proposal.q is not None for proposal in trees)
        assert first[0] is not None


def test_kept_noise_is_the_noise() -> None:
    noise = CoupledNoise(5, 6, 30_000)
    ids = np.array([0, 3, 4, 77, 29_999])
    for position in (9, 3, 9, *range(100, 100 + KEPT)):
        expected = CoupledNoise(5, 6, 0).of(ids, position)
        np.testing.assert_array_equal(noise.of(ids, position), expected)
        noise.keep(position)
        np.testing.assert_array_equal(noise.of(ids, position), expected)
    assert len(noise._rows) == KEPT


# Parts


def test_columns_of_taps() -> None:
    assert pick_columns((2, 15, 27, 30), (2, 15, 27), 4) == slice(0, 12)
    assert pick_columns((2, 15, 27, 30), (30,), 4) == slice(12, 16)
    columns = pick_columns((2, 15, 27, 30), (2, 30), 2)
    assert isinstance(columns, np.ndarray)
    assert columns.tolist() == [0, 1, 6, 7]
    with pytest.raises(Exception, match="layer 9"):
        pick_columns((2, 15), (9,), 4)


def test_feature_rows_keep_the_newest_of_each_position() -> None:
    rng = np.random.default_rng(1)
    rows = FeatureRows(slice(1, 3))
    truth: dict[int, np.ndarray] = {}
    rows.clear(5)
    start = 5
    for _ in range(200):
        low = max(start, rows.start)
        position = int(rng.integers(low, rows.end + 1)) if rows.end > low else rows.end
        block = rng.standard_normal((int(rng.integers(1, 40)), 4)).astype(np.float32)
        rows.take(position, block)
        truth = {place: row for place, row in truth.items() if place < position}
        truth |= {position + index: row[1:3] for index, row in enumerate(block)}
        assert rows.end == position + len(block)
        if rng.random() < 0.3:
            start = int(rng.integers(rows.start, rows.end + 1))
            rows.forget_before(start)
        first = max(start, rows.start)
        np.testing.assert_array_equal(
            rows.rows(first, rows.end), np.array([truth[p] for p in range(first, rows.end)]).reshape(-1, 2)
        )
    with pytest.raises(ValueError, match="never did"):
        rows.take(rows.end + 1, np.zeros((1, 4), np.float32))
    with pytest.raises(ValueError, match="not those held"):
        rows.rows(0, 1)


def test_sureness_without_noise_is_the_log_probability() -> None:
    sampling = head_sampling(SamplingOptions(), np.arange(4), 4)
    candidates = Candidates([[1, 2]], [[-0.1, -2.0]], None)
    assert sampling.sureness(candidates, sampling.choice(3)) == [[-0.1, -2.0]]
    assert isinstance(sampling.distribution(np.zeros(4, np.float32)), Distribution)
