"""Two proposers in turn: what repeats is copied, the rest is guessed by a head or a draft model."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.ngram import NgramProposer
from specrun.runtime.tree_planner import Planned, Planning

_SURE: Final = (0.3, 0.5, 0.7, 0.85, 0.93)  # bounds of the chance of the first copied token
_FIRST_LIFTS: Final = (1.1, 1.1, 1.08, 1.05, 1.01, 0.99)
_LEAST_FIRST, _MOST_FIRST = 0.93, 1.15
_MEMORY: Final = 0.85  # weight of what was seen of a lift, at each round
_DOUBT: Final = 0.002  # by which a lift is thought higher with each round that passes without a look
_MOST: Final = 3.0  # times what drafting should take: beyond, it was disturbed, or a head read the prompt first


class Lift:
    """By how much asking a head raises the expected tokens a second, by how sure n-grams are of their next token.

    first: as `values` of an earlier one, to begin with; what is far from 1 there was chance more often than not.
    memory: weight of what was seen before, at each round.
    """

    def __init__(self, first: Sequence[float] = (), *, memory: float = _MEMORY) -> None:
        self._memory = memory
        known = first if len(first) == len(_FIRST_LIFTS) else _FIRST_LIFTS
        self._lifts = [min(max(lift, _LEAST_FIRST), _MOST_FIRST) for lift in known]

    @classmethod
    def expected(cls, lift: float, *, memory: float) -> Lift:
        """One that begins with a lift that costs and chances promise, however sure n-grams are."""
        found = cls(memory=memory)
        found._lifts = [min(lift, _MOST_FIRST)] * len(_FIRST_LIFTS)
        return found

    @property
    def values(self) -> tuple[float, ...]:
        """The lifts as they stand."""
        return tuple(self._lifts)

    def worth_asking(self, chance: float, least: float = 1.0) -> bool:
        """Whether the head's opinion is worth its time; what is not asked for long is asked again.

        least: the lift that it takes.
        """
        place = _place(chance)
        self._lifts[place] += _DOUBT
        return self._lifts[place] > least

    def note(self, chance: float, lift: float) -> None:
        """The head was asked: rate with it / rate without."""
        place = _place(chance)
        self._lifts[place] = self._memory * self._lifts[place] + (1.0 - self._memory) * lift


def _place(chance: float) -> int:
    return bisect_right(_SURE, chance)


class CombinedProposer:
    """Each round takes the proposal with the most expected tokens a second; both proposers stay in step.

    What n-grams promise costs nothing to know. A head is asked where that raised the expectation of late; it then
    chooses from its own candidates and the copied tokens together. One that must be chosen blindly, or has a fixed K,
    gets its turn where it brought more of late than n-grams promise now.
    """

    def __init__(self, ngram: NgramProposer, other: Planning, lift: Lift, *, fixed: bool = False) -> None:
        self.name = f"{other.name}+{ngram.name}"
        self.needs_features = other.needs_features
        self._ngram = ngram
        self._other = other
        self._lift = lift
        self._apart = fixed or other.chosen_blindly
        self._length: int | None = None  # of the context of the last round, if it turned out to be true
        self._used: NgramProposer | Planning | None = None

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request with both."""
        self._length, self._used = None, None
        self._ngram.start(prompt_tokens)
        self._other.start(prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """For the head."""
        self._other.take_features(position, features)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The better of the two proposals, or one of both."""
        if self._length is not None:
            self._ngram.learn_from(context[self._length :])
        self._length = len(context)
        copied = self._ngram.plan(context, limit)
        planned = self._choose(context, limit, copied) if self._apart else self._ask(context, limit, copied)
        self._used = self._ngram if planned is copied else self._other
        return planned.proposal if len(planned.proposal) else EMPTY

    def _ask(self, context: Sequence[int], limit: int, copied: Planned) -> Planned:
        """Let the head choose, if that is worth its time."""
        match = self._ngram.match
        chance = match[0][1] if match else 0.0
        if not self._lift.worth_asking(chance) or (not match and self._other.waits()):
            return copied
        start = time.perf_counter()
        planned = self._other.plan(context, limit, match)
        # By what it took indeed: beside the head's runs that is choosing, and memory that the head had to fetch.
        took = min(time.perf_counter() - start, _MOST * planned.spent)
        seconds = planned.seconds - planned.spent + took
        self._lift.note(chance, planned.expected / seconds / copied.rate)
        return planned

    def _choose(self, context: Sequence[int], limit: int, copied: Planned) -> Planned:
        """One or the other, by what the other brought of late."""
        other = self._other
        if len(copied.proposal):
            rate, spread = other.outlook(context, limit)
            hope = rate if other.chosen_blindly else rate + spread
            if hope <= copied.rate:
                return copied
        elif other.waits():
            return copied
        drafted = other.plan(context, limit)
        if other.chosen_blindly:
            return drafted
        # The time of drafting is spent either way.
        better = drafted.expected * (copied.seconds + drafted.spent) > copied.expected * drafted.seconds
        return drafted if better else copied

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Tell the other one if it proposed; n-grams learn from the text that follows."""
        if self._used is self._other:
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
