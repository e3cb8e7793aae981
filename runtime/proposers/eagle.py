"""EAGLE: one layer on top of the target's features drafts token by token (Li et al. 2024, 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.feature_rows import Columns, FeatureRows
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.proposal import EMPTY, MAX_NODES
from specrun.runtime.proposers.head import HeadProposer
from specrun.runtime.proposers.nodes import Drafted, Nodes, Outlook
from specrun.runtime.sampling import Distribution
from specrun.runtime.speculator import MAX_BRANCHES, PLAIN, Candidates, Choice, EagleSession
from specrun.runtime.tree_planner import Planned, TreePlanner
from specrun.runtime.tree_shape import TreeShape

CHUNK = 256  # slots written in one run
WINDOW = 128  # slots of a prompt that are written at most: what lies further back hardly changes what a head guesses
KEPT_ROWS = 64  # features held beyond those that a slot was written from, for slots that must be written again
DEEPEST_SHAPE = 6  # of a shape for draws


@dataclass(frozen=True, slots=True)
class EagleCosts:
    """Seconds of writing the first slot of a round, and of a level with 1, 2, .. nodes."""

    append: float
    levels: Sequence[float]

    def level(self, nodes: int) -> float:
        """Seconds of a level with so many nodes."""
        return self.levels[min(nodes, len(self.levels)) - 1] * max(1.0, nodes / len(self.levels))


@dataclass(frozen=True, slots=True)
class _Level:
    """The candidates of one run, a row for each node that was drafted on; `q` where they are draws."""

    tokens: list[list[int]]
    sureness: list[list[float]]
    q: list[Distribution] | None


@dataclass(slots=True)
class Slots:
    """What the slots of a head's cache stand for: the first one for position `first` of the text `tokens`."""

    tokens: list[int] = field(default_factory=list)
    first: int = 0

    def shared(self, prompt: Sequence[int], length: int) -> tuple[int, int]:
        """(position of the first slot, slots that stay) of a cache with `length` slots, for another prompt.

        Where more than `WINDOW` slots would have to be written before the prompt's end, it begins anew so close to it.
        """
        alike = 0
        for ours, theirs in zip(self.tokens, prompt, strict=False):
            if ours != theirs:
                break
            alike += 1
        stay = max(0, min(length, alike - 1 - self.first))
        nearest = max(0, len(prompt) - 1 - WINDOW)
        return (self.first, stay) if stay and self.first + stay >= nearest else (nearest, 0)


