"""N-grams for a row of a batch: they offer all they have, and the width of the round cuts it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.ngram import NgramProposer


class OfferedNgrams:
    """Proposes the longest copy there is, with the chance of each token; learns from the text that followed.

    What was cut off is learnt from as well, so that nothing is given up for good.
    """

    name = "ngram"
    needs_features = False

    def __init__(self, ngram: NgramProposer) -> None:
        """ngram: its planner takes whatever there is, or a fixed K."""
        self.chances: tuple[float, ...] = ()
        self._ngram = ngram
        self._length: int | None = None  # of the context of the last round, if it turned out to be true

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request."""
        self.chances, self._length = (), None
        self._ngram.start(prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Not needed."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """At most `limit` tokens after the longest match."""
        if self._length is not None:
            self._ngram.learn_from(context[self._length :])
        self._length = len(context)
        proposal = self._ngram.plan(context, limit).proposal
        self.chances = tuple(chance for _, chance in self._ngram.match[: len(proposal)])
        return proposal

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """The text that follows tells it all."""

    def rewind_to(self, length: int) -> None:
        """Forget what lies beyond `length` tokens."""
        if self._length is not None and length < self._length:
            self._length = None
        self._ngram.rewind_to(length)

    def close(self) -> None:
        """Nothing to free."""
        self._ngram.close()
