"""What the speculators that draft for all rows of a batch together have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from specrun.runtime.batching.row_proposer import HeadRow, RowProposer
from specrun.runtime.chooser import Chooser
from specrun.runtime.request import Request

_MEMORY: Final = 0.9  # weight of what was seen, at each further run
_MOST: Final = 3.0  # a run that took so many times what was expected was disturbed: it counts as that many

GoesOn = Callable[[Sequence[RowProposer]], bool]
"""Whether one token more for these rows, all at once, is worth its time."""


class StepCosts:
    """Seconds of a drafting run by the number of its rows: what was measured of one alone, then what is seen."""

    def __init__(self, measured: Callable[[int], float]) -> None:
        self._measured = measured
        self._seen: dict[int, float] = {}

    def of(self, rows: int) -> float:
        """Seconds of a run for so many rows."""
        return self._seen.get(rows) or self._measured(rows)

    @contextmanager
    def timed(self, rows: int) -> Iterator[None]:
        """The run that is made inside took so long."""
        start = time.perf_counter()
        yield
        expected = self.of(rows)
        seconds = min(time.perf_counter() - start, _MOST * expected)
        self._seen[rows] = _MEMORY * expected + (1.0 - _MEMORY) * seconds


class DraftingGroup(Protocol):
    """A speculator, and the rows that draft with it.

    first_cost: of the run that gives the first draft token of all rows; step_cost: of one that gives each further one,
    None where the first gives all. depth: how far it can draft.
    """

    depth: int
    first_cost: StepCosts

    @property
    def step_cost(self) -> StepCosts | None: ...

    def row(self, request: Request, chooser: Chooser) -> HeadRow:
        """What a request has of it."""
        ...

    def held(self, prompt: Sequence[int]) -> int | None:
        """Up to which position of the prompt it needs nothing of the target; None if that is all the same to it."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its KV buffers."""
        ...

    def behind(self, rows: Sequence[RowProposer]) -> float:
        """Seconds to catch up with the texts of these rows before it can draft for them."""
        ...

    def draft(self, rows: Sequence[RowProposer], goes_on: GoesOn) -> None:
        """Extend the chains of these rows by the runs that are worth it, at most by each row's `limit`."""
        ...

    def close(self) -> None:
        """Free what the group has beside the engine's own."""
        ...
