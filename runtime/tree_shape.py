"""Which tree of draft tokens to propose: pure functions of chances and of the measured cost of each width.

A round's run has a root, the newest committed token, and n nodes. With P(v) the chance that a node's whole path stands
it commits 1 + sum of P(v) tokens on average. Only the main branch, the first child of the first child and so on, is
worth that at once: where the target commits from exact rows alone, a token of a side branch comes true one round later,
at the head of that round's proposal. Its reward is then `side_value` x P(v): less than 1 by what carrying it costs.

Ranks and siblings are in draw order, the first is rank 0. In every tree here the main branch stands first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SIDE_VALUE_REVERIFY: Final = 0.75
"""Reward of a side node that comes true where it is verified again: the next round begins with a token that is nearly
sure (97 %), so it commits about one token more, for one more position (an eighth of a round of an 8-bit graph) and a
proposal that starts one token further from the last exact feature."""

SIDE_VALUE_MARGIN: Final = 0.95
"""The same where side branches are committed at once, but for the few that must be run again."""

_NEVER: Final = -np.inf
_TINY: Final = 1e-12  # in place of a chance of 0, which times -inf would be no number
Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree without tokens.

    parents   of each node, -1 for the root; parents come first, the main branch before all others
    ranks     of each node among its siblings, in draw order
    expected  tokens that a round commits on average, side nodes at their reduced reward
    seconds   of such a round
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    expected: float
    seconds: float

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; children of the root have 1."""
        return node_depths(self.parents)

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.expected / self.seconds


@dataclass(frozen=True, slots=True)
class Selection:
    """The nodes chosen out of candidates, in the order of the proposal.

    nodes    indices into the candidates; parents: of each chosen node, an index into `nodes`, or -1
    expected and seconds as in `TreeShape`
    """

    nodes: tuple[int, ...]
    parents: tuple[int, ...]
    expected: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.expected / self.seconds


def node_depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of each node of a tree; children of the root have 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return tuple(depths)


def best_shape(
    acceptance: Sequence[Sequence[float]],
    costs: Sequence[float],
    *,
    step_cost: float = 0.0,
    fixed_cost: float = 0.0,
    max_depth: int | None = None,
    side_value: float = 1.0,
) -> TreeShape:
    """The tree with the most expected tokens a second (Sequoia, Chen et al. 2024, section 3.1, with measured costs).

    acceptance  [depth][rank]: the chance that this child of a node at `depth` (0: the root) is the target's token
    costs       costs[n]: seconds of a target run with n nodes and the root; len(costs) - 1 nodes at most
    step_cost   seconds of drafting one level; fixed_cost: of drafting at all
    side_value  reward of a side node that comes true, in [0, 1]

    A node's children have the ranks 0 .. c - 1. The empty tree, a plain step, is among the candidates.
    """
    most = len(costs) - 1
    deepest = min(len(acceptance), most, len(acceptance) if max_depth is None else max_depth)
    best = TreeShape((), (), 1.0, costs[0])
    # Where a level costs nothing the deepest trees hold all others.
    for depth in range(1 if step_cost > 0.0 else max(1, deepest), deepest + 1):
        table = _Table(acceptance[:depth], most, side_value)
        spent = fixed_cost + depth * step_cost
        rates = [table.value(count) / (spent + costs[count]) for count in range(most + 1)]
        count = int(np.argmax(rates[1:])) + 1
        if rates[count] > best.rate:
            parents, ranks = table.tree(count)
            best = TreeShape(parents, ranks, table.value(count), spent + costs[count])
    return best


