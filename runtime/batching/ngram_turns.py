"""Whether looking n-grams up for all rows of a batch is worth its time: on many rows it takes more than it brings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MEMORY: Final = 0.8  # weight of what was seen of the lift, at each further round
_MOST: Final = 2.0  # a round in which n-grams promised more than this counts as this much
_FIRST_REST, _LONGEST_REST = 4, 32  # rounds


class NgramTurns:
    """Rounds with n-grams, and rounds of rest where those of late were worth less than a round without.

    A rest is twice as long as the one before, until n-grams pay again; it ends with one round that tries.
    """

    def __init__(self) -> None:
        self.open = True  # whether the proposals for the next round are looked up
        self._lift = 1.0
        self._seconds = 0.0
        self._resting = self._rest = 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A row is looked up inside."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def spent(self) -> float:
        """Seconds that looking up took since this was asked last."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def count_round(self, lift: float) -> None:
        """A round begins. lift: its expected tokens a second, the time of looking up included, over those without."""
        if not self.open:
            self._resting -= 1
            self.open = self._resting <= 0
            return
        self._lift = _MEMORY * self._lift + (1.0 - _MEMORY) * min(lift, _MOST)
        if self._lift >= 1.0:
            self._rest = 0
            return
        self._rest = min(_LONGEST_REST, 2 * self._rest or _FIRST_REST)
        self._resting, self.open = self._rest, False
        self._lift = 1.0 - (1.0 - self._lift) * _MEMORY
