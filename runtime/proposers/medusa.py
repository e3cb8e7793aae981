"""Medusa: heads that guess the next tokens side by side from the target's last feature (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.feature_rows import Columns
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.proposal import EMPTY
from specrun.runtime.proposers.head import HeadProposer
from specrun.runtime.proposers.nodes import Drafted, Nodes, Outlook
from specrun.runtime.speculator import Candidates, MedusaSession
from specrun.runtime.tree_planner import Planned, TreePlanner
from specrun.runtime.tree_shape import TreeShape

WIDEST_LEVEL = 16  # candidates looked at in one depth


class MedusaProposer(HeadProposer):
    """One run of the heads a round, on the newest feature and, where they look at it, the newest token.

    The candidates of head j stand at depth j + 1 below every path. Which of them are proposed depends on how sure the
    heads are, in the light of how often they stood when they were that sure.
    """

    name = "medusa"

    def __init__(
        self,
        session: MedusaSession,
        columns: Columns,
        sampling: HeadSampling,
        planner: TreePlanner,
        estimate: HeadEstimate,
        outlook: Outlook,
        *,
        run_cost: float,
    ) -> None:
        """columns: of the target's features, those that the heads read. run_cost: seconds of a run."""
        super().__init__(sampling, planner, estimate, outlook)
        self._session = session
        self._columns = columns
        self._run_cost = run_cost
        self._feature: NDArray[np.float32] | None = None
        self._position = -1  # of the token whose feature is held

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request."""
        self._feature, self._position = None, -1
        self._drafted = Drafted()

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Keep the last row."""
        if len(features):
            self._feature = features[-1, self._columns].copy()
            self._position = position + len(features) - 1

    def plan(self, context: Sequence[int], limit: int, copied: Sequence[tuple[int, float]] = ()) -> Planned:
        """Run the heads and choose."""
        self._planner.begin(len(context))
        self._drafted.learn(self._estimate, context)
        depth = min(limit, self._session.heads)
        if depth <= 0 or self._feature is None or self._position != len(context) - 2:
            return Planned(EMPTY, 1.0, self._planner.costs[0])
        heads = self._session.heads
        choice = self._sampling.choice(*range(len(context), len(context) + heads))
        candidates = self._session.run(self._feature[None], context[-1:], choice)
        sureness = self._sampling.sureness(candidates, choice)
        if self._sampling.drawn or self._planner.fixed is not None:
            planned = self._fill(candidates, sureness, self._best_shape(depth))
        else:
            planned = self._select(candidates.tokens, sureness, depth, copied[:limit])
        self._drafted.remember(self._nodes, len(context))
        self._outlook.note(planned, self._planner)
        return planned

    def _select(
        self,
        tokens: list[list[int]],
        sureness: list[list[float]],
        depth: int,
        copied: Sequence[tuple[int, float]],
    ) -> Planned:
        """The nodes that are worth it by the heads' own sureness."""
        self._nodes = nodes = Nodes()
        nodes.copy_chain(copied)
        level = [-1]
        for place in range(depth):
            below: list[int] = []
            for parent in level:
                below += nodes.merge(parent, tokens[place], sureness[place], self._estimate, self._planner.least_reward)
            below.sort(key=lambda node: -nodes.values[node])
            level = below[:WIDEST_LEVEL]
        selection = self._planner.select(nodes.parents, nodes.chances, self._run_cost)
        proposal = nodes.proposal("deterministic", selection.nodes, selection.parents)
        return Planned(proposal, selection.expected, selection.seconds, self._run_cost)

    def _shape_depth(self, limit: int) -> int:
        return min(limit, self._session.heads)

    def _new_shape(self, depth: int) -> TreeShape:
        acceptance = self._estimate.by_rank(self._session.heads, self._session.top_k)
        return self._planner.shape(acceptance, fixed_cost=self._run_cost, depth=depth)

    def _fill(self, candidates: Candidates, sureness: list[list[float]], shape: TreeShape) -> Planned:
        """A shape with the heads' tokens."""
        nodes = Nodes()
        for parent, rank, depth in zip(shape.parents, shape.ranks, shape.depths, strict=True):
            row = depth - 1
            sure = sureness[row][rank]
            nodes.add(candidates.tokens[row][rank], parent, rank, sure, self._estimate.chance(row, sure))
        if candidates.logits is not None:
            deepest = max(shape.depths, default=0)
            q = [self._sampling.distribution(candidates.logits[row]) for row in range(deepest)]
            nodes.q = [q[depth - 1] for depth in shape.depths]
        chosen = range(len(nodes))
        self._nodes = nodes
        proposal = nodes.proposal(self._sampling.kind, chosen, shape.parents)
        return Planned(proposal, shape.expected, shape.seconds, self._run_cost)

    def rewind_to(self, length: int) -> None:
        """The features that come next take the place of what is held."""
        self._drafted.rewind_to(length)