class _Table:
    """The dynamic programme for trees of at most a given depth.

    plain[k][m]: the best value of a subtree of m nodes whose root, counted as 1, stands at depth k on a side branch;
    main[k][m]: on the main branch, so that all but the first child's subtree is worth `side_value` of that.
    """

    def __init__(self, acceptance: Sequence[Sequence[float]], most: int, side_value: float) -> None:
        self._most = most
        leaf = np.full(most + 2, _NEVER)
        leaf[1] = 1.0
        plain, main = leaf, leaf
        self._plain: list[_Children] = []  # from depth 0 on
        self._main: list[_Children] = []
        for chances in reversed(acceptance):
            side = [(chance, plain) for chance in chances]
            first = [(chances[0], main)] if chances else []
            on_main = _Children([*first, *[(side_value * chance, plain) for chance in chances[1:]]], most)
            on_side = _Children(side, most)
            plain, main = on_side.values, on_main.values
            self._plain.insert(0, on_side)
            self._main.insert(0, on_main)
        self._values = main

    def value(self, count: int) -> float:
        """Expected tokens with `count` nodes below the root; -inf if no such tree has so many."""
        return float(self._values[count + 1])

    def tree(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(parents, ranks) of the best tree with `count` nodes: the main branch, then the rest level by level."""
        parents: list[int] = []
        ranks: list[int] = []
        waiting: list[tuple[int, int, int, int]] = []  # depth, parent, rank, nodes of the subtree
        parent, nodes, depth = -1, count + 1, 0
        while nodes > 1:
            sizes = self._main[depth].sizes(nodes)
            waiting += [(depth + 1, parent, rank, size) for rank, size in enumerate(sizes[1:], 1)]
            parents.append(parent)
            ranks.append(0)
            parent, nodes, depth = len(parents) - 1, sizes[0], depth + 1
        waiting.sort()
        for depth, parent, rank, nodes in waiting:  # grows while it is read: subtrees come after their level
            parents.append(parent)
            ranks.append(rank)
            if nodes > 1:
                node = len(parents) - 1
                sizes = self._plain[depth].sizes(nodes)
                waiting += [(depth + 1, node, child, size) for child, size in enumerate(sizes)]
        return tuple(parents), tuple(ranks)


class _Children:
    """How to share m - 1 nodes among the subtrees of the children 0 .. c - 1 of one node."""

    def __init__(self, children: Sequence[tuple[float, Row]], most: int) -> None:
        """children: (chance, value of a subtree by its number of nodes), in the order of rank."""
        size = most + 1
        self._taken: list[NDArray[np.int64]] = []  # by rank, then nodes shared so far: those of this child
        shared = np.full(size, _NEVER)
        shared[0] = 0.0
        best, self._count = shared, np.zeros(size, np.int64)
        steps = np.arange(size)[:, None] - np.arange(1, size)[None, :]  # [all nodes, nodes of this child - 1]
        for number, (chance, values) in enumerate(children[:most], 1):
            gain = max(chance, _TINY) * values[1:size]
            options = np.where(steps >= 0, shared[np.maximum(steps, 0)], _NEVER) + gain[None, :]
            taken = options.argmax(axis=1)
            shared = options[np.arange(size), taken]
            self._taken.append(taken + 1)
            better = shared > best
            best = np.where(better, shared, best)
            self._count[better] = number
        self.values = np.concatenate(([_NEVER], 1.0 + best))

    def sizes(self, nodes: int) -> list[int]:
        """Nodes of each child's subtree where the whole subtree has `nodes`."""
        left = nodes - 1
        sizes: list[int] = []
        for taken in reversed(self._taken[: int(self._count[left])]):
            sizes.insert(0, int(taken[left]))
            left -= sizes[0]
        return sizes


def choose_nodes(
    parents: Sequence[int],
    chances: Sequence[float],
    costs: Sequence[float],
    *,
    spent: float = 0.0,
    side_value: float = 1.0,
    first_is_main: bool = False,
) -> Selection:
    """The nodes, out of candidates, with the most expected tokens a second (EAGLE-2, Li et al. 2024, section 4.2).

    parents  of each candidate, -1 for the root; parents come first
    chances  in [0, 1]: that the candidate is the target's token if its parent stands
    costs    as in `best_shape`; spent: seconds that drafting took
    first_is_main  the main branch follows the first child of each node; otherwise the branch with the most expected
             tokens is made the first

    A node's reward is the product of the chances along its path, so what is chosen hangs together.
    """
    count = len(parents)
    values: list[float] = []
    for node in range(count):
        parent = parents[node]
        values.append(chances[node] * (1.0 if parent < 0 else values[parent]))
    main = _main_branch(parents, values, first_is_main)
    rewards = [value if on else side_value * value for value, on in zip(values, main, strict=True)]
    order = sorted(range(count), key=lambda node: (-rewards[node], node))
    expected, chosen = 1.0, 0
    best_expected, best_seconds = 1.0, spent + costs[0]
    for number, node in enumerate(order[: len(costs) - 1], 1):
        expected += rewards[node]
        seconds = spent + costs[number]
        if expected * best_seconds > best_expected * seconds:
            chosen, best_expected, best_seconds = number, expected, seconds
    nodes = sorted(order[:chosen], key=lambda node: (not main[node], node))
    places = {node: place for place, node in enumerate(nodes)}
    return Selection(tuple(nodes), tuple(places.get(parents[node], -1) for node in nodes), best_expected, best_seconds)


def _main_branch(parents: Sequence[int], values: Sequence[float], first_is_main: bool) -> list[bool]:
    """Which candidates are on the main branch."""
    below = list(values)  # the most expected tokens of a branch from this node on
    first: dict[int, int] = {}
    for node in range(len(parents) - 1, -1, -1):
        parent = parents[node]
        other = first.get(parent)
        if other is None or first_is_main or below[node] >= below[other]:
            first[parent] = node
        if parent >= 0:
            longest = first[parent]
            below[parent] = values[parent] + below[longest]
    main = [False] * len(parents)
    top = first.get(-1)
    while top is not None:
        main[top] = True
        top = first.get(top)
    return main
