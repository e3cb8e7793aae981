"""What the proposers of learned heads have in common: when to ask one, and the shape that its draws fill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.nodes import Drafted, Nodes, Outlook
from specrun.runtime.tree_planner import Planned, TreePlanner
from specrun.runtime.tree_shape import TreeShape

RESHAPE_AFTER = 64  # candidates judged until the shape for draws is chosen anew


class HeadProposer(ABC):
    """Drafts with a head on top of the target's features (`Planning`).

    Draws (the rejection rule) may not be chosen by what they are: they fill the shape that is best on average.
    """

    needs_features = True

    def __init__(self, sampling: HeadSampling, planner: TreePlanner, estimate: HeadEstimate, outlook: Outlook) -> None:
        self._sampling = sampling
        self._planner = planner
        self._estimate = estimate
        self._outlook = outlook
        self._drafted = Drafted()
        self._nodes = Nodes()
        self._shape: tuple[int, int, TreeShape] | None = None  # its depth limit, candidates seen by then

    @abstractmethod
    def plan(self, context: Sequence[int], limit: int, copied: Sequence[tuple[int, float]] = ()) -> Planned:
        """As `Planning.plan`."""

    @abstractmethod
    def _shape_depth(self, limit: int) -> int:
        """How deep a shape may be where at most `limit` tokens are wanted."""

    @abstractmethod
    def _new_shape(self, depth: int) -> TreeShape:
        """The shape that is best on average by what was seen so far."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """What the head drafts, as far as it pays."""
        return EMPTY if self.waits() else self.plan(context, limit).proposal

    @property
    def chosen_blindly(self) -> bool:
        """Whether the candidates are draws."""
        return self._sampling.drawn

    def waits(self) -> bool:
        """Whether the head did not pay of late."""
        return self._planner.fixed is None and self._outlook.waits()

    def outlook(self, context: Sequence[int], limit: int) -> tuple[float, float]:
        """(tokens a second of late, spread)."""
        self._planner.begin(len(context))
        return self._outlook.expect(self._best_shape(max(limit, 1)).rate)

    def _best_shape(self, limit: int) -> TreeShape:
        """The shape that is best on average, chosen anew now and then."""
        seen, depth = self._estimate.seen, self._shape_depth(limit)
        if self._shape is None or self._shape[0] != depth or seen >= self._shape[1] + RESHAPE_AFTER:
            self._shape = depth, seen, self._new_shape(depth)
        return self._shape[2]

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:  # noqa: B027  (nothing to do)
        """Heads learn from the text that follows."""

    def close(self) -> None:  # noqa: B027  (nothing to free)
        """The session belongs to the engine."""
