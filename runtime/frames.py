"""The inputs and outputs of one width of a target's graph, bound once and rewritten in place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.backend import run_options
from specrun.runtime.device_buffers import Buffers, minus_infinity


@dataclass(frozen=True, slots=True)
class FrameShape:
    """`pad` dummy rows stand behind `positions` in the attention; `rows` logit rows, `capacity` KV positions."""

    batch: int
    positions: int
    pad: int
    rows: int
    capacity: int


class Frame:
    """`fill` rewrites the inputs of a run, and `run` makes it."""

    def __init__(
        self,
        buffers: Buffers,
        shape: FrameShape,
        qkv_width: int,
        bias: NDArray[Any] | None,
        logits: Any,
        features: Any,
        dtype: str = "float32",
        *,
        number: int = -1,
        idle: int = 0,
    ) -> None:
        """bias: the array of the attention's bias, shared by frames; None where the graph has none.

        logits, features: buffers that the run writes. dtype: of the bias and the dummy row. number: under which a run
        is recorded as a CUDA graph; -1 for none. idle: positions that a row without tokens counts: 1 where
        the graph takes no lengths of queries, and what it writes there is not kept.
        """
        batch, positions, pad = shape.batch, shape.positions, shape.pad
        self.shape, self.positions, self.pad, self.number = shape, positions, pad, number
        self.input_ids = np.zeros((batch, positions), np.int64)
        self.query_lengths = np.zeros(batch, np.int32)
        self.totals = np.zeros(batch, np.int32)
        self.position_ids = np.zeros((batch, positions + pad), np.int64)
        self.logit_rows = np.zeros((batch, shape.rows), np.int64)
        self.logits, self.features, self._bias = logits, features, bias
        self._buffers, self._dtype = buffers, dtype
        self._idle = idle
        self._steps = np.arange(positions + pad, dtype=np.int64)
        self._rows = np.arange(shape.rows, dtype=np.int64)
        self._sent: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids,
            "query_lengths": self.query_lengths,
            "total_lengths_minus_one": self.totals,
            "position_ids": self.position_ids,
            "logit_rows": self.logit_rows,
        }
        self._fixed: dict[str, NDArray[Any]] = {
            "pad_rows": np.zeros((batch, pad, qkv_width), "float16" if dtype == "bfloat16" else dtype),
            "max_total_length": np.array([shape.capacity], np.int32),
        }
        if bias is not None:
            self._sent["attention_bias"] = bias

    def bind(self, session: Any, wanted: Collection[str], kv_values: list[Any], output_names: list[str]) -> None:
        """Bind everything; key and value buffers are input and output at once. wanted: the inputs of the graph."""
        buffers = self._buffers
        self.binding = session.io_binding()
        self._sent = {name: array for name, array in self._sent.items() if name in wanted}
        self._values: dict[str, Any] = {}
        for name, array in (self._sent | self._fixed).items():
            if name in wanted:
                dtype = self._dtype if name in ("pad_rows", "attention_bias") else None
                self._values[name] = buffers.input(name, array, dtype)
                buffers.bind_input(self.binding, name, self._values[name])
        for name, buffer in (("logits", self.logits), ("features", self.features)):
            if name in output_names:
                self._values[name] = buffers.value(buffer)
                buffers.bind_output(self.binding, name, self._values[name])
        presents = [name for name in output_names if name.startswith("present_")]
        for name, value in zip(presents, kv_values, strict=True):
            buffers.bind_input(self.binding, name.replace("present", "past"), value)
            buffers.bind_output(self.binding, name, value)

    def run(self, session: Any) -> None:
        """Run the graph on what was filled in."""
        self._buffers.send(self._values, self._sent)
        options = run_options(self.number)
        if options is None:
            session.run_with_iobinding(self.binding)
        else:
            session.run_with_iobinding(self.binding, options)

    def fill(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], rows: int) -> None:
        """Write one run's tokens; padding positions and spare logit rows repeat the last token.

        A row alone counts all its positions. In a ragged batch a row counts its own, and at least two: the attention
        never sees a lone one.
        """
        for row, new in enumerate(tokens):
            count, past = len(new), lengths[row]
            counted = self.positions if len(tokens) == 1 else max(count, min(2, self.positions))
            counted = counted + self.pad if count else self._idle
            if count:
                self.input_ids[row, :count] = new
                self.input_ids[row, count:] = new[-1]
            self.query_lengths[row] = counted
            self.totals[row] = max(past + counted - 1, 0)  # an idle, empty row must still name a position
            np.add(self._steps, past, out=self.position_ids[row])
            np.clip(self._rows + (count - rows), 0, max(count - 1, 0), out=self.logit_rows[row])

    def block(self, count: int, nodes: int, past: int) -> NDArray[Any]:
        """The bias between the last `nodes` of `count` tokens behind `past` positions."""
        assert self._bias is not None
        block: NDArray[Any] = self._bias[0, 0, count - nodes : count, past + count - nodes : past + count]
        return block

    def plant(self, parents: Sequence[int], block: NDArray[Any], count: int, past: int) -> None:
        """Make a tree of the last tokens: each sees its ancestors and itself, and stands where its depth says."""
        first = count - len(parents)
        block[:] = minus_infinity(self._dtype)
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if parent >= 0:
                block[node] = block[parent]
            block[node, node] = 0.0
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.position_ids[0, first:count] = np.array(depths) + (past + first)
