"""What a proposer hands to the loop, and what the loop may ask of a proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.sampling import Distribution

__all__ = ["EMPTY", "MAX_NODES", "Proposal", "ProposalKind", "Proposer", "TakesLogits"]

ProposalKind = Literal["deterministic", "sampled"]

MAX_NODES: Final = 32
"""The most nodes of a token tree; the loop leaves the last ones out where there are more."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A tree of draft tokens behind the newest committed token, and how they were made; a chain is one of one branch.

    tokens   the draft tokens, a node each; may be empty
    kind     'deterministic': a function of the committed tokens (argmax, top-k, n-gram): q is a point mass and not
             given; 'sampled': drawn from q
    q        for 'sampled' one distribution a node, the very one that it was drawn from (after every filter). Siblings
             were drawn from one without replacement (`draw_children`), in node order, and share the object. Nodes of a
             sampled proposal that are deterministic have `Distribution.point(token)`
    parents  index of each node's parent, -1 for children of the newest committed token. Parents come before their
             children, and siblings differ. None: a chain; the parents of a chain become None

    The main branch, the longest beginning of the nodes that is a chain, is laid out as plain decoding would: what is
    decided there is exact, so the best chain comes first.

    Errors: ValueError if kind, tokens, q and parents contradict each other. The kind is declared, never inferred: a
    greedy draft that has its softmax at hand is still deterministic (the ratio rule with that softmax would be wrong).
    """

    tokens: tuple[int, ...]
    kind: ProposalKind
    q: tuple[Distribution, ...] | None = None
    parents: tuple[int, ...] | None = None
    _children: tuple[tuple[int, ...], ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if any(token < 0 for token in self.tokens):
            raise ValueError(f"draft tokens must not be negative: {self.tokens}")
        if self.parents is not None:
            self._check_parents(self.parents)
        if self.kind == "deterministic":
            if self.q is not None:
                raise ValueError("a deterministic proposal has no q: declare it 'sampled' if its tokens were drawn")
        elif self.kind == "sampled":
            if self.q is None or len(self.q) != len(self.tokens):
                raise ValueError("a sampled proposal needs one q for each of its tokens")
            self._check_q(self.q)
        else:
            raise ValueError(f"kind must be 'deterministic' or 'sampled', not {self.kind!r}")

    def _check_parents(self, parents: tuple[int, ...]) -> None:
        if len(parents) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} nodes need as many parents, not {len(parents)}")
        if all(parent == node - 1 for node, parent in enumerate(parents)):
            object.__setattr__(self, "parents", None)
            return
        children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: parents come first")
            if any(self.tokens[other] == self.tokens[node] for other in children[parent + 1]):
                raise ValueError(f"node {node} repeats the token {self.tokens[node]} of a sibling")
            children[parent + 1].append(node)
        object.__setattr__(self, "_children", tuple(map(tuple, children)))

    def _check_q(self, q: tuple[Distribution, ...]) -> None:
        for parent in range(-1, len(self.tokens)):
            nodes = self.children(parent)
            if nodes and q[nodes[0]].prob(self.tokens[nodes[0]]) <= 0.0:  # later ones may come after q was used up
                raise ValueError(f"draft token {self.tokens[nodes[0]]} cannot have been drawn: its q is 0")
            if any(q[node] is not q[nodes[0]] for node in nodes[1:]) and not self.fixed(nodes):
                raise ValueError("siblings must share the distribution that they were drawn from")

    def __len__(self) -> int:
        """The number of draft tokens."""
        return len(self.tokens)

    @property
    def main_length(self) -> int:
        """The number of nodes of the main branch: the first ones, each the parent of the next."""
        if self.parents is None:
            return len(self.tokens)
        return next(node for node, parent in enumerate(self.parents) if parent != node - 1)

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes below a node, in draw order; -1 is the newest committed token."""
        if self.parents is None:
            return (node + 1,) if node + 1 < len(self.tokens) else ()
        return self._children[node + 1]

    def fixed(self, nodes: tuple[int, ...]) -> bool:
        """Whether these siblings were not drawn: the proposal is deterministic, or each one's q is a point mass."""
        return self.q is None or all(self.q[node].ids.tolist() == [self.tokens[node]] for node in nodes)

    def first(self, count: int) -> Proposal:
        """The first `count` nodes, as a proposal of the same kind: with `main_length`, the main branch."""
        if count >= len(self.tokens):
            return self
        q = None if self.q is None else self.q[:count]
        return Proposal(self.tokens[:count], self.kind, q, None if self.parents is None else self.parents[:count])

    def behind(self, head: Proposal) -> Proposal:
        """`head`, a chain, with this proposal hanging from its last token."""
        count = len(head)
        if not count or not self.tokens:
            return head if count else self
        parents = None
        if self.parents is not None:
            parents = (*range(-1, count - 1), *(parent + count for parent in self.parents))
        tokens = head.tokens + self.tokens
        if head.q is None and self.q is None:
            return Proposal(tokens, "deterministic", parents=parents)
        return Proposal(tokens, "sampled", head._points() + self._points(), parents)

    def _points(self) -> tuple[Distribution, ...]:
        return tuple(map(Distribution.point, self.tokens)) if self.q is None else self.q


EMPTY: Final = Proposal((), "deterministic")
"""Nothing proposed: the round is a plain step."""


class Proposer(Protocol):
    """Proposes and re-synchronises, nothing else: acceptance, the target's cache and counting belong to the loop.

    Calls of one request: `start`, `take_features` for each chunk of the prefill, then any number of rounds of
    `propose`, `observe`, `rewind_to`, `take_features`, and `start` again for the next request. The committed tokens are
    the only truth: a proposer that has seen fewer catches up by itself.
    """

    name: str
    needs_features: bool  # whether `take_features` is to be called

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request; what an earlier request left that this prompt does not share is dropped.

        Comes before the prefill. The target may hold a beginning of the prompt from before: there is no prefill of it,
        and no features.
        """
        ...

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Take the target's features f32 [n, taps x hidden] of the context's tokens `position` .. `position` + n - 1.

        When `propose` is called they have come for all tokens of its context that were run, that is all but the newest.
        A position may come again, after its token has changed or was run anew. The next run overwrites the array: copy.
        """
        ...

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """Propose what may follow the context, at most `limit` tokens deep (0 is allowed).

        context: the committed tokens, prompt included, and perhaps some more that the target has already been through
        without being sure (they will be proposed again, before this proposal). EMPTY if nothing is worth proposing.
        """
        ...

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Learn how the last proposal fared: the draft tokens that the target judged, and those it went through.

        path: the nodes it went through, side branches included; accepted == len(path). evaluated is accepted, or
        accepted + 1 where none of the children there was the target's choice.
        """
        ...

    def rewind_to(self, length: int) -> None:
        """Forget everything beyond the first `length` tokens of the context (absolute); those remain true.

        They are the committed ones as far as the main branch of the last proposal goes. Legal for any length up to what
        was committed; longer than what the proposer holds is no error.
        """
        ...

    def close(self) -> None:
        """Free sessions and caches; may be called twice."""
        ...


@runtime_checkable
class TakesLogits(Protocol):
    """What a proposer has besides, if it looks at what the target made of its nodes; asked once a request."""

    def take_logits(self, logits: NDArray[np.float32]) -> None:
        """Take the target's logits f32 [n + 1, V] after the context and after the first n nodes of the last proposal.

        Comes after each run, before `observe`. Nodes that the loop left out have none. The next run overwrites the
        array: copy.
        """
        ...
