"""What a round of a batch costs: from the calibration's table of widths, then from the rounds that were seen."""

from __future__ import annotations

from typing import Final

from specrun.runtime.calibration import Calibration

_MEMORY: Final = 0.9  # weight of what was seen, at each further run
_PRIOR: Final = 2.0  # the table weighs like so many runs
_MOST: Final = 3.0  # a run that took so many times what was expected was disturbed: it counts as that many


class BatchCosts:
    """Seconds of rounds by (rows, width). Every position of every row counts, whether it holds a token or padding.

    Where no run was seen, the table's cost of rows x width positions holds, times the ratio by which the runs so far
    were dearer than it.
    """

    def __init__(self, calibration: Calibration, *, ragged: bool = True) -> None:
        """ragged: whether rows with several new tokens run together; if not, one after another."""
        self._calibration = calibration
        self._ragged = ragged
        widths = sorted(calibration.costs)
        self._widest = widths[-1]
        middle = next(width for width in widths if 2 * width >= self._widest)
        rise = calibration.cost(self._widest) - calibration.cost(middle)
        if rise > 0:
            self._slope = rise / (self._widest - middle)
        else:  # no more than one width was measured, or the last ones were as fast
            self._slope = calibration.cost(self._widest) / self._widest
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}  # seconds, runs
        self._ratio = 1.0
        self._rest = 0.0  # of a round, for each row

    def table(self, positions: int) -> float:
        """The calibration's cost of so many positions, continued in a straight line beyond its widest."""
        within = min(positions, self._widest)
        return self._calibration.cost(within) + self._slope * (positions - within)

    def run(self, rows: int, width: int) -> float:
        """Seconds of a run."""
        seconds, runs = self._seen.get((rows, width), (0.0, 0.0))
        return (_PRIOR * self._ratio * self._expected(rows, width) + seconds) / (_PRIOR + runs)

    def _expected(self, rows: int, width: int) -> float:
        return self.table(rows * width) if self._ragged or width == 1 else rows * self.table(width)

    def round(self, rows: int, width: int) -> float:
        """Seconds of a round: the run, and judging, committing and drafting for the rows."""
        return self.run(rows, width) + self._rest * rows

    def note(self, rows: int, width: int, seconds: float) -> None:
        """A run took so long."""
        seconds = min(seconds, _MOST * self.run(rows, width))
        before, runs = self._seen.get((rows, width), (0.0, 0.0))
        self._seen[rows, width] = before * _MEMORY + seconds, runs * _MEMORY + 1.0
        self._ratio = _MEMORY * self._ratio + (1.0 - _MEMORY) * seconds / self._expected(rows, width)

    def note_rest(self, rows: int, seconds: float) -> None:
        """Beside its run a round took so long."""
        rest = min(seconds, self.run(rows, 1)) / rows
        self._rest = rest if not self._rest else _MEMORY * self._rest + (1.0 - _MEMORY) * rest
