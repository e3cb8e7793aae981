"""The rows of best-of-N: a pool whose rows hold only what they wrote, behind a prompt that is stored once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.batching.row_pool import PoolRow, RowPool
from specrun.runtime.best_of.prefix_session import SINK, PrefixSession
from specrun.runtime.session import SPARE, BatchLogits


class PrefixPool(RowPool):
    """Rows that begin behind a prompt. `cache.lengths` count slots; the loop sees positions.

    A row's slot 0 stands for the prompt, so that slot s lies at position prompt - 1 + s: a row without slots has read
    all of the prompt but its last token. The run that reads it is answered with the logits that the prompt's own run
    gave.
    """

    read = True

    def __init__(
        self, session: PrefixSession, rows: int, logits: NDArray[np.float32], features: NDArray[np.float32]
    ) -> None:
        """session: over the buffers of all rows. logits, features: what reading the prompt gave, f32 [vocabulary] after
        it and f32 [n, taps x hidden] of its last n tokens.
        """
        super().__init__(session, rows, session.cache)
        self.before = session.prefix.length - SINK
        self._logits, self._features = logits[None, None], features
        self._padding = session.spare - SPARE + 4  # what a width may be padded by

    def row(self, slot: int) -> PoolRow:
        """A row as the loop sees it."""
        return PrefixRow(self, slot)

    def room(self, first: int, count: int) -> int:
        """The widest run that these rows have slots for."""
        longest = max(self.cache.lengths[first : first + count])
        return min(self.cache.limit, self.positions - self.before) - longest - self._padding

    def reserve(self, length: int) -> None:
        """Make room for `length` positions a row, the prompt's included, as far as there are slots."""
        self._grow(length - self.before)

    def run(self, first: int, tokens: Sequence[list[int]], *, rows: int) -> tuple[BatchLogits, float]:
        """As `RowPool.run`; what a row without slots takes is the prompt's last token."""
        if len(tokens) == 1 and not self.cache.lengths[first]:
            self.cache.lengths[first] = SINK
            self._last = None
            return self._logits, 0.0
        return super().run(first, tokens, rows=rows)

    def features(self, slot: int) -> NDArray[np.float32]:
        """As `RowPool.features`; behind the prompt those of its last tokens."""
        return self._features if self._last is None else super().features(slot)

    def begin(self, slot: int, text: Sequence[int], *, aim: int | None = None) -> int:
        """Give a row to a sample; how much of the prompt it holds."""
        self.cache.rewind_to(0, slot)
        self.texts[slot] = ()
        return self.before

    def _grow(self, capacity: int) -> None:
        super()._grow(min(capacity, self.cache.limit))


class PrefixRow(PoolRow):
    """A row of a `PrefixPool`: the loop counts positions."""

    def __init__(self, pool: PrefixPool, slot: int) -> None:
        super().__init__(pool, slot)
        self._before = pool.before

    @property
    def length(self) -> int:
        """Positions that prompt and row hold."""
        return super().length + self._before

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` positions."""
        super().rewind_to(length - self._before)

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Of the nodes behind `start` positions keep these."""
        super().keep_path(start - self._before, nodes)
