"""The one width of a round for all rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JointPlan:
    """A width, and a round with it: `expected` tokens of all rows in `seconds`."""

    width: int
    expected: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.expected / self.seconds


def joint_plan(
    chances: Sequence[Sequence[float]], cost: Callable[[int], float], *, least: int = 1, most: int | None = None
) -> JointPlan:
    """The width with the most expected tokens a second: rows that propose less, or nothing, pay for it too.

    chances[row][j]: that draft token j + 1 of the row stands if those before it do. cost(width): seconds of a round. A
    row commits 1 + a1 + a1 a2 + ... tokens on average, as far as the width goes. It is between `least` and `most`, and
    no wider than the longest proposal takes; of equal widths the narrower.
    """
    longest = 1 + max(map(len, chances), default=0)
    end = longest if most is None else max(1, min(most, longest))
    reached = [1.0] * len(chances)
    expected = float(len(chances))
    best = JointPlan(1, expected, cost(1))
    for width in range(2, end + 1):
        for row, own in enumerate(chances):
            reached[row] *= own[width - 2] if len(own) > width - 2 else 0.0
        expected += sum(reached)
        seconds = cost(width)
        if width <= least or expected * best.seconds > best.expected * seconds:
            best = JointPlan(width, expected, seconds)
    return best


def joint_width(
    chances: Sequence[Sequence[float]], cost: Callable[[int], float], *, least: int = 1, most: int | None = None
) -> int:
    """The width of `joint_plan`."""
    return joint_plan(chances, cost, least=least, most=most).width
