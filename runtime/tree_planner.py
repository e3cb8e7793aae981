"""What a round of one request may propose, and what it is worth: the measured costs, the side branches, a fixed K."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from specrun.runtime.proposal import MAX_NODES, Proposal, Proposer
from specrun.runtime.tree_shape import Selection, TreeShape, best_shape, choose_nodes

_LEAST_REWARD: Final = 0.02  # of a node that is looked at


@dataclass(frozen=True, slots=True)
class Planned:
    """A proposal, and a round with it: `expected` tokens in `seconds`, of which `spent` went into drafting."""

    proposal: Proposal
    expected: float
    seconds: float
    spent: float = 0.0

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.expected / self.seconds


class Planning(Proposer, Protocol):
    """A proposer that can be weighed against another one."""

    @property
    def chosen_blindly(self) -> bool:
        """Whether it must be chosen before it drafts: its draft tokens are draws, and a choice by them would bend q."""
        ...

    def outlook(self, context: Sequence[int], limit: int) -> tuple[float, float]:
        """(tokens a second of a round with it, how far single rounds are from that), before it drafts."""
        ...

    def waits(self) -> bool:
        """Whether to pass it over this round, as it did not pay of late."""
        ...

    def plan(self, context: Sequence[int], limit: int, copied: Sequence[tuple[int, float]] = ()) -> Planned:
        """As `propose`, with what it is worth. copied: tokens and chances of a chain to choose from as well."""
        ...


class TreePlanner:
    """cost(width): seconds of a target run; fixed: always a chain of this K; side_value: see `tree_shape`.

    beyond(length): seconds that a text of this length adds to a run.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        *,
        beyond: Callable[[int], float] | None = None,
        fixed: int | None = None,
        side_value: float = 1.0,
    ) -> None:
        self._table = self.costs = [cost(width) for width in range(1, MAX_NODES + 2)]
        self._beyond = beyond
        self.fixed = fixed
        self.side_value = side_value
        self._least_slope = min(wide - narrow for narrow, wide in zip(self.costs, self.costs[1:], strict=False))

    def begin(self, length: int) -> None:
        """The next plans are for rounds behind so many tokens."""
        if self._beyond is not None:
            more = self._beyond(length)
            self.costs = [cost + more for cost in self._table]

    @property
    def least_reward(self) -> float:
        """Of a node that is looked at."""
        return max(_LEAST_REWARD, self._least_slope / self.costs[0])

    def slope(self, nodes: int) -> float:
        """Seconds of one node more than `nodes`."""
        at = min(nodes, len(self.costs) - 2)
        return self.costs[at + 1] - self.costs[at]

    def select(self, parents: Sequence[int], chances: Sequence[float], spent: float) -> Selection:
        """The best nodes of candidates."""
        return choose_nodes(parents, chances, self.costs, spent=spent, side_value=self.side_value)

    def shape(
        self, acceptance: Sequence[Sequence[float]], *, fixed_cost: float, step_cost: float = 0.0, depth: int
    ) -> TreeShape:
        """The best tree of at most this depth for chances [depth][rank]; a chain where K is fixed."""
        if self.fixed is None:
            return best_shape(
                acceptance,
                self.costs,
                fixed_cost=fixed_cost,
                step_cost=step_cost,
                max_depth=depth,
                side_value=self.side_value,
            )
        length = min(self.fixed, depth)
        expected, reached = 1.0, 1.0
        for chances in acceptance[:length]:
            reached *= chances[0]
            expected += reached
        seconds = fixed_cost + length * step_cost + self.costs[min(length, MAX_NODES)]
        return TreeShape(tuple(range(-1, length - 1)), (0,) * length, expected, seconds)
