"""A model that runs: one ONNX session, its KV buffers, and the widths at which it may run.

Target and draft are both a `ModelSession`. A run appends tokens to the cache and returns logits; everything that is
bound is bound once per width, so a run only rewrites a few small arrays in place.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError, ContextLengthError, ManifestError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import GraphSpec
from specrun.runtime.backend import build_features, create_session, first_line, onnxruntime
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.proposal import MAX_NODES
from specrun.runtime.round_costs import RoundCosts

PREFILL_CHUNK = 256
SPARE = 8  # positions that a run may need beyond its tokens: the dummy row, and those that fill a width
WIDEST_BARE = 16  # the widest run without a dummy row; calibration probes them all
MAX_FRAMES = 48


@dataclass(frozen=True, slots=True)
class WidthRule:
    """At which widths rows of a run are bit-equal on this machine: `multiple` of positions, rows and logit rows.

    `exact` is False where the probe found no rule; then results are equal only up to rounding. `padded` False is the
    baseline of `bench`: every run at its natural width, the attention's lone-row kernel included.
    """

    multiple: int = 1
    exact: bool = True
    padded: bool = True


class ModelSession:
    """One graph with its KV cache; `cache.lengths` says how many tokens each row has seen."""

    def __init__(
        self,
        bundle: Bundle,
        onnx_session: Any,
        *,
        width_rule: WidthRule | None = None,
        batch: int = 1,
        cache: KVCache | None = None,
    ) -> None:
        """cache: buffers that are there already, for the batch that they have; else new ones."""
        batch = batch if cache is None else cache.batch
        graph = choose_graph(bundle)
        sizes = bundle.manifest.sizes
        if graph.max_batch is not None and batch > graph.max_batch:
            raise BackendError(
                f"This ONNX Runtime runs {bundle.manifest.name} one row at a time: update it to 1.32 or newer."
            )
        self.bundle = bundle
        self.sizes = sizes
        self.ragged = graph.max_batch is None
        self.width_rule = width_rule or WidthRule()
        self._onnx_session = onnx_session
        self._output_names = check_graph(bundle, onnx_session)
        self._qkv_width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        spec = bundle.manifest.features
        self._feature_width = 0 if spec is None else len(spec.taps) * sizes.hidden
        self.cache = cache or KVCache(
            layers=sizes.layers,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            capacity=1,
            limit=bundle.manifest.kv.positions,
            batch=batch,
        )
        self._frames: OrderedDict[tuple[int, int, int], Frame] = OrderedDict()
        self._bias = np.zeros(0, np.float32)
        self._outputs: dict[str, NDArray[np.float32]] = {}
        self._last: tuple[Frame, int] | None = None
        self._planted: NDArray[np.float32] | None = None  # the part of the bias that is not 0: a tree of the last run
        self.onnx_seconds = 0.0
        self.costs: RoundCosts | None = None  # which learn from the runs of one row

    @property
    def length(self) -> int:
        """Committed positions of row 0."""
        return self.cache.lengths[0]

    @property
    def features(self) -> NDArray[np.float32]:
        """Features f32 [n, taps x hidden] of the n tokens that row 0 took in the last run; [n, 0] without that output.

        A view that the next run overwrites.
        """
        if self._last is None:
            return np.empty((0, self._feature_width), np.float32)
        frame, count = self._last
        return frame.features[0, :count]

    @property
    def batch_features(self) -> NDArray[np.float32]:
        """Features f32 [batch, positions, taps x hidden] of the last run, padding included; a view like `features`."""
        if self._last is None:
            return np.empty((self.cache.batch, 0, self._feature_width), np.float32)
        return self._last[0].features

    def tree_room(self, length: int) -> int:
        """The most nodes that a token tree may have behind `length` tokens; 0: only its main branch can be run.

        A sliding window counts slots of the cache, and of the branches of a tree only one has its tokens in a row.
        """
        kv = self.bundle.manifest.kv
        return 0 if kv.window is not None else min(MAX_NODES, kv.positions - length - SPARE)

    def over(self, cache: KVCache) -> ModelSession:
        """Another session of the same graph and width rule, over these buffers."""
        return ModelSession(self.bundle, self._onnx_session, width_rule=self.width_rule, cache=cache)

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` positions of row 0."""
        self.cache.rewind_to(length)

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Of the nodes that the last run put behind `start` positions of row 0, keep these, ascending, and no more."""
        self.cache.keep_path(0, start, nodes)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions a row, as far as the model has them."""
        if self.cache.reserve(min(length, self.bundle.manifest.kv.positions)):
            self._frames.clear()  # they are bound to the buffers of before

    def fit(self, length: int) -> None:
        """Keep the first `length` positions of row 0, in buffers that hold no more."""
        self.cache.rewind_to(length)
        if self.cache.fit(length):
            self._frames.clear()

    def close(self) -> None:
        """Free the session and its buffers."""
        self._frames.clear()
        self._outputs.clear()
        self._last = self._planted = None
        self.cache.close()
        self._onnx_session = None

    def note_rest(self, seconds: float) -> None:
        """A round took so long after its run."""
        if self.costs is not None:
            self.costs.note_rest(seconds)

    def prefill(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append `tokens` to row 0 in chunks; logits f32 [1, vocabulary] after the last."""
        return self.run(tokens, rows=1)

    def run(self, tokens: Sequence[int], *, rows: int, parents: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Append `tokens` to row 0; logits f32 [rows, vocabulary] of its last `rows` positions.

        parents: the last len(parents) tokens are the nodes of a tree (`Proposal.parents`) whose root is the token
        before them. Each sees only its ancestors, at the position that its depth gives it. Their keys lie in the order
        of the nodes, so only the main branch has the bits of a chain; `keep_path` makes one of any path.

        Where a chunk of the prefill or more comes before those, it runs by itself. The result is a view that the next
        run overwrites.
        """
        while len(tokens) - rows >= PREFILL_CHUNK:
            self.run_batch([tokens[:PREFILL_CHUNK]], rows=1)
            tokens = tokens[PREFILL_CHUNK:]
        logits: NDArray[np.float32] = self.run_batch([tokens], rows=rows, parents=parents)[0]
        return logits

    def run_batch(
        self, tokens: Sequence[Sequence[int]], *, rows: int, parents: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """Append `tokens[row]` to each row, none to an idle one; logits f32 [batch, rows, vocabulary] of the last ones.

        Rows may have different numbers of tokens where the build has `query_seqlens`; a row with n < `rows` tokens
        has its logits in the last n entries. parents: as in `run`, for a batch of one row.
        """
        frame = self._frame(max(map(len, tokens)), rows)
        lengths = self.cache.lengths
        frame.fill(tokens, lengths, rows)
        if self._planted is not None:  # the frames share the bias
            self._planted[:] = 0.0
            self._planted = None
        if parents is not None:
            self._planted = frame.block(len(tokens[0]), len(parents), lengths[0])
            frame.plant(parents, self._planted, len(tokens[0]), lengths[0])
        start = time.perf_counter()
        try:
            self._onnx_session.run_with_iobinding(frame.binding)
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            name = self.bundle.manifest.name
            raise BackendError(f"ONNX Runtime failed while running {name}: {first_line(error)}") from error
        seconds = time.perf_counter() - start
        self.onnx_seconds += seconds
        if self.costs is not None and len(tokens) == 1 and self.width_rule.padded:
            self.costs.note(len(tokens[0]), lengths[0], seconds)
        self._last = frame, len(tokens[0])
        for row, new in enumerate(tokens):
            lengths[row] += len(new)
        return frame.logits[:, :rows]

    def _frame(self, longest: int, rows: int) -> Frame:
        positions, pad, rows = self._padded(longest, rows)
        needed = max(self.cache.lengths) + positions + pad
        if needed > self.bundle.manifest.kv.positions:
            raise ContextLengthError(
                f"{needed} positions are needed and {self.bundle.manifest.name} has {self.sizes.context}: "
                "shorten the prompt or lower --max-tokens."
            )
        self.reserve(needed)
        key = (positions, pad, rows)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._bind(positions, pad, rows)
            if len(self._frames) > MAX_FRAMES:
                self._frames.popitem(last=False)
        else:
            self._frames.move_to_end(key)
        return frame

    def _padded(self, longest: int, rows: int) -> tuple[int, int, int]:
        """(positions, dummy rows of the attention, logit rows) to run for `longest` new tokens."""
        rule, batch = self.width_rule, self.cache.batch
        if not rule.padded:
            return longest, 0, rows
        positions = longest
        while positions * batch % rule.multiple:
            positions += 1
        while rows * batch % rule.multiple:
            rows += 1
        # The attention takes its rows in blocks (2 x head_dim, fewer where the L2 cache is small), and a wide run may
        # leave a lone one in the last block. With a dummy row behind it no real row is ever alone.
        return positions, int(positions == 1 or positions > WIDEST_BARE), rows

    def _bind(self, positions: int, pad: int, rows: int) -> Frame:
        capacity = self.cache.capacity
        wanted = (positions + pad) * capacity
        if self._bias.size < wanted:
            self._bias = np.zeros(wanted, np.float32)
        bias = self._bias[:wanted].reshape(1, 1, positions + pad, capacity)
        batch = self.cache.batch
        logits = self._shared("logits", batch, rows, self.sizes.vocabulary)
        features = self._shared("features", batch, positions, self._feature_width)
        frame = Frame(pad, self._qkv_width, bias, logits, features)
        frame.bind(self._onnx_session, self.cache.values, self._output_names)
        return frame

    def _shared(self, name: str, *shape: int) -> NDArray[np.float32]:
        """A beginning of the buffer that all frames write this output to: only that of the last run is of use."""
        size = math.prod(shape)
        if name not in self._outputs or self._outputs[name].size < size:
            self._outputs[name] = np.empty(2 * size, np.float32)  # frames bound before keep theirs, so it seldom grows
        return self._outputs[name][:size].reshape(shape)


class Frame:
    """The inputs and outputs of one width, bound once; `fill` rewrites them in place."""

    def __init__(
        self,
        pad: int,
        qkv_width: int,
        bias: NDArray[np.float32],
        logits: NDArray[np.float32],
        features: NDArray[np.float32],
    ) -> None:
        (batch, positions, _), rows = features.shape, logits.shape[1]
        self.positions, self.pad = positions, pad
        self.input_ids = np.zeros((batch, positions), np.int64)
        self.query_lengths = np.zeros(batch, np.int32)
        self.totals = np.zeros(batch, np.int32)
        self.position_ids = np.zeros((batch, positions + pad), np.int64)
        self.logit_rows = np.zeros((batch, rows), np.int64)
        self.logits, self.features, self._bias = logits, features, bias
        self._steps = np.arange(positions + pad, dtype=np.int64)
        self._rows = np.arange(rows, dtype=np.int64)
        self._inputs: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids,
            "query_lengths": self.query_lengths,
            "pad_rows": np.zeros((batch, pad, qkv_width), np.float32),
            "total_lengths_minus_one": self.totals,
            "max_total_length": np.array([bias.shape[-1]], np.int32),
            "position_ids": self.position_ids,
            "attention_bias": bias,
            "logit_rows": self.logit_rows,
        }

    def bind(self, session: Any, kv_values: list[Any], output_names: list[str]) -> None:
        """Bind everything; key and value buffers are input and output at once."""
        ort = onnxruntime()
        self.binding = session.io_binding()
        self._values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self._inputs.items()}
        for name, value in self._values.items():
            self.binding.bind_ortvalue_input(name, value)
        for name, array in (("logits", self.logits), ("features", self.features)):
            if name in output_names:
                self._values[name] = ort.OrtValue.ortvalue_from_numpy(array)
                self.binding.bind_ortvalue_output(name, self._values[name])
        presents = [name for name in output_names if name.startswith("present_")]
        for name, value in zip(presents, kv_values, strict=True):
            self.binding.bind_ortvalue_input(name.replace("present", "past"), value)
            self.binding.bind_ortvalue_output(name, value)

    def fill(self, tokens: Sequence[Sequence[int]], lengths: Sequence[int], rows: int) -> None:
        """Write one run's tokens; padding positions and spare logit rows repeat the last token.

        A row alone counts all its positions. In a ragged batch a row counts its own, and at least two: the attention
        never sees a lone one.
        """
        for row, new in enumerate(tokens):
            count, past = len(new), lengths[row]
            counted = self.positions if len(tokens) == 1 else max(count, min(2, self.positions))
            counted = counted + self.pad if count else 0
            if count:
                self.input_ids[row, :count] = new
                self.input_ids[row, count:] = new[-1]
            self.query_lengths[row] = counted
            self.totals[row] = max(past + counted - 1, 0)  # an idle, empty row must still name a position
            np.add(self._steps, past, out=self.position_ids[row])
            np.clip(self._rows + (count - rows), 0, max(count - 1, 0), out=self.logit_rows[row])

    def block(self, count: int, nodes: int, past: int) -> NDArray[np.float32]:
        """The bias between the last `nodes` of `count` tokens behind `past` positions."""
        return self._bias[0, 0, count - nodes : count, past + count - nodes : past + count]

    def plant(self, parents: Sequence[int], block: NDArray[np.float32], count: int, past: int) -> None:
        """Make a tree of the last tokens: each sees its ancestors and itself, and stands where its depth says."""
        first = count - len(parents)
        block[:] = -np.inf
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if parent >= 0:
                block[node] = block[parent]
            block[node, node] = 0.0
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        self.position_ids[0, first:count] = np.array(depths) + (past + first)


