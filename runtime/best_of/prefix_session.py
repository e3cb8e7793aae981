"""Rows behind one prefix: a session of the graph `target_shared`, and the widths at which it may run."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError, ContextLengthError
from specrun.models_cache.layout import Bundle
from specrun.runtime.backend import first_line
from specrun.runtime.device_buffers import HOST
from specrun.runtime.frames import Frame, FrameShape
from specrun.runtime.graph_check import check_graph
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.session import MAX_FRAMES, SPARE, WIDEST_BARE
from specrun.runtime.width_rule import WidthRule

SINK: Final = 1
"""The slot of a row that stands for the prefix: a zero key and a zero value, before its own tokens."""
TOTAL_STEP: Final = 64  # what the attention looks over grows in such steps


@dataclass(frozen=True, slots=True)
class Prefix:
    """What all rows begin with: `length` positions, and the buffers f32 [kv_heads, 1, length, head_dim] that hold them.

    The buffers are those of the cache that read the prompt, key.0, value.0, key.1, ...
    """

    length: int
    buffers: list[NDArray[np.float32]]

    @classmethod
    def of_cache(cls, cache: KVCache) -> Prefix:
        """The only row of a cache, without a copy; its capacity must be what it holds."""
        if cache.batch != 1 or cache.lengths[0] != cache.capacity:
            raise ValueError(f"a cache of {cache.capacity} positions holds {cache.lengths} of a prefix")
        return cls(cache.capacity, [buffer.swapaxes(0, 1) for buffer in cache.arrays()])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


class PrefixSession:
    """Runs rows over the buffers of their own that `cache` holds; its lengths count slots, the sink's included."""

    def __init__(
        self, bundle: Bundle, onnx_session: Any, prefix: Prefix, cache: KVCache, *, rule: WidthRule, threads: int
    ) -> None:
        self.bundle, self.sizes = bundle, bundle.manifest.sizes
        self.prefix, self.cache = prefix, cache
        self.width_rule = rule
        self.onnx_seconds = 0.0
        self._threads = threads
        self._onnx_session = onnx_session
        self._output_names = check_graph(bundle, onnx_session)
        self._inputs = frozenset(value.name for value in onnx_session.get_inputs())
        self._qkv_width = (self.sizes.heads + 2 * self.sizes.kv_heads) * self.sizes.head_dim
        spec = bundle.manifest.features
        self._feature_width = 0 if spec is None else len(spec.taps) * self.sizes.hidden
        self._frames: OrderedDict[tuple[int, int, int], PrefixFrame] = OrderedDict()
        self._outputs: dict[str, NDArray[np.float32]] = {}
        self._last: PrefixFrame | None = None

    @property
    def batch_features(self) -> NDArray[np.float32]:
        """Features f32 [batch, positions, taps x hidden] of the last run, padding included; the next replaces them."""
        if self._last is None:
            return np.empty((self.cache.batch, 0, self._feature_width), np.float32)
        features: NDArray[np.float32] = self._last.features
        return features

    @property
    def positions(self) -> int:
        """The most that prefix and row may have together, spare ones included."""
        return self.bundle.manifest.kv.positions

    @property
    def spare(self) -> int:
        """Slots of a row beyond its tokens, for what a run is padded by: `SPARE`, and what fills groups of queries."""
        return SPARE + 2 * (self._groups - 1)

    @property
    def _groups(self) -> int:
        return -(-self._threads // self.sizes.kv_heads)

    def new_cache(self, batch: int) -> KVCache:
        """Buffers for so many rows, of as many slots at most as those of this session."""
        return self.cache.another(batch, self.cache.limit)

    def over(self, cache: KVCache) -> PrefixSession:
        """Another session behind the same prefix, over these buffers."""
        return PrefixSession(
            self.bundle, self._onnx_session, self.prefix, cache, rule=self.width_rule, threads=self._threads
        )

    def run_batch(self, tokens: Sequence[Sequence[int]], *, rows: int) -> NDArray[np.float32]:
        """Append `tokens[row]` to each row, none to an idle one; logits f32 [batch, rows, vocabulary] of the last ones.

        A row with n < `rows` tokens has its logits in the last n entries. They are a view that the next run overwrites.
        """
        frame = self._frame(max(map(len, tokens)), rows)
        lengths = self.cache.lengths
        frame.fill(tokens, lengths, rows)
        start = perf_counter()
        try:
            frame.run(self._onnx_session)
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            name = self.bundle.manifest.name
            raise BackendError(f"ONNX Runtime failed while running {name}: {first_line(error)}") from error
        self.onnx_seconds += perf_counter() - start
        self._last = frame
        for row, new in enumerate(tokens):
            lengths[row] += len(new)
        logits: NDArray[np.float32] = frame.logits[:, :rows]
        return logits

    def padded(self, longest: int, rows: int) -> tuple[int, int, int, int]:
        """(positions, dummy rows of the attention, logit rows, groups of queries) to run for `longest` new tokens.

        There are as many products over the prefix as threads, or more: then each runs in one thread, and whole, while
        the pieces that one is cut in would depend on the number of its rows. None has one row, whose kernel sums in
        another order.
        """
        multiple, batch, sizes = self.width_rule.multiple, self.cache.batch, self.sizes
        groups = self._groups
        queries = batch * sizes.heads // sizes.kv_heads
        positions = longest
        while positions * batch % multiple or positions * queries % groups or positions * queries < 2 * groups:
            positions += 1
        while rows * batch % multiple:
            rows += 1
        return positions, int(positions == 1 or positions > WIDEST_BARE), rows, groups

    def _frame(self, longest: int, rows: int) -> PrefixFrame:
        positions, pad, rows, groups = self.padded(longest, rows)
        needed = max(self.cache.lengths) + positions + pad
        most = self.positions
        if needed > self.cache.capacity or self.prefix.length - SINK + needed > most:
            raise ContextLengthError(
                f"{needed} positions are needed behind a prompt of {self.prefix.length} and there are "
                f"{min(self.cache.capacity, most - self.prefix.length + SINK)}: lower --max-tokens."
            )
        key = positions, pad, rows
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._bind(positions, pad, rows, groups)
            if len(self._frames) > MAX_FRAMES:
                self._frames.popitem(last=False)
        else:
            self._frames.move_to_end(key)
        return frame

    def _bind(self, positions: int, pad: int, rows: int, groups: int) -> PrefixFrame:
        batch, sizes = self.cache.batch, self.sizes
        logits = self._shared("logits", batch, rows, sizes.vocabulary)
        features = self._shared("features", batch, positions, self._feature_width)
        queries = batch * positions * sizes.heads // (sizes.kv_heads * groups)
        shape = FrameShape(batch, positions, pad, rows, self.cache.capacity)
        grouped = (sizes.kv_heads, groups, queries, sizes.head_dim)
        frame = PrefixFrame(shape, self._qkv_width, self.prefix, grouped, logits, features)
        frame.bind(self._onnx_session, self._inputs, self.cache.values, self._output_names)
        return frame

    def _shared(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A beginning of the buffer that all frames write this output to: only that of the last run is of use."""
        size = math.prod(shape)
        if name not in self._outputs or self._outputs[name].size < size:
            self._outputs[name] = np.empty(2 * size, np.float32)
        return self._outputs[name][:size].reshape(shape)


class PrefixFrame(Frame):
    """The inputs and outputs of one width, behind a prefix."""

    def __init__(
        self,
        shape: FrameShape,
        qkv_width: int,
        prefix: Prefix,
        queries: tuple[int, ...],
        logits: NDArray[np.float32],
        features: NDArray[np.float32],
    ) -> None:
        super().__init__(HOST, shape, qkv_width, None, logits, features)
        self._before = prefix.length - SINK
        self._total = self._fixed["max_total_length"]
        self._bias_pads = np.array([0, 0, 0, 0, 0, 0, shape.pad, 0], np.int64)
        self._fixed |= {"prefix_queries": np.array(queries, np.int64), "bias_pads": self._bias_pads}
        for index, buffer in enumerate(prefix.buffers):
            self._fixed[f"prefix_{'value' if index % 2 else 'key'}.{index // 2}"] = buffer

    def fill(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], rows: int) -> None:
        """As `Frame.fill`; `lengths` are in slots, and positions count from the start of the prefix."""
        super().fill(tokens, lengths, rows)
        self.position_ids += self._before
        last = int(self.totals.max()) + 1
        self._total[0] = min(self.shape.capacity, -(-last // TOTAL_STEP) * TOTAL_STEP)
        self._bias_pads[7] = self._total[0] - 1
