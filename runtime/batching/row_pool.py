"""The rows of a batch: their KV buffers, and the runs over one row or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import Sizes
from specrun.runtime.kv_cache import KVCache, shared_prefix
from specrun.runtime.session import BatchLogits
from specrun.runtime.width_rule import WidthRule


class Session(Protocol):
    """What runs rows: a `ModelSession`, or one behind a prefix."""

    bundle: Bundle
    sizes: Sizes
    cache: KVCache
    width_rule: WidthRule
    onnx_seconds: float

    @property
    def positions(self) -> int:
        """The most that a row may have, spare ones included."""
        ...

    @property
    def spare(self) -> int:
        """Positions that a run may need beyond its tokens."""
        ...

    @property
    def batch_features(self) -> NDArray[np.float32]:
        """Features f32 [batch, positions, taps x hidden] of the last run."""
        ...

    def new_cache(self, batch: int) -> KVCache:
        """Buffers for so many rows."""
        ...

    def over(self, cache: KVCache) -> Session:
        """Another session over these buffers."""
        ...

    def run_batch(self, tokens: Sequence[Sequence[int]], *, rows: int) -> BatchLogits:
        """Append tokens to each row; logits f32 [batch, rows, vocabulary] (`ModelSession.run_batch`)."""
        ...


_LITTLE = 8  # positions that are read again for a head


class RowPool:
    """Rows of KV buffers for one target. A run goes over rows next to each other and costs that of the widest one.

    `texts[slot]` are the tokens behind a row's positions. A row that ended keeps both until another takes its place, so
    that prompts can begin where texts before them, running ones too, went the same way.
    """

    read = False
    """Whether rows begin with their prompt read, so that a newcomer takes no time."""

    def __init__(self, target: Session, rows: int, cache: KVCache | None = None) -> None:
        """cache: the rows' buffers, where they are there already."""
        self.positions = target.positions
        self.cache = cache or target.new_cache(rows)
        self.texts: list[Sequence[int]] = [()] * rows
        self._target = target
        self._parts: dict[tuple[int, int], Session] = {}
        self._last: tuple[Session, int, list[int]] | None = None

    @property
    def position_bytes(self) -> int:
        """Bytes of one position of one row."""
        return self.cache.nbytes // (self.cache.batch * self.cache.capacity)

    def row(self, slot: int) -> PoolRow:
        """A row as the loop sees it."""
        return PoolRow(self, slot)

    def room(self, first: int, count: int) -> int:
        """The widest run that these rows have positions for."""
        longest = max(self.cache.lengths[first : first + count])
        return self.positions - longest - self._target.width_rule.multiple

    def reserve(self, length: int) -> None:
        """Make room for `length` positions a row, as far as the model has them."""
        self._grow(length)

    def _grow(self, capacity: int) -> None:
        if self.cache.reserve(min(capacity, self.positions)):
            self._parts.clear()  # they look at the buffers of before

    def run(self, first: int, tokens: Sequence[list[int]], *, rows: int) -> tuple[BatchLogits, float]:
        """Append tokens[i] to row `first` + i; (logits f32 [len(tokens), rows, vocabulary], seconds in ONNX Runtime).

        As `ModelSession.run_batch`; the logits are a view that the next run overwrites.
        """
        lengths, count = self.cache.lengths, len(tokens)
        self._grow(max(lengths[first : first + count]) + max(map(len, tokens)) + self._target.spare)
        session = self._part(first, count)
        session.cache.lengths[:] = lengths[first : first + count]
        before = session.onnx_seconds
        logits = session.run_batch(tokens, rows=rows)
        seconds = session.onnx_seconds - before
        self._target.onnx_seconds += seconds
        lengths[first : first + count] = session.cache.lengths
        self._last = session, first, [*map(len, tokens)]
        return logits, seconds

    def features(self, slot: int) -> NDArray[np.float32]:
        """Features f32 [n, taps x hidden] of the n tokens that a row took in the last run; a view like the logits."""
        assert self._last is not None
        session, first, counts = self._last
        features: NDArray[np.float32] = session.batch_features[slot - first, : counts[slot - first]]
        return features

    def begin(self, slot: int, text: Sequence[int], *, aim: int | None = None) -> int:
        """Give a row to the text that `text`, a prompt, begins; how much of it the row holds already, never all.

        That is copied from whichever row shares most with it. `text` may grow; it is what the row is known to hold.
        aim: what a head would like to be held: a little more than that is not.
        """
        held = [self._shared(other, text) for other in range(self.cache.batch)]
        best = max(range(len(held)), key=lambda other: (held[other], other == slot))
        length = held[best]
        if aim and length - _LITTLE <= aim < length:
            length = aim
        if best == slot:
            self.cache.rewind_to(length, slot)
        else:
            self.cache.copy_prefix(best, slot, length)
        self.texts[slot] = text
        return length

    def move(self, source: int, slot: int) -> None:
        """Put a row in the place of another."""
        self.cache.copy_prefix(source, slot, self.cache.lengths[source])
        self.texts[slot], self.texts[source] = self.texts[source], ()
        self.cache.rewind_to(0, source)

    def close(self) -> None:
        """Free the buffers."""
        self._parts.clear()
        self._last = None
        self.cache.close()

    def _shared(self, slot: int, prompt: Sequence[int]) -> int:
        # Where an exception came between commit and rewind, a draft token stands in the newest one's place.
        text = self.texts[slot]
        held = min(self.cache.lengths[slot], len(text) - 1)
        return shared_prefix(text[: max(0, held)], prompt[:-1])

    def _part(self, first: int, count: int) -> Session:
        key = first, count
        if key not in self._parts:
            self._parts[key] = self._target.over(self.cache.part(first, count))
        return self._parts[key]


class PoolRow:
    """One row of a pool, as the loop sees it. It runs chains only."""

    def __init__(self, pool: RowPool, slot: int) -> None:
        self.slot = slot
        self._pool = pool

    @property
    def length(self) -> int:
        """Positions that the row holds."""
        return self._pool.cache.lengths[self.slot]

    @property
    def features(self) -> NDArray[np.float32]:
        """Features of the tokens that the row took in the last run."""
        return self._pool.features(self.slot)

    @property
    def trees_exact(self) -> bool:
        """There are none."""
        return True

    def tree_room(self, length: int) -> int:
        """Rows of a batch share the bias, so there is none."""
        return 0

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` positions."""
        self._pool.cache.rewind_to(length, self.slot)

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Of the nodes behind `start` positions keep these."""
        self._pool.cache.keep_path(self.slot, start, nodes)

    def note_rest(self, seconds: float) -> None:
        """The rest is counted for the rows together."""
