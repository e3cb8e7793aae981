"""The chain that one row of a batch drafts: from n-grams and a head's candidates, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.nodes import Drafted, Nodes
from specrun.runtime.sampling import Distribution

LEAST_VALUE: Final = 0.02  # the chance that a chain still stands, below which it is not drafted on


class RowChain:
    """Follows the likeliest candidate at each step; learns from the text that comes, whatever was run of it.

    blind: candidates are draws of the rejection rule, so nothing is chosen by what they are: the chain is the draws,
    and the chances are the average ones of their depth.
    """

    def __init__(self, estimate: HeadEstimate, *, blind: bool) -> None:
        self.estimate = estimate
        self.blind = blind
        self._drafted = Drafted()
        self._nodes = Nodes()
        self._path: list[int] = []
        self._copied = 0  # the first nodes, a chain of n-grams

    def begin(self, context: Sequence[int], copied: Sequence[tuple[int, float]]) -> None:
        """A round behind `context`; copied: tokens and chances of n-grams."""
        self._drafted.learn(self.estimate, context)
        self._nodes, self._path = Nodes(), []
        self._nodes.copy_chain(copied)
        self._copied = len(copied)

    def remember(self, length: int) -> None:
        """A head was asked behind a context of `length` tokens."""
        self._drafted.remember(self._nodes, length)

    def rewind_to(self, length: int) -> None:
        """Only the first `length` tokens of the context were true."""
        self._drafted.rewind_to(length)

    @property
    def depth(self) -> int:
        """Tokens that the head had its say on."""
        return len(self._path)

    @property
    def tip(self) -> int:
        """The last of these tokens."""
        return self._nodes.tokens[self._path[-1]]

    @property
    def drafted(self) -> list[int]:
        """These tokens."""
        return [self._nodes.tokens[node] for node in self._path]

    @property
    def keeps_copy(self) -> bool:
        """Whether draws are not worth making, as n-grams are surer of their token than draws are on average."""
        return self.blind and self._copied > 0 and self._nodes.chances[0] >= self.estimate.best_child(0)

    def likely(self) -> float:
        """The chance of one token more, before it is drafted; 0 where that is not worth a thought."""
        last = self._path[-1] if self._path else -1
        value = 1.0 if last < 0 else self._nodes.values[last]
        chance = self.estimate.best_child(self.depth)
        return chance if value * chance >= LEAST_VALUE else 0.0

    def extend(self, tokens: Sequence[int], sureness: Sequence[float], q: Distribution | None = None) -> bool:
        """Go one token further by the candidates below the last one, the best first; False where there is none."""
        nodes, last = self._nodes, self._path[-1] if self._path else -1
        if self.blind:
            node = nodes.add(tokens[0], last, 0, sureness[0], self.estimate.best_child(self.depth))
            if q is not None:
                nodes.q.append(q)
        else:
            below = nodes.merge(last, tokens, sureness, self.estimate, LEAST_VALUE)
            if not below:
                return False
            node = max(below, key=self._promise)
        self._path.append(node)
        return True

    def _promise(self, node: int) -> float:
        """The tokens that a child brings on average, with what is known of those behind it."""
        behind = self._copy_from(node + 1) if node < self._copied else self.estimate.best_child(self.depth + 1)
        return self._nodes.chances[node] * (1.0 + behind)

    def _copy_from(self, node: int) -> float:
        """The tokens that the copy brings from a node of it on, if those before it stand."""
        expected, reached = 0.0, 1.0
        for chance in self._nodes.chances[node : self._copied]:
            reached *= chance
            expected += reached
        return expected

    @property
    def chances(self) -> tuple[float, ...]:
        """Of each token of `proposal`, that it stands if those before it do."""
        return tuple(self._nodes.chances[node] for node in self._whole())

    @property
    def proposal(self) -> Proposal:
        """The path, and behind it what n-grams say where it went their way; or their copy, if that brings more."""
        tokens = tuple(self._nodes.tokens[node] for node in self._whole())
        if not tokens:
            return EMPTY
        if self.blind and self._path:
            return Proposal(tokens, "sampled", tuple(self._nodes.q))
        return Proposal(tokens, "deterministic")

    def _whole(self) -> list[int]:
        last = self._path[-1] if self._path else -1
        if last < self._copied:
            return [*self._path, *range(last + 1, self._copied)]
        if not self.blind and sum(self._nodes.values[node] for node in self._path) < self._copy_from(0):
            return [*range(self._copied)]
        return self._path
