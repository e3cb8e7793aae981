"""Chooses K, the draft tokens of a round, from what a run of each width costs and how drafts fared so far.

A round with K draft tokens commits E[K] = 1 + a1 + a1 a2 + ... + a1 .. aK tokens on average, aj being the chance that
the j-th stands if those before it do, and costs K step_cost + cost(K + 1). The best K has the largest E[K] a second:
Leviathan et al. 2023, theorem 3.8, with a measured cost of each width instead of a constant one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_DRAFT_LENGTH = 16
PRIOR_STRENGTH = 8.0  # the prior weighs like so many draft tokens
DECAY = 0.97  # a draft token counts so much less with each later one: texts change their character

Cell = TypeVar("Cell", bound=Hashable)


class AcceptanceEstimate(Generic[Cell]):
    """The chance that a draft token of a kind (`Cell`) stands, from a prior and what was seen, older things less."""

    def __init__(self, priors: Mapping[Cell, float]) -> None:
        self._priors = priors
        self._seen: dict[Cell, tuple[float, float]] = {}  # accepted, tried

    def chance(self, cell: Cell) -> float:
        """The estimate for one kind."""
        accepted, tried = self._seen.get(cell, (0.0, 0.0))
        return (PRIOR_STRENGTH * self._priors[cell] + accepted) / (PRIOR_STRENGTH + tried)

    def observe(self, cell: Cell, stood: bool) -> None:
        """Learn that a draft token of this kind stood, or was rejected."""
        accepted, tried = self._seen.get(cell, (0.0, 0.0))
        self._seen[cell] = (accepted * DECAY + stood, tried * DECAY + 1.0)

    def fade(self, cell: Cell) -> None:
        """Forget a little, so that a kind which was given up is tried again in time."""
        accepted, tried = self._seen.get(cell, (0.0, 0.0))
        self._seen[cell] = (accepted * DECAY, tried * DECAY)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """`count` draft tokens, which make a round of `expected` tokens in `seconds`, on average."""

    count: int
    expected: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.expected / self.seconds


class DraftLengthPlanner:
    """Plans K. cost(width): seconds of a target run; step_cost: seconds of a draft token; fixed: always this K.

    beyond(length): seconds that a text of this length adds to a run.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        *,
        beyond: Callable[[int], float] | None = None,
        step_cost: float = 0.0,
        fixed: int | None = None,
    ) -> None:
        self._table = self._costs = [cost(width) for width in range(1, MAX_DRAFT_LENGTH + 2)]
        self._beyond = beyond
        self._step_cost = step_cost
        self._fixed = fixed

    def begin(self, length: int) -> None:
        """The next plans are for rounds behind so many tokens."""
        if self._beyond is not None:
            more = self._beyond(length)
            self._costs = [cost + more for cost in self._table]

    @property
    def fixed(self) -> int | None:
        """The K that every round has, None where it is chosen."""
        return self._fixed

    def pays(self, count: int, expected: float, gain: float) -> bool:
        """Whether one draft token more, which adds `gain` tokens on average, is worth its time after `count` of them.

        expected: tokens of a round with those alone.
        """
        if count >= MAX_DRAFT_LENGTH:
            return False
        seconds = count * self._step_cost + self._costs[count]
        more = self._step_cost + self._costs[count + 1] - self._costs[count]
        return gain * seconds > expected * more

    def choose(self, chances: Iterable[float], available: int) -> int:
        """The K in 0 .. available with the most expected tokens a second; chances[j]: that draft token j + 1 stands."""
        return self.plan(chances, available).count

    def plan(self, chances: Iterable[float], available: int) -> DraftPlan:
        """As `choose`, with what is expected of it."""
        if self._fixed is not None:
            return self._plan_fixed(chances, min(self._fixed, available))
        best = DraftPlan(0, 1.0, self._costs[0])
        expected, reached = 1.0, 1.0
        for count, chance in enumerate(chances, 1):
            if count > min(available, MAX_DRAFT_LENGTH):
                break
            reached *= chance
            expected += reached
            seconds = count * self._step_cost + self._costs[count]
            if expected * best.seconds > best.expected * seconds:
                best = DraftPlan(count, expected, seconds)
        return best

    def _plan_fixed(self, chances: Iterable[float], count: int) -> DraftPlan:
        expected, reached = 1.0, 1.0
        for chance in itertools.islice(chances, max(0, count)):
            reached *= chance
            expected += reached
        width = min(count, MAX_DRAFT_LENGTH)
        return DraftPlan(count, expected, count * self._step_cost + self._costs[max(0, width)])
