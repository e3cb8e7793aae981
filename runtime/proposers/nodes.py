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


class Nodes:
    """Candidates of a token tree, parents first; `q` has one distribution a node where they are draws."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.ranks: list[int] = []
        self.sureness: list[float] = []
        self.chances: list[float] = []
        self.values: list[float] = []  # product of the chances along the path
        self.q: list[Distribution] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int, rank: int, sureness: float, chance: float) -> int:
        """Add a node; its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
        self.ranks.append(rank)
        self.sureness.append(sureness)
        self.chances.append(chance)
        self.values.append(chance if parent < 0 else chance * self.values[parent])
        return len(self.tokens) - 1

    def proposal(self, kind: ProposalKind, chosen: Sequence[int], parents: Sequence[int]) -> Proposal:
        """The chosen nodes, whose parents are numbers among the chosen."""
        if not chosen:
            return EMPTY
        tokens = tuple(self.tokens[node] for node in chosen)
        q = tuple(self.q[node] for node in chosen) if kind == "sampled" else None
        return Proposal(tokens, kind, q, tuple(parents))


class Drafted:
    """The nodes of the last proposal of a head, to learn from what the target made of them."""

    def __init__(self) -> None:
        self._nodes: Nodes | None = None
        self._chosen: tuple[int, ...] = ()
        self._children: dict[int, list[int]] = {}

    def remember(self, nodes: Nodes, chosen: Sequence[int], parents: Sequence[int]) -> None:
        """These candidates were proposed."""
        self._nodes, self._chosen = nodes, tuple(chosen)
        self._children = {}
        for place, parent in enumerate(parents):
            self._children.setdefault(parent, []).append(place)

    def learn(self, estimate: HeadEstimate, evaluated: int, path: Sequence[int]) -> None:
        """Children of nodes that the target went through were judged, and so were those where it left the tree."""
        nodes = self._nodes
        if nodes is None:
            return
        ends = (None,) if evaluated > len(path) else ()
        above = -1
        for taken in (*path, *ends):
            for place in self._children.get(above, ()):
                node = self._chosen[place]
                estimate.learn(nodes.depths[node] - 1, nodes.ranks[node], nodes.sureness[node], place == taken)
            if taken is None or taken >= len(self._chosen):
                break
            above = taken
        self._nodes = None


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
