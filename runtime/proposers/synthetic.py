"""Draft tokens of a chosen acceptance, at the cost of a real proposer: to hold a cost model against the clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.proposal import Proposal, Proposer


class SyntheticProposer:
    """Has `inner` draft, then proposes chains whose tokens are right with a fixed chance, independently of each other.

    The text stays what it is: only how often draft tokens stand is chosen. What `inner` drafts goes unused, but it runs
    as ever, on the committed tokens, and its caches are rewound as ever, so that a round costs what it would.
    """

    name = "synthetic"

    def __init__(
        self,
        inner: Proposer | None,
        text: Sequence[int],
        *,
        acceptance: float,
        draft_length: int,
        tokens: int,
        rng: np.random.Generator,
    ) -> None:
        """inner: None drafts at no cost. text: what plain decoding writes after the prompt; draft tokens end with it.

        acceptance: the chance, 0 to 1. tokens: real size of the vocabulary, two or more. rng: decides which are right.
        """
        self._inner = inner
        self._text = text
        self._acceptance = acceptance
        self._draft_length = draft_length
        self._tokens = tokens
        self._rng = rng
        self._prompt_length = 0
        self._drafted = 0  # tokens that the inner proposer drafted in the last round
        self.needs_features = inner is not None and inner.needs_features
        self.proposed = 0  # draft tokens of the request so far
        self.drafted = 0  # and those that the inner proposer drafted

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request; a draft model reads the prompt now, as part of the prefill and not of the first round."""
        self._prompt_length = len(prompt_tokens)
        if self._inner is not None:
            self._inner.start(prompt_tokens)
            if not self._inner.needs_features:
                self._inner.propose(prompt_tokens, 1)
                self._inner.rewind_to(self._prompt_length)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Hand them on."""
        if self._inner is not None:
            self._inner.take_features(position, features)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """K tokens, or as many as the limit or the rest of the text allows."""
        if self._inner is not None:
            self._drafted = len(self._inner.propose(context, limit))
            self.drafted += self._drafted
        written = len(context) - self._prompt_length
        right = self._text[written : written + min(limit, self._draft_length)]
        stands = self._rng.random(len(right)) < self._acceptance
        wrong = [(token + 1) % self._tokens for token in right]
        self.proposed += len(right)
        tokens = tuple(a if keep else b for a, b, keep in zip(right, wrong, stands, strict=True))
        return Proposal(tokens, "deterministic")

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Hand it on as far as the inner proposer had drafted."""
        if self._inner is not None:
            count = min(accepted, self._drafted)
            self._inner.observe(evaluated=min(evaluated, self._drafted), accepted=count, path=path[:count])

    def rewind_to(self, length: int) -> None:
        """Hand it on."""
        if self._inner is not None:
            self._inner.rewind_to(length)

    def close(self) -> None:
        """Hand it on."""
        if self._inner is not None:
            self._inner.close()