class EagleProposer(HeadProposer):
    """Slots of the head's cache stand for positions of the context: one holds feature i and token i + 1.

    A round writes the slots that are new, which gives the candidates for the next token, then drafts level by level
    from the head's own outputs as long as a further level pays, and drops these levels again. Rounds without this
    proposer only leave more slots to write. `known`: what the cache's slots stand for, from the request before.
    """

    name = "eagle"

    def __init__(
        self,
        session: EagleSession,
        columns: Columns,
        sampling: HeadSampling,
        planner: TreePlanner,
        estimate: HeadEstimate,
        outlook: Outlook,
        *,
        costs: EagleCosts,
        positions: int,
        known: Slots,
    ) -> None:
        """columns: of the target's features, those that the head reads. positions: the most slots."""
        super().__init__(sampling, planner, estimate, outlook)
        self._session = session
        self._features = FeatureRows(columns)
        self._costs = costs
        self._positions = positions
        self._known = known
        self._prompt: list[int] = []

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Keep the slots that this prompt shares."""
        self._prompt = list(prompt_tokens)
        self._drafted = Drafted()
        self._known.first, stay = self._known.shared(prompt_tokens, self._session.length)
        self._session.rewind_to(stay)
        self._features.clear(self._written)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Keep them until their slots are written; a long prompt's are written as they come."""
        if position < self._written:
            self._session.rewind_to(max(0, position - self._known.first))
        self._features.take(position, features)
        self._features.forget_before(self._known.first)
        while self._features.end - self._written >= CHUNK and self._written + CHUNK < len(self._prompt):
            self._write(self._prompt, self._written + CHUNK)

    def plan(self, context: Sequence[int], limit: int, copied: Sequence[tuple[int, float]] = ()) -> Planned:
        """Write the new slots and draft."""
        self._planner.begin(len(context))
        self._drafted.learn(self._estimate, context)
        end = len(context) - 1
        slots = end - self._known.first
        limit = min(limit, self._room(slots))
        if limit <= 0 or slots <= 0 or self._features.end < end:
            return Planned(EMPTY, 1.0, self._planner.costs[0])
        if self._session.length >= slots:  # its outputs are needed again
            self._session.rewind_to(slots - 1)
        while end - self._written > CHUNK:
            self._write(context, self._written + CHUNK)
        choice = self._sampling.choice(len(context))
        start = self._written
        rows = self._features.rows(start, end)
        first = self._level(self._session.append(rows, context[start + 1 :], choice), choice)
        self._features.forget_before(end - KEPT_ROWS)
        try:
            if self._sampling.drawn or self._planner.fixed is not None:
                planned = self._fill(first, self._best_shape(limit), len(context))
            else:
                planned = self._grow(first, limit, len(context), copied[:limit])
        finally:
            self._session.rewind_to(slots)
        self._drafted.remember(self._nodes, len(context))
        self._outlook.note(planned, self._planner)
        return planned

    @property
    def _written(self) -> int:
        """The position that the next slot stands for."""
        return self._known.first + self._session.length

    def _room(self, slots: int) -> int:
        """The deepest draft that the head's cache has room for behind so many slots."""
        room = self._positions - slots
        if self._planner.fixed is not None:
            return room
        return room // MAX_BRANCHES if not self._sampling.drawn or room >= MAX_NODES else 0

    def _level(self, candidates: Candidates, choice: Choice) -> _Level:
        q = None
        if candidates.logits is not None:
            q = [self._sampling.distribution(row) for row in candidates.logits]
        return _Level(candidates.tokens, self._sampling.sureness(candidates, choice), q)

    def _write(self, tokens: Sequence[int], end: int) -> None:
        """Write the slots up to position `end` without a look at their candidates."""
        start = self._written
        self._session.append(self._features.rows(start, end), tokens[start + 1 : end + 1], PLAIN)
        self._features.forget_before(end - KEPT_ROWS)

    def _grow(self, first: _Level, limit: int, position: int, copied: Sequence[tuple[int, float]]) -> Planned:
        """Draft level by level as long as it pays, then choose among all candidates."""
        planner, session = self._planner, self._session
        self._nodes = nodes = Nodes()
        nodes.copy_chain(copied)
        places: dict[int, int] = {-1: -1}  # of the nodes that were drafted on, as the session counts them
        spent = self._costs.append
        level = self._add(nodes, [-1], first)
        selection = planner.select(nodes.parents, nodes.chances, spent)
        for depth in range(1, limit):
            growing = self._worth_growing(nodes, level, depth, selection.rate, len(selection.nodes))
            if not growing:
                break
            tokens = [nodes.tokens[node] for node in growing]
            above = [places[nodes.parents[node]] for node in growing]
            choice = self._sampling.choice(position + depth)
            candidates, taken = session.grow(tokens, above, depth, choice)
            places |= dict(zip(growing, taken, strict=True))
            spent += self._costs.level(len(growing))
            level = self._add(nodes, growing, self._level(candidates, choice))
            selection = planner.select(nodes.parents, nodes.chances, spent)
        proposal = nodes.proposal("deterministic", selection.nodes, selection.parents)
        return Planned(proposal, selection.expected, selection.seconds, spent)

    def _add(self, nodes: Nodes, parents: Sequence[int], level: _Level) -> list[int]:
        """Add the candidates below each parent that may be worth something; all there, the most likely first."""
        below: list[int] = []
        for row, parent in enumerate(parents):
            least = self._planner.least_reward
            below += nodes.merge(parent, level.tokens[row], level.sureness[row], self._estimate, least)
        below.sort(key=lambda node: -nodes.values[node])
        return below

    def _worth_growing(self, nodes: Nodes, level: Sequence[int], depth: int, rate: float, chosen: int) -> list[int]:
        """The nodes of a level to draft on from, none if that costs more than it brings at `rate` tokens a second."""
        likely = self._estimate.best_child(depth)
        price = rate * self._planner.slope(chosen)
        gain, best, count = 0.0, 0.0, 0
        for number, node in enumerate(level[:MAX_BRANCHES], 1):
            reward = nodes.values[node] * (1.0 if number == 1 else self._planner.side_value)
            known = sum(nodes.chances[child] for child in nodes.children(node))
            gain += reward * max(0.0, likely - known) - price
            net = gain - rate * self._costs.level(number)
            if net > best:
                best, count = net, number
        return list(level[:count])

    def _shape_depth(self, limit: int) -> int:
        fixed = self._planner.fixed
        return min(limit, DEEPEST_SHAPE if fixed is None else fixed)

    def _new_shape(self, depth: int) -> TreeShape:
        step = self._costs.level(1)
        acceptance = self._estimate.by_rank(depth, self._session.top_k)
        return self._planner.shape(acceptance, fixed_cost=self._costs.append - step, step_cost=step, depth=depth)

    def _fill(self, first: _Level, shape: TreeShape, position: int) -> Planned:
        """Draft a shape level by level."""
        self._nodes = nodes = Nodes()
        depths, inner = shape.depths, set(shape.parents)
        rows: dict[int, tuple[_Level, int]] = {-1: (first, 0)}  # of a node of the shape: its children's candidates
        places: dict[int, int] = {-1: -1}  # as the session counts
        numbers: dict[int, int] = {-1: -1}  # in `nodes`
        for depth in range(1, max(depths, default=0) + 1):
            members = [node for node in range(len(shape)) if depths[node] == depth]
            for node in members:
                parent, rank = shape.parents[node], shape.ranks[node]
                level, row = rows[parent]
                sure = level.sureness[row][rank]
                chance = self._estimate.chance(depth - 1, sure)
                numbers[node] = nodes.add(level.tokens[row][rank], numbers[parent], rank, sure, chance)
                if level.q is not None:
                    nodes.q.append(level.q[row])
            growing = [node for node in members if node in inner]
            if growing:
                tokens = [nodes.tokens[numbers[node]] for node in growing]
                above = [places[shape.parents[node]] for node in growing]
                choice = self._sampling.choice(position + depth)
                candidates, taken = self._session.grow(tokens, above, depth, choice)
                level = self._level(candidates, choice)
                for row, (node, place) in enumerate(zip(growing, taken, strict=True)):
                    places[node], rows[node] = place, (level, row)
        chosen = [numbers[node] for node in range(len(shape))]
        proposal = nodes.proposal(self._sampling.kind, chosen, shape.parents)
        return Planned(proposal, shape.expected, shape.seconds, shape.seconds - self._planner.costs[len(shape)])

    def rewind_to(self, length: int) -> None:
        """Keep the slots whose tokens are among the first `length`."""
        self._drafted.rewind_to(length)
        if length - 1 < self._written:
            self._session.rewind_to(max(0, length - 1 - self._known.first))
