"""The coupled noise of one request, by position: drawn once where target and head look at the same position."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.sampling import coupled_noise

KEPT: Final = 16  # positions; a row of 49 k tokens has 0.4 MB


class PositionNoise:
    """Noise keyed on (seed, sample index, position, token), for `tokens` ids.

    A row of many ids costs a walk over all of them. A head needs one for each position that it guesses, most of them
    again in the next round, and then the target needs them; so these rows are kept for a while.
    """

    def __init__(self, seed: int, sample_index: int, tokens: int) -> None:
        self._seed, self._sample_index = seed, sample_index
        self._all = np.arange(tokens)
        self._rows: OrderedDict[int, NDArray[np.uint64]] = OrderedDict()

    def of(self, ids: NDArray[np.int64], position: int) -> NDArray[np.uint64]:
        """The noise u64 [n] in [0, 2**53) of these ids, ascending."""
        row = self._rows.get(position)
        return row[ids] if row is not None else coupled_noise(ids, self._seed, self._sample_index, position)

    def first(self, count: int, position: int) -> NDArray[np.uint64]:
        """That of the ids below `count`."""
        row = self._rows.get(position)
        return row[:count] if row is not None else self.of(self._all[:count], position)

    def keep(self, position: int) -> None:
        """Draw the whole row of a position, and hold it for the calls to come."""
        if position in self._rows:
            self._rows.move_to_end(position)
            return
        self._rows[position] = coupled_noise(self._all, self._seed, self._sample_index, position)
        if len(self._rows) > KEPT:
            self._rows.popitem(last=False)
