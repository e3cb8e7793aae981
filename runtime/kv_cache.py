"""Preallocated key/value buffers with a committed length per row."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from specrun.runtime.device_buffers import CAPACITY_STEP, HOST, Buffers

__all__ = ["CAPACITY_STEP", "KVCache", "shared_prefix"]


class KVCache:
    """Keys and values of every layer, [batch, kv_heads, capacity, head_dim], appended to in place by the graph.

    `lengths[row]` is how many positions of a row are true. What lies behind is junk that the next run overwrites, so
    a rollback is only a smaller length. A run of a token tree appends its nodes; `keep_path` leaves one path of them.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        limit: int,
        batch: int = 1,
        dtype: str = "float32",
        buffers: Buffers = HOST,
    ) -> None:
        """dtype: "float32", or "float16" or "bfloat16" for graphs of the CUDA provider. buffers: where they are."""
        self.lengths: list[int] = [0] * batch
        self.capacity = 0
        self.dtype, self.buffers = dtype, buffers
        self.values: list[Any] = []  # to be bound: key.0, value.0, key.1, ...
        self._arrays: list[Any] = []
        self._shape = (batch, kv_heads, head_dim)
        self._buffers = 2 * layers
        self.limit = limit
        self.reserve(capacity)

    def another(self, batch: int, limit: int) -> KVCache:
        """An empty cache of the same layers, kind and place for so many rows, of at most `limit` positions each."""
        _, kv_heads, head_dim = self._shape
        return KVCache(
            layers=self._buffers // 2,
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=1,
            limit=limit,
            batch=batch,
            dtype=self.dtype,
            buffers=self.buffers,
        )

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self._shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(self.buffers.nbytes(array) for array in self._arrays)

    def reserve(self, capacity: int) -> bool:
        """Make room for `capacity` positions a row; True if the buffers moved.

        Grows in steps and keeps what is there. ValueError beyond the limit, the rows of the rotary tables.
        """
        if capacity <= self.capacity:
            return False
        if capacity > self.limit:
            raise ValueError(f"{capacity} positions are more than the {self.limit} of the model")
        batch, kv_heads, head_dim = self._shape
        capacity = self.buffers.capacity(capacity, self.limit, batch)
        shape = (batch, kv_heads, capacity, head_dim)
        arrays = [self.buffers.zeros(shape, self.dtype) for _ in range(self._buffers)]
        self.buffers.grow(self._arrays, arrays)  # with what lies behind the lengths: the nodes of a tree that grows
        self._arrays = arrays
        self.values = [self.buffers.value(array) for array in arrays]
        self.capacity = capacity
        return True

    def fit(self, capacity: int) -> bool:
        """Let the buffers have this capacity exactly, at least what the rows hold; True if they moved.

        Raises ValueError for buffers that are not on the host.
        """
        if self.buffers.resident:
            raise ValueError("the buffers of a device keep their capacity")
        if capacity < max(self.lengths):
            raise ValueError(f"cannot fit {max(self.lengths)} positions into {capacity}")
        if capacity == self.capacity:
            return False
        batch, kv_heads, head_dim = self._shape
        kept = min(capacity, self.capacity)
        for index, old in enumerate(self._arrays):  # one at a time, so that the memory is never needed twice
            new = self.buffers.zeros((batch, kv_heads, capacity, head_dim), self.dtype)
            new[:, :, :kept] = old[:, :, :kept]
            self._arrays[index] = new
            self.values[index] = self.buffers.value(new)
        self.capacity = capacity
        return True

    def arrays(self) -> list[NDArray[Any]]:
        """The buffers themselves, where they are on the host, key.0, value.0, key.1, ...: of use until they move."""
        return [*self._arrays]

    def part(self, first: int, count: int) -> KVCache:
        """Rows `first` .. `first` + `count` - 1 as a cache over the same memory, with lengths of its own.

        Of use until the buffers move. It cannot grow: ValueError where it would have to.
        """
        part = copy.copy(self)
        part.lengths = self.lengths[first : first + count]
        part._shape = (count, *self._shape[1:])
        part.limit = self.capacity
        part._arrays = [self.buffers.rows(array, first, count) for array in self._arrays]
        part.values = [self.buffers.value(array) for array in part._arrays]
        return part

    def copy_prefix(self, source: int, row: int, length: int) -> None:
        """Let `row` hold the first `length` positions of row `source`, and no more."""
        if not 0 <= length <= self.lengths[source]:
            raise ValueError(f"cannot copy {length} positions: row {source} holds {self.lengths[source]}")
        self.buffers.copy(self._arrays, (source, range(length)), (row, 0))
        self.lengths[row] = length

    def rewind_to(self, length: int, row: int = 0) -> None:
        """Keep the first `length` positions of `row`: absolute, and never forward."""
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"cannot rewind row {row} to {length}: it holds {self.lengths[row]} positions")
        self.lengths[row] = length

    def keep_path(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Of the nodes of a tree that lie behind `start` positions, keep `nodes`, ascending, as positions start, ...

        ValueError if they are not ascending, or not in the cache. Keys carry their rotation with them, so a node must
        have run at the position where it now lies.
        """
        kept = list(nodes)
        ascending = all(a < b for a, b in itertools.pairwise([-1, *kept]))
        if start < 0 or not ascending or start + (kept[-1] + 1 if kept else 0) > self.lengths[row]:
            raise ValueError(f"cannot keep nodes {kept} behind {start} of {self.lengths[row]} positions")
        moved = next((place for place, node in enumerate(kept) if node != place), len(kept))
        if moved < len(kept):
            source = [start + node for node in kept[moved:]]
            self.buffers.copy(self._arrays, (row, source), (row, start + moved))
        self.lengths[row] = start + len(kept)

    def copy_of(self, length: int, row: int = 0) -> list[NDArray[Any]]:
        """A copy of the first `length` positions of a row: [kv_heads, length, head_dim] of each buffer."""
        return [self.buffers.read(array)[row, :, :length].copy() for array in self._arrays]

    def restore(self, parts: Sequence[NDArray[Any]], length: int, row: int = 0) -> None:
        """Let a row hold what `copy_of` gave; the room must have been reserved."""
        self.buffers.write(self._arrays, parts, row)
        self.lengths[row] = length

    def close(self) -> None:
        """Free the buffers."""
        self.values, self._arrays = [], []
        self.lengths = [0] * self.batch
        self.capacity = 0


def shared_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first items two sequences share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
