"""How often the candidates of a learned head stand: by depth and rank, and by how sure the head itself was.

A head's own probability of a token says most about one proposal, its average acceptance by rank about the shape that is
good for all. Both start from what was measured when the head was trained, and follow what is seen.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from specrun.runtime.draft_length import AcceptanceEstimate

# Bounds of the head's sureness (`HeadSampling.sureness`) between cells, as logarithms.
_BOUNDS: Final = tuple(map(math.log, (0.03, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.98)))
# The chance of a cell's candidates before anything was seen: near the middle of the cell, as a trained head is sure
# about as often as it is right on texts like those it was trained on; a little below it, as others are less alike.
_CHANCES: Final = (0.012, 0.05, 0.10, 0.18, 0.30, 0.44, 0.58, 0.71, 0.82, 0.91, 0.96)
_UNLISTED: Final = 0.02  # at most, of a token that is not among the head's candidates
_WEIGHT: Final = 0.7  # of the head's opinion about a copied token: the two are not independent

Cell = tuple[int, int]


class HeadEstimate:
    """Chances that a candidate is the target's token if its parent stands. acceptance: [depth][rank], as measured."""

    def __init__(self, acceptance: Sequence[Sequence[float]]) -> None:
        self.depths = len(acceptance)
        self.ranks = max(map(len, acceptance), default=0)
        self._by_rank: AcceptanceEstimate[Cell] = AcceptanceEstimate(
            {(depth, rank): chance for depth, chances in enumerate(acceptance) for rank, chance in enumerate(chances)}
        )
        self._acceptance = acceptance
        self._by_sureness: AcceptanceEstimate[Cell] = AcceptanceEstimate(
            {(depth, cell): chance for depth in range(self.depths) for cell, chance in enumerate(_CHANCES)}
        )
        self._pooled: AcceptanceEstimate[int] = AcceptanceEstimate(dict(enumerate(_CHANCES)))
        self.seen = 0  # candidates judged so far

    def chance(self, depth: int, sureness: float) -> float:
        """The chance of a child of a node at `depth` (0: the root) of which the head is so sure."""
        return self._by_sureness.chance((min(depth, self.depths - 1), bisect_right(_BOUNDS, sureness)))

    def best_child(self, depth: int) -> float:
        """The average chance of the first child of a node at `depth`."""
        return self._by_rank.chance((min(depth, self.depths - 1), 0))

    def fade(self, depth: int) -> None:
        """Forget a little of the best child's average, so that what was given up is tried again in time."""
        self._by_rank.fade((min(depth, self.depths - 1), 0))

    def by_rank(self, depth: int | None = None, ranks: int | None = None) -> list[list[float]]:
        """Chances [depth][rank] as they stand; depths beyond those measured are like the last one."""
        table = []
        for place in range(self.depths if depth is None else depth):
            known = min(place, self.depths - 1)
            measured = len(self._acceptance[known])
            count = min(measured, ranks) if ranks is not None else measured
            table.append([self._by_rank.chance((known, rank)) for rank in range(count)])
        return table

    def pool(self, copied: float, head: float | None) -> tuple[float, int]:
        """(chance, its cell) of a token that n-grams give the chance `copied` and the head `head`, None if unlisted.

        Their odds are multiplied, the head's with less weight; how often such tokens stood then corrects that.
        """
        chance = _UNLISTED if head is None else head
        logit = _logit(copied) + _WEIGHT * _logit(chance)
        cell = bisect_right(_BOUNDS, -math.log1p(math.exp(-logit)))
        return self._pooled.chance(cell), cell

    def learn_pooled(self, cell: int, stood: bool) -> None:
        """A token with a pooled chance stood, or did not."""
        self._pooled.observe(cell, stood)

    def learn(self, depth: int, rank: int, sureness: float, stood: bool) -> None:
        """A child of a node at `depth` that was reached stood, or did not."""
        depth = min(depth, self.depths - 1)
        if rank < len(self._acceptance[depth]):
            self._by_rank.observe((depth, rank), stood)
        self._by_sureness.observe((depth, bisect_right(_BOUNDS, sureness)), stood)
        self.seen += 1


def estimates(acceptance: Sequence[Sequence[float]]) -> dict[bool, HeadEstimate]:
    """One for greedy requests (True), one for sampled ones: sureness has another meaning where noise decides."""
    return {greedy: HeadEstimate(acceptance) for greedy in (True, False)}


def _logit(chance: float) -> float:
    chance = min(max(chance, 0.001), 0.999)
    return math.log(chance / (1.0 - chance))
