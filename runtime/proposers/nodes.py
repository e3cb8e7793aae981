"""What the proposers of learned heads share: candidates as a tree, and what is learnt from how they fared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.proposal import EMPTY, Proposal, ProposalKind
from specrun.runtime.sampling import Distribution
from specrun.runtime.tree_planner import Planned, TreePlanner

_LONGEST_PAUSE: Final = 15  # rounds between two trials of a head that does not pay
_MEMORY: Final = 0.9  # weight of what was seen of a head's rate, at each round
_FIRST_SPREAD: Final = 0.3
_DOUBT: Final = 0.004  # share of the rate by which its spread grows with each round that passes without it


COPIED: Final = -1


class Nodes:
    """Candidates of a token tree, parents first; `q` has one distribution a node where they are draws.

    Copied ones are of n-grams: they have no rank in a head, unless it has the same candidate.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.ranks: list[int] = []  # COPIED: not of the head
        self.sureness: list[float] = []
        self.chances: list[float] = []
        self.values: list[float] = []  # product of the chances along the path
        self.pooled: dict[int, tuple[int, float]] = {}  # copied nodes that the head had its say on: opinion, chance
        self.q: list[Distribution] = []
        self._children: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def children(self, node: int) -> list[int]:
        """The candidates below a node; -1 is the root."""
        return self._children.get(node, [])

    def add(self, token: int, parent: int, rank: int, sureness: float, chance: float) -> int:
        """Add a node; its number."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.ranks.append(rank)
        self.sureness.append(sureness)
        self.chances.append(chance)
        self.values.append(chance if parent < 0 else chance * self.values[parent])
        self._children.setdefault(parent, []).append(node)
        return node

    def copy_chain(self, chain: Sequence[tuple[int, float]]) -> None:
        """Add what n-grams would propose: tokens and their chances."""
        parent = -1
        for token, chance in chain:
            parent = self.add(token, parent, COPIED, 0.0, chance)

    def merge(
        self, parent: int, tokens: Sequence[int], sureness: Sequence[float], estimate: HeadEstimate, least: float
    ) -> list[int]:
        """Add the head's candidates below a node, the best first, as far as their value is not below `least`.

        The first candidate of the root is always added. A copied token gets the chance that both opinions come to, and
        the others share what that leaves. Returns all candidates below the node.
        """
        above = 1.0 if parent < 0 else self.values[parent]
        depth = 0 if parent < 0 else self.depths[parent]
        copied = self.children(parent)[0] if self.children(parent) else None
        share, rank_of_copied = 1.0, None
        if copied is not None:
            rank_of_copied = tokens.index(self.tokens[copied]) if self.tokens[copied] in tokens else None
            sure = None if rank_of_copied is None else sureness[rank_of_copied]
            chance, opinion = estimate.pool(self.chances[copied], sure)
            self.pooled[copied] = opinion, chance
            head = 0.0 if sure is None else estimate.chance(depth, sure)
            if rank_of_copied is not None:
                self.ranks[copied], self.sureness[copied] = rank_of_copied, sureness[rank_of_copied]
            share = (1.0 - chance) / max(1.0 - head, 1e-6)
            self.chances[copied] = chance
            for node in range(copied, len(self.tokens)):
                up = self.parents[node]
                self.values[node] = self.chances[node] * (1.0 if up < 0 else self.values[up])
        for rank, (token, sure) in enumerate(zip(tokens, sureness, strict=True)):
            if rank != rank_of_copied:
                chance = min(share, 1.0) * estimate.chance(depth, sure)
                if above * chance < least and (rank or parent >= 0):
                    break
                self.add(token, parent, rank, sure, chance)
        return self.children(parent)

    def proposal(self, kind: ProposalKind, chosen: Sequence[int], parents: Sequence[int]) -> Proposal:
        """The chosen nodes, whose parents are numbers among the chosen."""
        if not chosen:
            return EMPTY
        tokens = tuple(self.tokens[node] for node in chosen)
        q = tuple(self.q[node] for node in chosen) if kind == "sampled" else None
        return Proposal(tokens, kind, q, tuple(parents))


class Drafted:
    """The candidates of the last round, proposed or not, to learn from the text that followed."""

    def __init__(self) -> None:
        self._nodes: Nodes | None = None
        self._length = 0

    def remember(self, nodes: Nodes, length: int) -> None:
        """These were candidates behind a context of `length` tokens."""
        self._nodes, self._length = nodes, length

    def rewind_to(self, length: int) -> None:
        """Only the first `length` tokens of the context were true."""
        if length < self._length:
            self._nodes = None

    def learn(self, estimate: HeadEstimate, context: Sequence[int]) -> None:
        """Candidates below each node that the text went through were right or wrong."""
        nodes, self._nodes = self._nodes, None
        if nodes is None:
            return
        above: int | None = -1
        for token in context[self._length :]:
            if above is None:
                break
            below, above = nodes.children(above), None
            for node in below:
                stood = nodes.tokens[node] == token
                if nodes.ranks[node] != COPIED:
                    estimate.learn(nodes.depths[node] - 1, nodes.ranks[node], nodes.sureness[node], stood)
                if node in nodes.pooled:
                    estimate.learn_pooled(*nodes.pooled[node], stood)
                if stood:
                    above = node


class Outlook:
    """What rounds with a head bring lately, and when to try one again that does not pay."""

    def __init__(self) -> None:
        self.rate: float | None = None  # tokens a second, None before the first round
        self._spread = 0.0
        self._pause = self._left = 0

    def expect(self, first_guess: float) -> tuple[float, float]:
        """(tokens a second, how far single rounds are from that); asked without being used, it gets less sure."""
        if self.rate is None:
            self.rate, self._spread = first_guess, _FIRST_SPREAD * first_guess
        self._spread += _DOUBT * self.rate
        return self.rate, self._spread

    def waits(self) -> bool:
        """Whether to pass this round over; the pauses grow while nothing pays."""
        if self._left > 0:
            self._left -= 1
            return True
        return False

    def note(self, planned: Planned, planner: TreePlanner) -> None:
        """A round was planned so."""
        rate = planned.rate
        if self.rate is None:
            self.rate, self._spread = rate, _FIRST_SPREAD * rate
        self._spread = _MEMORY * self._spread + (1.0 - _MEMORY) * abs(rate - self.rate)
        self.rate = _MEMORY * self.rate + (1.0 - _MEMORY) * rate
        if len(planned.proposal):
            self._pause = self._left = 0
        else:
            self._pause = min(_LONGEST_PAUSE, 2 * self._pause + 1)
            self._left = self._pause
