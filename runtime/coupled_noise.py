"""The noise of coupled sampling: u in [0, 1) keyed on (seed, sample index, position, token id), with 53 bits.

A position needs noise for every token, but most lose whatever the last bits of theirs are. So u is drawn in two parts:
32 bits for all, two tokens to a word of the generator, and 21 bits below them for the few that may win.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final

import numpy as np
from numpy.typing import NDArray

KEPT: Final = 16  # positions; a row of 49 k tokens has 0.2 MB
COARSE_UNIT: Final = 2.0**-32

_FINE_BITS: Final = 21
_UNIT: Final = 2.0**-53
_WORD: Final = 64
_LANE_COARSE: Final = 0
_LANE_FINE: Final = 3
_JUMP: Final = 1000  # jumping to one word of the generator costs about as much as drawing so many in a row

Ids = NDArray[np.int64]


class CoupledNoise:
    """The noise of one request's sample, `tokens` ids.

    A head needs the row of each position that it guesses, most of them again in the next round, and then the target
    needs them; so these rows are kept for a while.
    """

    def __init__(self, seed: int, sample_index: int, tokens: int) -> None:
        self._key = seed | sample_index << _WORD
        self._tokens = tokens
        self._rows: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()

    def of(self, ids: Ids, position: int) -> NDArray[np.uint64]:
        """All bits of these ids, ascending: u times 2**53, u64 [n]."""
        return self.coarse(ids, position).astype(np.uint64) << np.uint64(_FINE_BITS) | self.fine(ids, position)

    def coarse(self, ids: Ids, position: int) -> NDArray[np.uint32]:
        """The upper 32 bits of these ids, ascending: u32 [n]."""
        row = self._rows.get(position)
        if row is not None:
            return row[ids]
        words = self._words(ids >> 1, position, _LANE_COARSE)
        return (words >> ((ids & 1) << 5).astype(np.uint64)).astype(np.uint32)

    def fine(self, ids: Ids, position: int) -> NDArray[np.uint64]:
        """The lower 21 bits of these ids, ascending: u64 [n]."""
        return self._words(ids, position, _LANE_FINE) >> np.uint64(_WORD - _FINE_BITS)

    def row(self, count: int, position: int) -> NDArray[np.uint32]:
        """The upper 32 bits of the ids below `count`: u32 [count]."""
        row = self._rows.get(position)
        return row[:count] if row is not None else self._drawn(count, position)

    def keep(self, position: int) -> None:
        """Draw the row of a position, and hold it for the calls to come."""
        if position in self._rows:
            self._rows.move_to_end(position)
            return
        self._rows[position] = self._drawn(self._tokens, position)
        if len(self._rows) > KEPT:
            self._rows.popitem(last=False)

    def _drawn(self, count: int, position: int) -> NDArray[np.uint32]:
        words = self._generator(position, _LANE_COARSE, 0).random_raw((count + 1) // 2)
        return words.astype("<u8", copy=False).view("<u4")[:count]

    def _generator(self, position: int, lane: int, block: int) -> np.random.Philox:
        """Its next word is the first of this block of four."""
        return np.random.Philox(counter=(lane << 3 * _WORD) + (position << _WORD) + block, key=self._key)

    def _words(self, places: Ids, position: int, lane: int) -> NDArray[np.uint64]:
        """Words of a position's stream at these places, in order: u64 [n]."""
        held = int(places[0]) // 4
        generator = self._generator(position, lane, held)
        first = 4 * held
        if places.size * _JUMP > int(places[-1]) - first:
            return generator.random_raw(int(places[-1]) + 1 - first)[places - first]
        words, block = np.empty(places.size, np.uint64), generator.random_raw(4)
        for index, place in enumerate(places.tolist()):
            wanted, at = divmod(place, 4)
            if wanted != held:
                generator.advance(wanted - held - 1)
                held, block = wanted, generator.random_raw(4)
            words[index] = block[at]
        return words


def longest_race(coarse: int) -> float:
    """The largest E = -log(1 - u) of a u with these upper bits."""
    return -math.log1p(-min((coarse + 1) * COARSE_UNIT, 1.0 - _UNIT))


def least_race(ids: Ids, weights: NDArray[np.float64], noise: CoupledNoise, position: int) -> int:
    """The id of least E / weight, the lowest on ties; ids ascending, weights f64 [n] not negative."""
    if ids.size == 1:
        return int(ids[0])
    races = -np.log1p(noise.of(ids, position) * -_UNIT)
    with np.errstate(over="ignore"):
        ratios = np.divide(races, weights, out=np.full(ids.size, math.inf), where=weights > 0.0)
    return int(ids[ratios.argmin()])
