"""Chi-squared tests of the whole loop with token trees under the rejection rule: the text follows the target.

Side branches of the toy target are wrong by far more than rounding, so only what the loop verifies again can pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.runtime import chooser as chooser_module
from specrun.runtime.acceptance import draw_children
from specrun.runtime.chooser import Chooser
from specrun.runtime.lookahead import LookaheadShape
from specrun.runtime.loop import Limits, speculate
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.options import GenerationOptions, SamplingOptions
from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.lookahead import LookaheadProposer
from specrun.runtime.result import SpeculationStats
from specrun.runtime.sampling import Distribution, RandomStream
from specrun.runtime.target_run import alone

from .conftest import TinyModels
from .test_acceptance_distribution import DRAWS, PROMPT, TARGET, V, expected_joint, p_value, processed
from .test_engine_sampling import joint
from .test_engine_sampling import p_value as engine_p_value
from .toys import TOY_DRAFT_LOGITS, TOY_IDS
from .tree_proposers import proposing

ROUGH = TARGET + np.random.default_rng(40).normal(0, 0.8, (V, V)).astype(np.float32)
OPTIONS = {
    "temperature": SamplingOptions(temperature=1.0, mode="rejection", seed=21),
    "filters": SamplingOptions(temperature=1.3, top_k=6, top_p=0.95, min_p=0.03, mode="rejection", seed=21),
    "penalties": SamplingOptions(
        temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, mode="rejection", seed=21
    ),
}


class ToyTarget:
    """The table TARGET; a row of a side branch comes from ROUGH."""

    def __init__(self) -> None:
        self.length = 0

    def run(self, tokens: Sequence[int], *, rows: int, parents: Sequence[int] | None = None) -> np.ndarray:
        self.length += len(tokens)
        nodes = parents if parents is not None else range(-1, rows - 2)
        main = next((node for node, parent in enumerate(nodes) if parent != node - 1), len(nodes))
        return np.concatenate([TARGET[tokens[-rows:][: main + 1]], ROUGH[tokens[-rows:][main + 1 :]]])

    trees_exact = True

    def tree_room(self, length: int) -> int:
        return 32

    def note_rest(self, seconds: float) -> None:
        """A toy costs nothing."""

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        self.length = start + len(nodes)

    def rewind_to(self, length: int) -> None:
        assert length <= self.length
        self.length = length


class Trees:
    """A proposer of trees two levels deep: three children, and two below the first two of them.

    kind: "drawn" without replacement from the draft's distribution, its "best" tokens, or "both": drawn, then best.
    """

    needs_features = False
    name = "trees"

    def __init__(self, kind: str, options: SamplingOptions, stream: RandomStream) -> None:
        self.kind, self.options, self.stream = kind, options, stream

    def children(self, context: tuple[int, ...], count: int, drawn: bool) -> list[tuple[int, Distribution]]:
        q = self.q(context)
        if drawn:
            return [(token, q) for token in draw_children(q, count, self.stream, tokens=V)]
        return [(int(token), Distribution.point(int(token))) for token in q.ids[np.argsort(-q.probs)][:count]]

    def q(self, context: tuple[int, ...]) -> Distribution:
        return processed("draft", context[-1:], SamplingOptions(temperature=1.0))

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        if not limit:
            return Proposal((), "deterministic")
        text = tuple(context)
        first = self.children(text, 3, self.kind != "best")
        below = [self.children((*text, token), 2, self.kind == "drawn") for token, _ in first[:2]] if limit > 1 else []
        # The main branch first: the first child and its first child.
        nodes = [(*first[0], -1)] + [(*child, 0) for children in below[:1] for child in children]
        second = len(nodes)
        nodes += [(*child, -1) for child in first[1:]]
        nodes += [(*child, second) for children in below[1:] for child in children]
        tokens, q, parents = zip(*nodes, strict=True)
        if self.kind == "best":
            return Proposal(tokens, "deterministic", parents=parents)
        return Proposal(tokens, "sampled", q, parents)

    def start(self, prompt_tokens: Sequence[int]) -> None: ...
    def observe(self, **how: Any) -> None: ...
    def rewind_to(self, length: int) -> None: ...


def texts(kind: str, options: SamplingOptions, counts: dict[str, int]) -> list[tuple[int, ...]]:
    """The first three tokens of many runs of the loop; kind "lookahead" has one pool for them all."""
    drawn, request = [], GenerationOptions(sampling=options)
    lookahead = LookaheadProposer(NgramTable(), LookaheadShape(3, 3, 3), tokens=V)
    for index in range(DRAWS):
        committed, stats = list(PROMPT), SpeculationStats()
        chooser = Chooser(request, prompt=PROMPT, tokens=V, eos=(), sample_index=index)
        proposer = lookahead if kind == "lookahead" else Trees(kind, options, RandomStream(22, index))
        limits = Limits(len(PROMPT) + 4, 16, frozenset())
        target: Any = ToyTarget()
        for _ in alone(target, speculate(target, proposer, chooser, committed, limits, stats)):
            assert target.length == len(committed) - 1
        drawn.append(tuple(committed[len(PROMPT) :][:3]))
        counts["accepted"] = counts.get("accepted", 0) + stats.accepted
    return drawn


CASES = [
    *(("temperature", "drawn"), ("temperature", "best"), ("filters", "drawn"), ("penalties", "both")),
    *(("temperature", "lookahead"), ("penalties", "lookahead")),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_text_follows_the_target(name: str, kind: str) -> None:
    """The joint of three tokens: from the prefill, from a tree, and from what it carried."""
    counts: dict[str, int] = {}
    drawn = texts(kind, OPTIONS[name], counts)
    assert counts["accepted"] > DRAWS // (5 if kind == "lookahead" else 2)
    assert p_value(drawn, expected_joint(OPTIONS[name], 3)) > 1e-3


def test_negative_control_side_branches_that_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committing what the side branches' rows said is found."""
    settle = chooser_module.settle
    monkeypatch.setattr(chooser_module, "settle", lambda *args, **how: settle(*args, **{**how, "whole": True}))
    drawn = texts("drawn", OPTIONS["temperature"], {})
    assert p_value(drawn, expected_joint(OPTIONS["temperature"], 3)) < 1e-6


