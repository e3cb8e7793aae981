"""N-grams and a head together: who proposes, who is asked, what both opinions come to, what is learnt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.combined import CombinedProposer, Lift
from specrun.runtime.proposers.ngram import PRIORS, NgramProposer
from specrun.runtime.proposers.nodes import COPIED, Drafted, Nodes
from specrun.runtime.tree_planner import Planned


class Scripted:
    """A proposer that says what it is told."""

    name, needs_features = "scripted", False

    def __init__(self, rate: float, spread: float = 0.0, *, blind: bool = False, waiting: bool = False) -> None:
        self.rate, self.spread, self.chosen_blindly, self.waiting = rate, spread, blind, waiting
        self.plans = self.observed = 0

    def start(self, prompt_tokens: Sequence[int]) -> None: ...

    def take_features(self, position: int, features: np.ndarray) -> None: ...

    def waits(self) -> bool:
        return self.waiting

    def outlook(self, context: Sequence[int], limit: int) -> tuple[float, float]:
        return self.rate, self.spread

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        return self.plan(context, limit).proposal

    def plan(self, context: Sequence[int], limit: int, copied: Any = ()) -> Planned:
        self.plans += 1
        self.copied = copied
        return Planned(Proposal((9,), "deterministic"), self.rate + self.spread, 1.0)

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        self.observed += 1

    def rewind_to(self, length: int) -> None: ...

    def close(self) -> None: ...


def combined(other: Scripted, lift: Lift | None = None, *, fixed: bool = False) -> CombinedProposer:
    planner = DraftLengthPlanner(lambda width: 1.0 + 0.1 * width)
    ngram = NgramProposer(NgramTable(), planner, AcceptanceEstimate(PRIORS))
    proposer = CombinedProposer(ngram, other, lift or Lift(), fixed=fixed)
    proposer.start([])
    return proposer


def test_the_better_proposal_is_taken_and_its_maker_told() -> None:
    repeating, new = [1, 2, 3, 4, 5, 1, 2, 3], [1, 2, 3]
    for rate, tokens in ((0.1, (4, 5)), (9.0, (9,))):
        other = Scripted(rate)
        proposer = combined(other, fixed=True)
        assert proposer.name == "scripted+ngram"
        assert proposer.propose(repeating, 8).tokens[:2] == tokens
        proposer.observe(evaluated=1, accepted=1, path=(0,))
        assert other.observed == (rate > 1)
        assert other.plans == (rate > 1)  # what cannot win is not drafted
    assert combined(Scripted(1.5)).propose(new, 8).tokens == (9,)
    waiting = Scripted(1.5, waiting=True)
    assert combined(waiting).propose(new, 8).tokens == ()
    assert waiting.plans == 0


def test_a_small_chance_to_win_is_tried_unless_it_would_bend_q() -> None:
    repeating = [1, 2, 3, 4, 5, 1, 2, 3]
    hopeful, blind = Scripted(0.5, spread=5.0), Scripted(0.5, spread=5.0, blind=True)
    assert combined(hopeful, fixed=True).propose(repeating, 8).tokens == (9,)
    assert combined(blind).propose(repeating, 8).tokens[:2] == (4, 5)
    assert (hopeful.plans, blind.plans) == (1, 0)


def test_a_head_is_asked_where_that_pays() -> None:
    """It gets the copied tokens with their chances; where its opinion costs more than it brings it is left alone."""
    repeating = [1, 2, 3, 4, 5, 1, 2, 3]
    for rate, asked in ((9.0, 40), (0.1, 15)):
        other, lift = Scripted(rate), Lift()
        for _ in range(40):
            combined(other, lift).propose(repeating, 8)
        assert [token for token, _ in other.copied][:3] == [4, 5, 1]
        assert all(0 < chance < 1 for _, chance in other.copied)
        assert other.plans == asked if asked == 40 else 1 <= other.plans <= asked


def test_opinions_are_pooled() -> None:
    """A token that both propose gets better, one that the head does not list worse, and the others share the rest."""
    estimate = HeadEstimate(((0.5, 0.2), (0.5, 0.2)))
    alone = Nodes()
    alone.merge(-1, [5, 6, 7], [math.log(0.6), math.log(0.2), math.log(0.1)], estimate, 0.001)
    for token, better in ((5, True), (9, False)):
        nodes = Nodes()
        nodes.copy_chain([(token, 0.7), (8, 0.9)])
        below = nodes.merge(-1, [5, 6, 7], [math.log(0.6), math.log(0.2), math.log(0.1)], estimate, 0.001)
        assert nodes.tokens[:2] == [token, 8]
        assert (nodes.chances[0] > 0.7) == better
        assert sum(nodes.chances[node] for node in below) < 1.0
        assert nodes.chances[nodes.tokens.index(6)] != alone.chances[1]
        for node in range(len(nodes)):
            above = 1.0 if nodes.parents[node] < 0 else nodes.values[nodes.parents[node]]
            assert nodes.values[node] == pytest.approx(above * nodes.chances[node])
        assert (nodes.ranks[0], nodes.ranks[1]) == ((0, COPIED) if better else (COPIED, COPIED))
        assert len({nodes.tokens[node] for node in below}) == len(below)


def test_what_is_learnt_from_the_text_that_follows() -> None:
    """Every candidate below a node that the text went through, whether it was proposed or not."""
    estimate = HeadEstimate(((0.5, 0.2), (0.5, 0.2)))
    sure = math.log(0.6)
    before = [estimate.chance(0, sure), estimate.chance(1, sure), estimate.by_rank()[0][0]]
    drafted = Drafted()
    for text, length in (([1, 2, 5, 9], 2), ([1, 2, 5, 9], 2), ([1, 2, 7], 2)):
        nodes = Nodes()
        nodes.merge(-1, [5, 6], [sure, sure - 2], estimate, 0.001)
        nodes.merge(0, [8, 9], [sure, sure - 2], estimate, 0.001)
        drafted.remember(nodes, length)
        drafted.rewind_to(length)
        drafted.learn(estimate, text)
    assert estimate.seen == 2 + 2 + 2 + 2 + 2
    assert estimate.chance(1, sure) < before[1]
    assert estimate.by_rank()[0][0] > before[2]
    drafted.remember(nodes, 4)
    drafted.rewind_to(3)  # its context turned out to be wrong
    drafted.learn(estimate, [1, 2, 3, 4, 5])
    assert estimate.seen == 10


def test_ngrams_learn_from_rounds_of_the_other() -> None:
    other = Scripted(99.0)
    proposer = combined(other)
    text = [1, 2, 3, 4, 5, 1, 2, 3]
    chance = proposer._ngram._estimate.chance
    proposer.propose(text, 8)
    cell = proposer._ngram._cells[0]
    before = chance(cell)
    proposer.propose([*text, 4], 8)
    assert chance(cell) > before
    proposer.rewind_to(len(text))  # what came was not true after all
    raised = chance(cell)
    proposer.propose([*text, 9], 8)
    assert chance(cell) == raised


def test_a_lift_begins_from_an_earlier_one() -> None:
    """Within bounds: what is far from 1 was chance."""
    lift = Lift()
    for _ in range(40):
        lift.note(0.1, 3.0)
        lift.note(0.99, 0.2)
    again = Lift(lift.values)
    assert len(again.values) == len(lift.values)
    assert lift.values[0] > again.values[0] > 1.0 > again.values[-1] > lift.values[-1]
    assert again.worth_asking(0.1)
    assert not again.worth_asking(0.99)
    assert Lift((0.5,)).values == Lift().values  # of other cells
