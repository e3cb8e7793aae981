"""Two proposers in turn: what repeats is copied, the rest is guessed by a head or a draft model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.ngram import NgramProposer
from specrun.runtime.tree_planner import Planned, Planning


class CombinedProposer:
    """Each round takes the proposal with the most expected tokens a second; both proposers stay in step.

    What n-grams promise costs nothing to know. The other proposer drafts unless what it brought of late leaves it
    little chance to beat that.
    """

    def __init__(self, ngram: NgramProposer, other: Planning) -> None:
        self.name = f"{other.name}+{ngram.name}"
        self.needs_features = other.needs_features
        self._ngram = ngram
        self._other = other
        self._last: NgramProposer | Planning | None = None
        self._length: int | None = None  # of the context of the last round, if it turned out to be true

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request with both."""
        self._last, self._length = None, None
        self._ngram.start(prompt_tokens)
        self._other.start(prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """For the head."""
        self._other.take_features(position, features)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The better of the two proposals."""
        if self._length is not None:
            self._ngram.learn_from(context[self._length :])
        self._length = len(context)
        copied = self._ngram.plan(context, limit)
        drafted = self._draft(context, limit, copied)
        self._last = None
        if drafted is not None and drafted.expected * (copied.seconds + drafted.spent) > (
            copied.expected * drafted.seconds
        ):
            copied = drafted
            self._last = self._other
        elif len(copied.proposal):
            self._last = self._ngram
        return copied.proposal if len(copied.proposal) else EMPTY

    def _draft(self, context: Sequence[int], limit: int, copied: Planned) -> Planned | None:
        """What the other proposer drafts, None if it does not get the chance."""
        other = self._other
        if not len(copied.proposal) and other.waits():
            return None
        rate, spread = other.outlook(context, limit)
        hope = rate if other.chosen_blindly else rate + spread
        if hope <= copied.rate and len(copied.proposal):
            return None
        return other.plan(context, limit)

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Tell the one that proposed; n-grams learn from the text that follows."""
        if self._last is self._other:
            self._other.observe(evaluated=evaluated, accepted=accepted, path=path)

    def rewind_to(self, length: int) -> None:
        """Both."""
        if self._length is not None and length < self._length:
            self._length = None
        self._ngram.rewind_to(length)
        self._other.rewind_to(length)

    def close(self) -> None:
        """Both."""
        self._ngram.close()
        self._other.close()