def test_negative_control_carried_tokens_with_another_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carrying with a q that the tokens were not drawn from is found."""
    settle = chooser_module.settle

    def wrong(*args: Any, rows: Sequence[Distribution], **how: Any) -> Any:
        return settle(*args, rows=[Distribution.from_dense(np.sqrt(row.dense(V))) for row in rows], **how)

    monkeypatch.setattr(chooser_module, "settle", wrong)
    drawn = texts("best", OPTIONS["temperature"], {})
    assert p_value(drawn, expected_joint(OPTIONS["temperature"], 3)) < 1e-6


class ToyTrees(Trees):
    """The same over the toy models' ids."""

    def q(self, context: tuple[int, ...]) -> Distribution:
        weights = np.zeros(TOY_IDS[-1] + 1)
        logits = TOY_DRAFT_LOGITS[context[-1]][TOY_IDS]
        weights[TOY_IDS] = np.exp(logits - logits.max())
        return Distribution.from_dense(weights)

    def children(self, context: tuple[int, ...], count: int, drawn: bool) -> list[tuple[int, Distribution]]:
        q = self.q(context)
        if drawn:
            return [(token, q) for token in draw_children(q, count, self.stream, tokens=276)]
        return super().children(context, count, drawn)


@pytest.mark.parametrize("kind", ["drawn", "best", "both"])
def test_through_the_engine(models: TinyModels, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Real graphs, rough side branches: the joint of three tokens over 2,000 seeds."""
    engine = models.engine("toy")
    options: dict[str, Any] = {"temperature": 0.7, "sampling": "rejection"}
    proposer = ToyTrees(kind, SamplingOptions(), RandomStream(3))
    seen = []
    with proposing(monkeypatch, proposer, noise=0.5) as record:
        for seed in range(2000):
            result = engine.generate("abcabca", raw=True, method="ngram", max_tokens=4, seed=seed, **options)
            seen.append(result.token_ids[:3])
    expected = joint(options, engine.encode("a", raw=True)[0], 3)
    assert engine_p_value(seen, expected) > 1e-4
    assert record.carried_accepted > 100
    assert record.side == 0
