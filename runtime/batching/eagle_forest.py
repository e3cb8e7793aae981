"""An EAGLE speculator for rows of a batch: the slots of all of them lie in one buffer, and one run serves all rows.

Which slots belong to whom is told to the attention by its bias, so they may lie in any order, and rows with one
beginning share it. A row has its own chain in flight; its slots are dropped when the round's chains are drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Unpack

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.head_frames import HeadFrame
from specrun.runtime.speculator import Candidates, Choice, EagleHead, EagleSizes, Features

TIDIED_FROM: Final = 256  # slots, below which the buffer just grows


class ForestRow:
    """The slots of one row: `places[i]` in the buffer, for the features from the row's first one on."""

    def __init__(self, places: Sequence[int] = (), dropped: int = 0) -> None:
        """dropped: slots before the first one here that the head no longer sees."""
        self.places = [*places]
        self.dropped = dropped
        self.chain: list[int] = []  # slots of the chain in flight
        self.hidden: NDArray[np.float32] | None = None  # of the row's last slot or node

    @property
    def length(self) -> int:
        """Slots written from features, dropped ones too."""
        return self.dropped + len(self.places)

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` slots."""
        del self.places[max(0, length - self.dropped) :]

    def copy(self, length: int) -> ForestRow:
        """A row that begins with the first `length` slots of this one."""
        return ForestRow(self.places[: max(0, length - self.dropped)], min(self.dropped, length))


class EagleForest(EagleHead):
    """The buffer, and the runs over it."""

    def __init__(self, name: str, onnx_session: Any, **sizes: Unpack[EagleSizes]) -> None:
        super().__init__(name, onnx_session, **sizes)
        self.rows: list[ForestRow] = []  # whose slots are kept

    @property
    def end(self) -> int:
        """Slots of the buffer that were written so far."""
        return self.cache.lengths[0]

    def room(self, slots: int) -> bool:
        """Whether so many slots can be written; tidies the buffer where that helps, and it may drop old slots."""
        if self.end + slots > self.cache.capacity and self.end > TIDIED_FROM:
            self._tidy(slots)
        return self.end + slots <= self.positions

    def append(
        self, rows: Sequence[ForestRow], features: Sequence[Features], tokens: Sequence[Sequence[int]], choice: Choice
    ) -> Candidates:
        """Write slots of each row from features f32 [n, feature_width] and the tokens after each.

        Candidates of each row's last slot.
        """
        counts = [*map(len, tokens)]
        places = self._take(sum(counts))
        positions: list[int] = []
        owners: list[ForestRow] = []
        for row, count in zip(rows, counts, strict=True):
            positions += range(row.length, row.length + count)
            owners += [row] * count
            row.places += places[len(owners) - count : len(owners)]
            row.chain.clear()
        last = np.cumsum(counts) - 1
        inputs = {"features": np.concatenate(features), "recycled": np.zeros((0, self._hidden_size), np.float32)}
        ids = [token for own in tokens for token in own]
        return self._run_over(rows, inputs, ids, positions, owners, last, choice)

    def grow(self, rows: Sequence[ForestRow], tokens: Sequence[int], choice: Choice) -> Candidates:
        """Write a node below the last one of each row's chain; candidates below it, a row each."""
        places = self._take(len(rows))
        positions = [row.length + len(row.chain) for row in rows]
        for row, place in zip(rows, places, strict=True):
            row.chain.append(place)
        hidden = [row.hidden for row in rows if row.hidden is not None]
        inputs = {"features": np.zeros((0, self._width), np.float32), "recycled": np.stack(hidden)}
        return self._run_over(rows, inputs, tokens, positions, rows, np.arange(len(rows)), choice)

    def drop_chains(self, rows: Sequence[ForestRow], end: int) -> None:
        """Forget all chains in flight; `end` was that of the buffer before them."""
        for row in rows:
            row.chain.clear()
        self.cache.rewind_to(end)

    def close(self) -> None:
        """Free the buffer."""
        self.rows.clear()
        self.cache.close()

    def _take(self, count: int) -> range:
        self.cache.reserve(self.end + count)
        start = self.end
        self.cache.lengths[0] = start + count
        return range(start, start + count)

    def _run_over(
        self,
        rows: Sequence[ForestRow],
        inputs: dict[str, NDArray[Any]],
        tokens: Sequence[int],
        positions: Sequence[int],
        owners: Sequence[ForestRow],
        last: NDArray[np.int64],
        choice: Choice,
    ) -> Candidates:
        """owners: of each token; last: the token of each row whose candidates are wanted."""
        capacity, count = self.cache.capacity, len(tokens)
        bias = np.full((1, 1, count, capacity), -np.inf, np.float32)
        seen: ForestRow | None = None
        for place, owner in enumerate(owners):
            if owner is seen:  # its tokens lie next to each other, and the attention keeps their order
                bias[0, 0, place] = bias[0, 0, place - 1]
            else:
                bias[0, 0, place, owner.places + owner.chain] = 0.0
                seen = owner
        inputs |= {
            "input_ids": np.array(tokens, np.int64),
            "position_ids": np.array([positions], np.int64),
            "total_length_minus_one": np.array([self.end - 1], np.int32),
            "max_total_length": np.array([capacity], np.int32),
            "attention_bias": bias,
            "rows": last.astype(np.int64),
        }
        inputs |= self._choice_inputs(1 if choice.noise is None else len(rows))
        outputs = self._choice_outputs(len(rows), choice.logits)
        outputs["hidden"] = (count, self._hidden_size), "float32"
        key, value = self.cache.values
        shared = {"past_key": key, "past_value": value, "present_key": key, "present_value": value}
        frame = HeadFrame(self._onnx_session, self._buffers, inputs, outputs, shared)
        candidates, hidden = self._run(frame, choice), frame.read("hidden")
        for row, place in zip(rows, last, strict=True):
            row.hidden = hidden[place]
        return candidates

    def _tidy(self, slots: int) -> None:
        """Put the slots of `rows` together; where that leaves too little room, they forget their oldest ones."""
        share = max(0, self.positions * 7 // 8 - slots) // max(1, len(self.rows))
        for row in self.rows:
            drop = max(0, len(row.places) - share)
            del row.places[:drop]
            row.dropped += drop
        kept = sorted({place for row in self.rows for place in row.places})
        moved = {place: number for number, place in enumerate(kept)}
        self.cache.keep_path(0, 0, kept)
        for row in self.rows:
            row.places = [moved[place] for place in row.places]
