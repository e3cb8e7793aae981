"""The random numbers of the rejection mode; `sampling` says which lane of the generator they are."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_WORD: Final = 64
_LANE_STREAM: Final = 1 << 3 * _WORD
_UNIT: Final = 2.0**-53


class RandomStream:
    """Uniform numbers in [0, 1) for the rejection mode, the same for the same (seed, sample index)."""

    def __init__(self, seed: int, sample_index: int = 0) -> None:
        self._generator = np.random.Philox(counter=_LANE_STREAM, key=seed | sample_index << _WORD)
        self._seen: list[float] = []  # by `ahead`, and still to come

    def uniform(self) -> float:
        """The next number."""
        if self._seen:
            return self._seen.pop(0)
        return (int(self._generator.random_raw()) >> 11) * _UNIT

    def ahead(self, count: int) -> NDArray[np.float64]:
        """The numbers [count] that come next; they still do."""
        while len(self._seen) < count:
            self._seen.append((int(self._generator.random_raw()) >> 11) * _UNIT)
        return np.array(self._seen[:count])

    def skip(self, count: int) -> None:
        """Pass over numbers that `ahead` showed."""
        del self._seen[:count]
