"""What a proposer hands to the loop, and what the loop may ask of a proposer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from specrun.runtime.sampling import Distribution

__all__ = ["EMPTY", "Proposal", "ProposalKind", "Proposer"]

ProposalKind = Literal["deterministic", "sampled"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain of draft tokens d1 .. dK and how they were made.

    tokens  the draft tokens; may be empty
    kind    'deterministic': a function of the committed tokens (argmax, n-gram): q is a point mass and not given;
            'sampled': d(j) was drawn from q[j-1]
    q       for 'sampled' the very distributions that the tokens were drawn from (after every filter), one a token

    Errors: ValueError if kind, tokens and q contradict each other. The kind is declared, never inferred: a greedy draft
    that has its softmax at hand is still deterministic (the ratio rule with that softmax would be wrong).
    """

    tokens: tuple[int, ...]
    kind: ProposalKind
    q: tuple[Distribution, ...] | None = None

    def __post_init__(self) -> None:
        if any(token < 0 for token in self.tokens):
            raise ValueError(f"draft tokens must not be negative: {self.tokens}")
        if self.kind == "deterministic":
            if self.q is not None:
                raise ValueError("a deterministic proposal has no q: declare it 'sampled' if its tokens were drawn")
        elif self.kind == "sampled":
            if self.q is None or len(self.q) != len(self.tokens):
                raise ValueError("a sampled proposal needs one q for each of its tokens")
            for token, q in zip(self.tokens, self.q, strict=True):
                if q.prob(token) <= 0.0:
                    raise ValueError(f"draft token {token} cannot have been drawn: its q is 0")
        else:
            raise ValueError(f"kind must be 'deterministic' or 'sampled', not {self.kind!r}")

    def __len__(self) -> int:
        """The number of draft tokens."""
        return len(self.tokens)

    def first(self, count: int) -> Proposal:
        """The first `count` draft tokens, as a proposal of the same kind."""
        return Proposal(self.tokens[:count], self.kind, None if self.q is None else self.q[:count])


EMPTY: Final = Proposal((), "deterministic")
"""Nothing proposed: the round is a plain step."""


class Proposer(Protocol):
    """Proposes and re-synchronises, nothing else: acceptance, the target's cache and counting belong to the loop.

    Calls of one request: `start`, then any number of rounds of `propose`, `observe`, `rewind_to`, and `start` again for
    the next request. The committed tokens are the only truth: a proposer that has seen fewer catches up by itself.
    """

    name: str

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request; what an earlier request left that this prompt does not share is dropped."""
        ...

    def propose(self, committed: Sequence[int], limit: int) -> Proposal:
        """Propose at most `limit` tokens (0 is allowed) to follow the committed ones, prompt included.

        EMPTY if there is nothing worth proposing.
        """
        ...

    def observe(self, *, evaluated: int, accepted: int) -> None:
        """Learn how the last proposal fared: the draft tokens that the target judged, and those it accepted.

        accepted <= evaluated <= len(proposal); evaluated is accepted, or accepted + 1 after a correction.
        """
        ...

    def rewind_to(self, length: int) -> None:
        """Forget everything beyond the first `length` committed tokens (absolute); those remain true.

        Legal for any length up to what was committed; longer than what the proposer holds is no error.
        """
        ...

    def close(self) -> None:
        """Free sessions and caches; may be called twice."""
        ...
