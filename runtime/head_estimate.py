"""How often the candidates of a learned head stand: by depth and rank, and by how sure the head itself was.

A head's own probability of a token says most about one proposal, its average acceptance by rank about the shape that is
good for all. Both start from what was measured when the head was trained, and follow what is seen.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specrun.runtime.draft_length import AcceptanceEstimate

# Bounds of the head's sureness (`HeadSampling.sureness`) between cells, as logarithms.
_BOUNDS: Final = tuple(map(math.log, (0.03, 0.08, 0.15, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.98)))
# The chance of a cell's candidates before anything was seen: near the middle of the cell, as a trained head is sure
# about as often as it is right on texts like those it was trained on; a little below it, as others are less alike.
_CHANCES: Final = (0.012, 0.05, 0.10, 0.18, 0.30, 0.44, 0.58, 0.71, 0.82, 0.91, 0.96)
_OPINION_WEIGHT: Final = 0.7  # head and n-grams look at one text, so their opinions are not independent
_LEARNING_RATE: Final = 0.2  # of opinions
_MOST_OPINION: Final = 20.0  # either way: more would change no chance
_TRUST_STRENGTH: Final = 3.0  # candidates that the first trust, 1, is worth
_TRUST_MEMORY: Final = 0.98
_MOST_TRUST: Final = 1.25

Cell = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Learnt:
    """What earlier requests taught of a head: chances [depth][rank], [depth][cell of sureness], and its opinions."""

    by_rank: tuple[tuple[float, ...], ...]
    by_sureness: tuple[tuple[float, ...], ...]
    opinions: tuple[float, ...]

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Learnt:
        """From JSON; raises ValueError, KeyError, TypeError or OverflowError for what was not written there."""
        by_rank, by_sureness = (
            tuple(tuple(map(float, row)) for row in raw[name]) for name in ("by_rank", "by_sureness")
        )
        opinions = tuple(map(float, raw["opinions"]))
        chances = [chance for row in (*by_rank, *by_sureness) for chance in row]
        if not all(0.0 <= chance <= 1.0 for chance in chances) or not all(
            -_MOST_OPINION <= opinion <= _MOST_OPINION for opinion in opinions
        ):
            raise ValueError("these are no chances")
        if any(len(row) != len(_CHANCES) for row in by_sureness) or len(opinions) != len(_CHANCES) + 1:
            raise ValueError("these are chances of other cells")
        return cls(by_rank, by_sureness, opinions)

    def fits(self, acceptance: Sequence[Sequence[float]]) -> bool:
        """Whether it is of a head with so many depths and ranks."""
        sizes = [len(row) for row in acceptance]
        return [len(row) for row in self.by_rank] == sizes and len(self.by_sureness) == len(sizes)


class HeadEstimate:
    """Chances that a candidate is the target's token if its parent stands.

    acceptance: [depth][rank], as measured in training; learnt: where to begin instead, if it is of such a head.
    """

    def __init__(self, acceptance: Sequence[Sequence[float]], learnt: Learnt | None = None) -> None:
        known = learnt if learnt is not None and learnt.fits(acceptance) else None
        acceptance = acceptance if known is None else known.by_rank
        self.depths = len(acceptance)
        self.ranks = max(map(len, acceptance), default=0)
        self._by_rank: AcceptanceEstimate[Cell] = AcceptanceEstimate(
            {(depth, rank): chance for depth, chances in enumerate(acceptance) for rank, chance in enumerate(chances)}
        )
        self._acceptance = acceptance
        self._by_sureness: AcceptanceEstimate[Cell] = AcceptanceEstimate(
            {
                (depth, cell): chance
                for depth in range(self.depths)
                for cell, chance in enumerate(_CHANCES if known is None else known.by_sureness[depth])
            }
        )
        self._opinions = _opinions(acceptance) if known is None else list(known.opinions)
        self._stood = self._expected = _TRUST_STRENGTH
        self.seen = 0  # candidates judged so far

    @property
    def learnt(self) -> Learnt:
        """What it stands at, for requests of later engines."""
        by_sureness = tuple(
            tuple(self._by_sureness.chance((depth, cell)) for cell in range(len(_CHANCES)))
            for depth in range(self.depths)
        )
        return Learnt(tuple(map(tuple, self.by_rank())), by_sureness, tuple(self._opinions))

    def chance(self, depth: int, sureness: float) -> float:
        """The chance of a child of a node at `depth` (0: the root) of which the head is so sure.

        Times a trust common to all: how many candidates stood lately against how many should have. It follows a change
        of the text sooner than each cell can.
        """
        cell = min(depth, self.depths - 1), bisect_right(_BOUNDS, sureness)
        return min(0.98, self._by_sureness.chance(cell) * self._trust())

    def _trust(self) -> float:
        return min(_MOST_TRUST, self._stood / self._expected)

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

    def pool(self, copied: float, sureness: float | None) -> tuple[float, int]:
        """(chance, opinion) of a token that n-grams give the chance `copied`; sureness: the head's, None: unlisted."""
        opinion = 0 if sureness is None else 1 + bisect_right(_BOUNDS, sureness)
        return 1.0 / (1.0 + math.exp(-_logit(copied) - self._opinions[opinion])), opinion

    def learn_pooled(self, opinion: int, chance: float, stood: bool) -> None:
        """A token with this pooled chance stood, or did not."""
        moved = self._opinions[opinion] + _LEARNING_RATE * (stood - chance)
        self._opinions[opinion] = min(max(moved, -_MOST_OPINION), _MOST_OPINION)

    def learn(self, depth: int, rank: int, sureness: float, stood: bool) -> None:
        """A child of a node at `depth` that was reached stood, or did not."""
        depth = min(depth, self.depths - 1)
        if rank < len(self._acceptance[depth]):
            self._by_rank.observe((depth, rank), stood)
        cell = depth, bisect_right(_BOUNDS, sureness)
        keep = _TRUST_MEMORY if rank == 0 else 1.0
        self._stood = keep * self._stood + (1.0 - keep) * _TRUST_STRENGTH + stood
        self._expected = keep * self._expected + (1.0 - keep) * _TRUST_STRENGTH + self._by_sureness.chance(cell)
        self._by_sureness.observe(cell, stood)
        self.seen += 1


def estimates(acceptance: Sequence[Sequence[float]], learnt: Learnt | None = None) -> dict[bool, HeadEstimate]:
    """One for greedy requests (True), one for sampled ones: sureness has another meaning where noise decides.

    learnt: of greedy requests.
    """
    return {True: HeadEstimate(acceptance, learnt), False: HeadEstimate(acceptance)}


def _opinions(acceptance: Sequence[Sequence[float]]) -> list[float]:
    """What a head's opinion of a copied token adds to the logit of its chance, by the cell of its sureness.

    That sureness against what such a head gives true tokens on average; the first entry, where it does not list the
    token, how seldom it leaves out a true one. The less a head knows the less its opinion moves.
    """
    first = acceptance[0]
    listed = [_OPINION_WEIGHT * (_logit(chance) - _logit(0.7 * first[0])) for chance in _CHANCES]
    return [math.log(max(0.1, 1.0 - sum(first)) / 0.85), *listed]


def _logit(chance: float) -> float:
    chance = min(max(chance, 0.001), 0.999)
    return math.log(chance / (1.0 - chance))