def choose_graph(bundle: Bundle) -> GraphSpec:
    """The first graph of the bundle, in the order target, target_batch1, whose needs the installed build meets."""
    features = build_features()
    graphs = bundle.manifest.graphs
    for name in ("target", "target_batch1"):
        if name in graphs and features.issuperset(graphs[name].requires):
            return graphs[name]
    raise BackendError(f"No graph of {bundle.manifest.name} runs on this ONNX Runtime: update it to 1.32 or newer.")


def check_graph(bundle: Bundle, onnx_session: Any) -> list[str]:
    """The names of the graph's outputs, logits first, after a look whether it is the graph that the manifest describes.

    Raises ManifestError naming the first input or output that is missing or has another shape.
    """
    sizes = bundle.manifest.sizes
    cache = (None, sizes.kv_heads, None, sizes.head_dim)
    parts = [f"{part}.{layer}" for layer in range(sizes.layers) for part in ("key", "value")]
    inputs: dict[str, tuple[int | None, ...]] = {
        "pad_rows": (None, None, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim),
        **{f"past_{part}": cache for part in parts},
    }
    outputs: dict[str, tuple[int | None, ...]] = {"logits": (None, None, sizes.vocabulary)}
    if bundle.manifest.features is not None:
        outputs["features"] = (None, None, len(bundle.manifest.features.taps) * sizes.hidden)
    outputs |= {f"present_{part}": cache for part in parts}
    for wanted, found in ((inputs, onnx_session.get_inputs()), (outputs, onnx_session.get_outputs())):
        shapes = {value.name: value.shape for value in found}
        extra = [name for name in shapes if name.startswith(("past_", "present_")) and name not in wanted]
        for name in (*wanted, *extra):
            if not _fits(wanted.get(name), shapes.get(name)):
                model = bundle.manifest.name
                raise ManifestError(f"The manifest of {model} does not describe its graph ({name}): export it again.")
    return [*outputs]


def _fits(wanted: Sequence[int | None] | None, found: Sequence[int | str] | None) -> bool:
    """Whether both are there and of one rank, and every size that is wanted (not None) is the one found."""
    if wanted is None or found is None or len(wanted) != len(found):
        return False
    return all(size is None or size == other for size, other in zip(wanted, found, strict=True))


def session_opener(
    bundle: Bundle, threads: int, device: str = "cpu", *, shared_cpu: bool = False
) -> Callable[[int, WidthRule], ModelSession]:
    """Load the bundle's graph once; the result opens sessions over it: (batch, rule) -> ModelSession with its own KV.

    shared_cpu: another model runs in turn on the same cores.
    """
    path = bundle.path / choose_graph(bundle).file
    onnx_session = create_session(path, threads=threads, device=device, shared_cpu=shared_cpu)
    return lambda batch, rule: ModelSession(bundle, onnx_session, width_rule=rule, batch=batch)
