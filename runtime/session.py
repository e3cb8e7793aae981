"""A model that runs: one ONNX session, its KV buffers, and the widths at which it may run.

Target and draft are both a `ModelSession`. A run appends tokens to the cache and returns logits; everything that is
bound is bound once per width, so a run only rewrites a few small arrays in place.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError, ContextLengthError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import GraphSpec
from specrun.runtime.backend import build_features, create_session, first_line
from specrun.runtime.device import CPU, Device, has_room, require_memory
from specrun.runtime.device_buffers import BATCH_STEP, HOST_TYPES, DeviceBuffers, buffers_of
from specrun.runtime.device_rows import DeviceLogits, Logits
from specrun.runtime.frames import Frame, FrameShape
from specrun.runtime.graph_check import check_graph
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.kv_shape import KVShape
from specrun.runtime.proposal import MAX_NODES
from specrun.runtime.round_costs import RoundCosts
from specrun.runtime.split_runs import in_pieces, row_by_row
from specrun.runtime.width_rule import WidthRule

__all__ = ["PREFILL_CHUNK", "TREES", "BatchLogits", "ModelSession", "WidthRule", "choose_graph", "session_opener"]

PREFILL_CHUNK = 256
SPARE = 8  # positions that a run may need beyond its tokens: the dummy row, and those that fill a width
WIDEST_BARE = 16  # the widest run without a dummy row; calibration probes them all
MAX_FRAMES = 48
TREES = "target_tree"  # the graph for token trees, in bundles whose other graphs run chains only
PROBED_ROWS = 3  # of a batch that calibration runs
WIDE_STEP = 64  # where there is no dummy row, wide runs have multiples of it, so that few widths are bound
_NUMBERS: Final = itertools.count(1)  # of recorded runs; those of one ONNX Runtime session must differ

BatchLogits = NDArray[np.float32] | Sequence[Logits]  # of each row of a batch


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
        device: Device = CPU,
        positions: int | None = None,
        open_trees: Callable[[], Any] | None = None,
    ) -> None:
        """cache: buffers that are there already, for the batch that they have; else new ones.

        open_trees: gives the session of the graph for token trees, where the other runs chains only; it is asked when
        the first tree is run. positions: the most that a row may have, spare ones included; by default all of them.
        """
        batch = batch if cache is None else cache.batch
        graph = choose_graph(bundle)
        sizes = bundle.manifest.sizes
        self.bundle = bundle
        self.sizes = sizes
        self.ragged = graph.max_batch is None
        self._inputs = frozenset(value.name for value in onnx_session.get_inputs())
        self.pads_rows = "pad_rows" in self._inputs  # a dummy row beside each lone one
        if batch > 1 and not self.rows_together:
            raise BackendError(
                f"This ONNX Runtime runs {bundle.manifest.name} one row at a time: update it to 1.32 or newer."
            )
        self.width_rule = width_rule or WidthRule()
        self.device = device
        self.positions = min(positions or bundle.manifest.kv.positions, bundle.manifest.kv.positions)
        self._onnx_session = onnx_session
        self._open_trees = open_trees
        self._output_names = check_graph(bundle, onnx_session)
        self.trees_exact = "attention_bias" in self._inputs
        self.tree_bound: float | None = None
        self._qkv_width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        spec = bundle.manifest.features
        self._feature_width = 0 if spec is None else len(spec.taps) * sizes.hidden
        self._dtype = bundle.manifest.kv.dtype
        self._buffers = buffers_of(device)
        self.cache = cache or KVCache(
            layers=sizes.layers,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            capacity=1,
            limit=self.positions,
            batch=batch,
            dtype=self._dtype,
            buffers=self._buffers,
        )
        self._frames: OrderedDict[tuple[bool, FrameShape], Frame] = OrderedDict()
        self._records = device.cuda_graphs and cache is None  # buffers of others come and go
        self._bias = np.zeros(0, HOST_TYPES[self._dtype])
        self._outputs: dict[Any, Any] = {}
        self.single_rows: dict[int, ModelSession] = {}  # rows by themselves, where a run cannot take them together
        self._last: Frame | None = None
        self._taken = 0  # tokens of row 0 in the last run
        self._joined: NDArray[np.float32] | None = None  # features of a run that took several, or came from a device
        self._planted: NDArray[Any] | None = None  # the part of the bias that is not 0: a tree of the last run
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
        return np.asarray(self.batch_features[0, : self._taken])

    @property
    def batch_features(self) -> NDArray[np.float32]:
        """Features f32 [batch, positions, taps x hidden] of the last run, padding included; a view like `features`."""
        if self._joined is not None:
            return self._joined
        if self._last is None:
            return np.empty((self.cache.batch, 0, self._feature_width), np.float32)
        features = self._buffers.read(self._last.features)
        if self._buffers.resident:  # once, as every row of a batch asks for them
            self._joined = features
        return features

    @property
    def rows_together(self) -> bool:
        """Whether several rows can run: older builds take them with one position each, which a dummy row makes two."""
        return self.ragged or not self.pads_rows

    @property
    def _bare_rows(self) -> bool:
        """Whether a run takes one token of each of several rows, and no rule can widen it."""
        return self.cache.batch > 1 and not self.ragged

    def tree_room(self, length: int) -> int:
        """The most nodes that a token tree may have behind `length` tokens; 0: only its main branch can be run.

        A sliding window counts slots of the cache, and of the branches of a tree only one has its tokens in a row.
        """
        kv = self.bundle.manifest.kv
        allowed = self.trees_exact or (self.may_run_trees and self.tree_bound is not None)
        if kv.window is not None or not allowed:
            return 0
        return min(MAX_NODES, self.positions - length - self.spare)

    @property
    def may_run_trees(self) -> bool:
        """Whether there is a graph for trees alone, and room for it."""
        return self._open_trees is not None and not self.trees_exact

    @property
    def spare(self) -> int:
        """Positions that a run may need beyond its tokens."""
        return max(SPARE if self.pads_rows else WIDE_STEP, self.width_rule.multiple)

    def new_cache(self, batch: int) -> KVCache:
        """Buffers for so many rows of this model, where those of this session are."""
        return self.cache.another(batch, self.positions)

    def over(self, cache: KVCache) -> ModelSession:
        """Another session of the same graph and width rule, over these buffers."""
        return ModelSession(
            self.bundle,
            self._onnx_session,
            width_rule=self.width_rule,
            cache=cache,
            device=self.device,
            positions=self.positions,
            open_trees=self._open_trees,
        )

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` positions of row 0."""
        self.cache.rewind_to(length)

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Of the nodes that the last run put behind `start` positions of row 0, keep these, ascending, and no more."""
        self.cache.keep_path(0, start, nodes)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions a row, as far as the model has them."""
        if self.cache.reserve(min(length, self.positions)):
            self._frames.clear()  # they are bound to the buffers of before
            self.single_rows.clear()

    def fit(self, length: int) -> None:
        """Keep the first `length` positions of row 0, in buffers that hold no more."""
        self.cache.rewind_to(length)
        if self.cache.fit(length):
            self._frames.clear()

    def close(self) -> None:
        """Free the session and its buffers."""
        self._frames.clear()
        self.single_rows.clear()
        self._outputs.clear()
        self._joined = self._last = self._planted = None
        self.cache.close()
        self._onnx_session = self._open_trees = None

    def note_rest(self, seconds: float) -> None:
        """A round took so long after its run."""
        if self.costs is not None:
            self.costs.note_rest(seconds)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        """Append `tokens` to row 0 in chunks; logits f32 [1, vocabulary] after the last."""
        return self.run(tokens, rows=1)

    def run(self, tokens: Sequence[int], *, rows: int, parents: Sequence[int] | None = None) -> Logits:
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
        logits: Logits = self.run_batch([tokens], rows=rows, parents=parents)[0]
        return logits

    def run_batch(
        self, tokens: Sequence[Sequence[int]], *, rows: int, parents: Sequence[int] | None = None
    ) -> BatchLogits:
        """Append `tokens[row]` to each row, none to an idle one; logits f32 [batch, rows, vocabulary] of the last ones.

        Rows may have different numbers of tokens; where the build has no `query_seqlens` those with several run one
        after another. A row with n < `rows` tokens has its logits in the last n entries. parents: as in `run`, for a
        batch of one row. On a GPU the result is a list, of the logits of each row.
        """
        longest = max(map(len, tokens))
        apart = longest > 1 and self._bare_rows
        if apart or (self.width_rule.pinned and longest > self.width_rule.multiple):
            logits, self._joined = row_by_row(self, tokens, rows) if apart else in_pieces(self, tokens, rows)
            self._taken = len(tokens[0])
            return logits
        frame, session = self._frame(longest, rows, trees=parents is not None and not self.trees_exact)
        lengths = self.cache.lengths
        frame.fill(tokens, lengths, rows)
        if self._planted is not None:  # the frames share the bias
            self._planted[:] = 0.0
            self._planted = None
        if parents is not None:
            self._planted = frame.block(len(tokens[0]), len(parents), lengths[0])
            frame.plant(parents, self._planted, len(tokens[0]), lengths[0])
        self._joined = None
        start = time.perf_counter()
        try:
            frame.run(session)
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            name = self.bundle.manifest.name
            raise BackendError(f"ONNX Runtime failed while running {name}: {first_line(error)}") from error
        seconds = time.perf_counter() - start
        self.onnx_seconds += seconds
        if self.costs is not None and len(tokens) == 1 and self.width_rule.padded:
            self.costs.note(len(tokens[0]), lengths[0], seconds)
        self._last, self._taken = frame, len(tokens[0])
        for row, new in enumerate(tokens):
            lengths[row] += len(new)
        if isinstance(self._buffers, DeviceBuffers):
            return DeviceLogits.of_batch(self._buffers, self.device, frame.logits, rows)
        return np.asarray(frame.logits[:, :rows])

    def _frame(self, longest: int, rows: int, *, trees: bool) -> tuple[Frame, Any]:
        """A frame for such a run, and the session that it is bound to; trees: that of the graph for trees alone."""
        positions, pad, rows = self._padded(longest, rows)
        needed = max(self.cache.lengths) + positions + pad
        if needed > self.positions:
            raise ContextLengthError(
                f"{needed} positions are needed and {self.bundle.manifest.name} has {self.sizes.context}: "
                "shorten the prompt or lower --max-tokens."
            )
        self.reserve(needed)
        shape = FrameShape(self.cache.batch, positions, pad, rows, self.cache.capacity)
        session = self._open_trees() if trees and self._open_trees is not None else self._onnx_session
        frame = self._frames.get((trees, shape))
        if frame is None:
            frame = self._frames[trees, shape] = self._bind(shape, session, trees)
            if len(self._frames) > MAX_FRAMES:
                self._frames.popitem(last=False)
        else:
            self._frames.move_to_end((trees, shape))
        return frame, session

    def _padded(self, longest: int, rows: int) -> tuple[int, int, int]:
        """(positions, dummy rows of the attention, logit rows) to run for `longest` new tokens."""
        rule, batch = self.width_rule, self.cache.batch
        if not rule.padded or self._bare_rows:
            return longest, 0, rows
        positions = longest
        while positions * batch % rule.multiple:
            positions += 1
        while rows * batch % rule.multiple:
            rows += 1
        if rule.pinned:
            positions = rule.multiple
        if not self.pads_rows:
            return (positions if positions <= WIDEST_BARE else -(-positions // WIDE_STEP) * WIDE_STEP), 0, rows
        # The attention takes its rows in blocks (2 x head_dim, fewer where the L2 cache is small), and a wide run may
        # leave a lone one in the last block. With a dummy row behind it no real row is ever alone.
        return positions, int(positions == 1 or positions > WIDEST_BARE), rows

    def _bind(self, shape: FrameShape, session: Any, trees: bool) -> Frame:
        wanted_inputs = frozenset(value.name for value in session.get_inputs()) if trees else self._inputs
        bias = None
        if "attention_bias" in wanted_inputs:
            attended = shape.positions + shape.pad
            wanted = attended * shape.capacity
            if self._bias.size < wanted:
                self._bias = np.zeros(wanted, self._bias.dtype)
            bias = self._bias[:wanted].reshape(1, 1, attended, shape.capacity)
        share = self._buffers.shared
        logits = share(self._outputs, "logits", (shape.batch, shape.rows, self.sizes.vocabulary))
        features = share(self._outputs, "features", (shape.batch, shape.positions, self._feature_width))
        number = next(_NUMBERS) if self._records and shape.positions <= WIDEST_BARE else -1
        outputs, idle = (logits, features), int(not self.ragged)
        frame = Frame(self._buffers, shape, self._qkv_width, bias, *outputs, self._dtype, number=number, idle=idle)
        frame.bind(session, wanted_inputs, self.cache.values, self._output_names)
        return frame


def choose_graph(bundle: Bundle) -> GraphSpec:
    """The first graph of the bundle, in the order target, target_batch1, whose needs the installed build meets."""
    features = build_features()
    graphs = bundle.manifest.graphs
    for name in ("target", "target_batch1"):
        if name in graphs and features.issuperset(graphs[name].requires):
            return graphs[name]
    raise BackendError(f"No graph of {bundle.manifest.name} runs on this ONNX Runtime: update it to 1.32 or newer.")


def session_opener(
    bundle: Bundle, threads: int, device: Device = CPU, *, shared_cpu: bool = False, context: int | None = None
) -> Callable[[int, WidthRule], ModelSession]:
    """Load the bundle's graph once; the result opens sessions over it: (batch, rule) -> ModelSession with its own KV.

    shared_cpu: another model runs in turn on the same cores. context: how many positions will be used; a device's
    buffers are made for them at once. Raises BackendError where a GPU has no room for weights and KV.
    """
    kv = bundle.manifest.kv
    positions = kv.positions
    if device.resident and context is not None:
        positions -= max(0, bundle.manifest.sizes.context - context)
    shape = KVShape.of_bundle(bundle)
    # The probe of the widths takes a small batch besides, for a while.
    needed = shape.kv_bytes(positions) + shape.kv_bytes(min(positions, BATCH_STEP), PROBED_ROWS)
    mend = "choose a smaller --context or precision, or another --device"
    require_memory(device, bundle.manifest.name, bundle.weights_bytes, needed, mend)
    path = bundle.path / choose_graph(bundle).file
    onnx_session = create_session(path, threads=threads, device=device, shared_cpu=shared_cpu, recorded=True)
    open_trees = _tree_opener(bundle, threads, device, needed)

    def opened(batch: int, rule: WidthRule) -> ModelSession:
        return ModelSession(
            bundle,
            onnx_session,
            width_rule=rule,
            batch=batch,
            device=device,
            positions=positions,
            open_trees=open_trees,
        )

    return opened


def _tree_opener(bundle: Bundle, threads: int, device: Device, kv: int) -> Callable[[], Any] | None:
    """Loads the graph for token trees when it is first wanted; None where there is none, or no room for it.

    Its session holds the weights a second time. kv: bytes of the buffers that are made before it.
    """
    graph = bundle.manifest.graphs.get(TREES)
    if graph is None or not build_features().issuperset(graph.requires):
        return None
    if not has_room(device, bundle.weights_bytes, kv):
        return None
    path = bundle.path / graph.file
    return functools.cache(lambda: create_session(path, threads=threads, device=device))
