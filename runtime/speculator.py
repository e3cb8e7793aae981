"""Learned heads that run: the sessions of Medusa and EAGLE graphs.

Both give candidates, the best tokens of each row with the head's own log-probabilities. As in `ModelSession` everything
is bound once per width and a run only rewrites a few small arrays in place. Heads need not be bit-exact: what they
propose is judged by the target.
"""

from __future__ import annotations

import functools
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Required, TypedDict, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError, ContextLengthError, IntegrityError, ManifestError
from specrun.runtime.backend import first_line
from specrun.runtime.device import CPU, Device
from specrun.runtime.device_buffers import buffers_of
from specrun.runtime.head_frames import HeadFrame, Output, head_cache

TOP_K: Final = 8  # candidates of a row
MAX_BRANCHES: Final = 4  # nodes that are drafted on at one level
MAX_FRAMES: Final = 32
MEASURED_RUNS: Final = 8
COLD_RUNS: Final = 5
WALKED_BYTES: Final = 64 << 20

Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of each row, best first, their log-probabilities in the head, and the raw logits if wanted."""

    tokens: list[list[int]]
    log_probs: list[list[float]]
    logits: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Choice:
    """How a head chooses: the best of logits * inverse_temperature + noise, f32 [1 or rows, draft].

    logits: whether the raw logits are wanted too.
    """

    inverse_temperature: float = 1.0
    noise: NDArray[np.float32] | None = None
    logits: bool = False


PLAIN: Final = Choice()


class HeadSession:
    """What both have in common: the graph, its frames, the choice of tokens."""

    def __init__(self, name: str, onnx_session: Any, draft_vocabulary: int, device: Device) -> None:
        self._name, self.device = name, device
        self._buffers = buffers_of(device)
        self._onnx_session = onnx_session
        self.draft_vocabulary = draft_vocabulary
        self.top_k = min(TOP_K, draft_vocabulary)
        self._frames: OrderedDict[tuple[int, ...], HeadFrame] = OrderedDict()
        self.onnx_seconds = 0.0

    def _choice_inputs(self, noise_rows: int) -> dict[str, NDArray[Any]]:
        return {
            "inverse_temperature": np.ones(1, np.float32),
            "noise": np.zeros((noise_rows, self.draft_vocabulary), np.float32),
            "top_k": np.array([self.top_k], np.int64),
        }

    def _choice_outputs(self, rows: int, logits: bool) -> dict[str, Output]:
        best = rows, self.top_k
        outputs: dict[str, Output] = {"tokens": (best, "int64"), "log_probs": (best, "float32")}
        if logits:
            outputs["logits"] = (rows, self.draft_vocabulary), "float32"
        return outputs

    def _keep(self, key: tuple[int, ...], frame: HeadFrame) -> HeadFrame:
        self._frames[key] = frame
        if len(self._frames) > MAX_FRAMES:
            self._frames.popitem(last=False)
        return frame

    def _run(self, frame: HeadFrame, choice: Choice, *, planted: bool = False) -> Candidates:
        frame.inputs["inverse_temperature"][0] = choice.inverse_temperature
        if choice.noise is not None:
            frame.inputs["noise"][:] = choice.noise
        start = time.perf_counter()
        try:
            frame.run(self._onnx_session, noisy=choice.noise is not None, planted=planted)
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            raise BackendError(f"ONNX Runtime failed while running {self._name}: {first_line(error)}") from error
        self.onnx_seconds += time.perf_counter() - start
        tokens, log_probs = frame.read("tokens"), frame.read("log_probs")
        if not np.isfinite(log_probs).all() or tokens.min() < 0:
            raise IntegrityError(
                f"{self._name} guesses what is no token: its files are damaged; attach it again, or train another one."
            )
        return Candidates(tokens.tolist(), log_probs.tolist(), frame.read("logits") if choice.logits else None)


class MedusaSession(HeadSession):
    """A Medusa speculator: all heads from one feature row, f32 [feature_width], and perhaps the token after it."""

    def __init__(
        self,
        name: str,
        onnx_session: Any,
        *,
        heads: int,
        feature_width: int,
        draft_vocabulary: int,
        device: Device = CPU,
    ) -> None:
        super().__init__(name, onnx_session, draft_vocabulary, device)
        self.heads = heads
        self._width = feature_width
        shapes = {"features": (None, feature_width), "noise": (None, draft_vocabulary)}
        check_shapes(name, onnx_session, shapes | {"tokens": (None, None), "logits": (None, draft_vocabulary)})
        features, rows = (
            next(value.shape[0] for value in values if value.name == wanted)
            for values, wanted in ((onnx_session.get_inputs(), "features"), (onnx_session.get_outputs(), "tokens"))
        )
        self.one_by_one = features == 1  # graphs of before serve one sequence a run
        self._measured: dict[int, float] = {}
        self._reads_token = any(value.name == "input_ids" for value in onnx_session.get_inputs())
        if (rows if isinstance(rows, int) else self._rows_of_one()) != heads:
            raise ManifestError(f"The manifest of {name} does not describe its graph (tokens): make it again.")

    def _rows_of_one(self) -> int:
        """Rows that the graph gives for one sequence: its shapes leave that open, so it is run."""
        inputs = {"features": np.zeros((1, self._width), np.float32), **self._choice_inputs(1)}
        inputs |= {"input_ids": np.zeros(1, np.int64)} if self._reads_token else {}
        return len(self._onnx_session.run(["tokens"], inputs)[0])

    @property
    def kv_bytes(self) -> int:
        """Medusa keeps nothing."""
        return 0

    def run(self, features: Features, tokens: Sequence[int], choice: Choice = PLAIN) -> Candidates:
        """Candidates of every head for sequences with these newest features f32 [n, feature_width].

        Row j * n + i of the candidates, and of the choice's noise, is of head j for sequence i: a guess of the token
        j + 2 places after its feature's. tokens: the one after each feature, which not all heads look at.
        """
        count = len(tokens)
        if count > 1 and self.one_by_one:
            return self._run_one_by_one(features, tokens, choice)
        noisy = choice.noise is not None
        key = (count, int(choice.logits), int(noisy))
        frame = self._frames.get(key)
        if frame is None:
            rows = self.heads * count
            inputs: dict[str, NDArray[Any]] = {"features": np.zeros((count, self._width), np.float32)}
            if self._reads_token:
                inputs["input_ids"] = np.zeros(count, np.int64)
            inputs |= self._choice_inputs(rows if noisy else 1)
            outputs = self._choice_outputs(rows, choice.logits)
            frame = self._keep(key, HeadFrame(self._onnx_session, self._buffers, inputs, outputs, {}))
        frame.inputs["features"][:] = features
        if self._reads_token:
            frame.inputs["input_ids"][:] = tokens
        return self._run(frame, choice)

    def _run_one_by_one(self, features: Features, tokens: Sequence[int], choice: Choice) -> Candidates:
        count, noise = len(tokens), choice.noise
        rows: list[tuple[list[int], list[float], Any]] = [([], [], None)] * (self.heads * count)
        for row, token in enumerate(tokens):
            own = noise if noise is None or len(noise) == 1 else noise[row::count]
            found = self.run(features[row : row + 1], [token], replace(choice, noise=own))
            logits = [None] * self.heads if found.logits is None else found.logits.copy()
            rows[row::count] = zip(found.tokens, found.log_probs, logits, strict=True)
        joined, log_probs, raw = zip(*rows, strict=True)
        return Candidates([*joined], [*log_probs], np.stack(raw) if choice.logits else None)

    def measure(self, count: int = 1) -> float:
        """Seconds of a run for so many sequences as it is between runs of the target: its weights are in no cache."""
        if count not in self._measured:
            features = np.zeros((count, self._width), np.float32)
            self._measured[count] = _timed_cold(lambda: self.run(features, [0] * count))
        return self._measured[count]

    def close(self) -> None:
        """Free the session."""
        self._frames.clear()
        self._onnx_session = None


class EagleSizes(TypedDict, total=False):
    """What an EAGLE graph is for; positions: rows of the rotary tables, and so the most slots."""

    feature_width: Required[int]
    hidden: Required[int]
    kv_heads: Required[int]
    head_dim: Required[int]
    draft_vocabulary: Required[int]
    positions: Required[int]
    device: Device


EagleKind = TypeVar("EagleKind", bound="EagleHead")


class EagleHead(HeadSession):
    """An EAGLE speculator with a KV buffer of its one layer; who writes what into it is up to the kinds of it."""

    def __init__(self, name: str, onnx_session: Any, **sizes: Unpack[EagleSizes]) -> None:
        self._sizes = sizes
        width, hidden, vocabulary = sizes["feature_width"], sizes["hidden"], sizes["draft_vocabulary"]
        kv_heads, head_dim, self.positions = sizes["kv_heads"], sizes["head_dim"], sizes["positions"]
        super().__init__(name, onnx_session, vocabulary, sizes.get("device", CPU))
        rows, kept = (None, vocabulary), (1, kv_heads, None, head_dim)
        shapes = {"features": (None, width), "recycled": (None, hidden), "noise": rows, "logits": rows}
        check_shapes(name, onnx_session, shapes | {"past_key": kept, "past_value": kept})
        self._width, self._hidden_size = width, hidden
        self.cache = head_cache(onnx_session, self._buffers, kv_heads, head_dim, self.positions)

    def another(self, kind: type[EagleKind]) -> EagleKind:
        """One over the same graph, with a buffer of its own."""
        return kind(self._name, self._onnx_session, **self._sizes)


class EagleSession(EagleHead):
    """An EAGLE speculator for one text.

    Slot i of the buffer holds the feature of token i together with token i + 1. `length` counts the slots that were
    written from the target's features. `append` adds such slots, `grow` adds nodes of a token tree behind them, which
    the next `append` or `rewind_to` drops.
    """

    def __init__(self, name: str, onnx_session: Any, **sizes: Unpack[EagleSizes]) -> None:
        super().__init__(name, onnx_session, **sizes)
        self._bias = np.zeros(0, np.float32)
        self._nodes: list[tuple[int, ...]] = []  # of each node its ancestors and itself, as places behind `length`
        self._outputs = np.zeros((1, self._hidden_size), np.float32)  # of the last real slot, then of each node

    @property
    def length(self) -> int:
        """Slots written from features."""
        return self.cache.lengths[0]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV buffers."""
        return self.cache.nbytes

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` slots and no nodes."""
        self.cache.rewind_to(length)
        self._nodes.clear()

    def reserve(self, length: int) -> None:
        """Make room for `length` slots, as far as the model has them."""
        if self.cache.reserve(min(length, self.positions)):
            self._frames.clear()  # they are bound to the buffers of before

    def append(self, features: Features, tokens: Sequence[int], choice: Choice = PLAIN) -> Candidates:
        """Write slots from features f32 [n, feature_width] and the tokens after each; candidates of the last one."""
        count, start = len(tokens), self.length
        frame = self._frame(count, 0, 1, choice, start + count)
        inputs = frame.inputs
        inputs["features"][:] = features
        inputs["input_ids"][:] = tokens
        inputs["position_ids"][0] = np.arange(start, start + count)
        inputs["rows"][0] = count - 1
        inputs["total_length_minus_one"][0] = start + count - 1
        candidates = self._run(frame, choice)
        self.cache.lengths[0] = start + count
        self._nodes.clear()
        self._outputs[0] = frame.read("hidden")[-1]
        return candidates

    def grow(
        self, tokens: Sequence[int], parents: Sequence[int], depth: int, choice: Choice = PLAIN
    ) -> tuple[Candidates, list[int]]:
        """Write nodes of one level; (candidates for their children, a row each; the places of the nodes).

        tokens: of the nodes, at `depth` (children of the root have 1). parents: the place that an earlier call gave the
        parent of each; -1 for the root.
        """
        count, base, first = len(tokens), self.length, len(self._nodes)
        frame = self._frame(0, count, count, choice, base + first + count)
        inputs = frame.inputs
        for row, parent in enumerate(parents):
            inputs["recycled"][row] = self._outputs[parent + 1]
        inputs["input_ids"][:] = tokens
        inputs["position_ids"][0] = base + depth - 1
        inputs["total_length_minus_one"][0] = base + first + count - 1
        seen = [(*(() if parent < 0 else self._nodes[parent]), first + row) for row, parent in enumerate(parents)]
        block = None
        if any(len(places) != first + count for places in seen):  # not a chain
            block = inputs["attention_bias"][0, 0, :, base : base + first + count]
            block[:] = -np.inf
            for row, places in enumerate(seen):
                block[row, list(places)] = 0.0
        try:
            candidates = self._run(frame, choice, planted=block is not None)
        finally:
            if block is not None:  # the frames share the bias
                block[:] = 0.0
        self._nodes += seen
        needed = 1 + len(self._nodes)
        if len(self._outputs) < needed:
            self._outputs = np.concatenate([self._outputs, np.zeros((needed, self._hidden_size), np.float32)])
        self._outputs[1 + first : needed] = frame.read("hidden")
        return candidates, list(range(first, first + count))

    def _frame(self, features: int, recycled: int, rows: int, choice: Choice, slots: int) -> HeadFrame:
        if slots > self.positions:
            raise ContextLengthError(f"{slots} positions are needed and {self._name} has {self.positions}.")
        self.reserve(slots)
        noisy = choice.noise is not None
        key = (features, recycled, rows, int(choice.logits), int(noisy))
        frame = self._frames.get(key)
        if frame is not None:
            self._frames.move_to_end(key)
            return frame
        positions, capacity = features + recycled, self.cache.capacity
        if self._bias.size < positions * capacity:
            self._bias = np.zeros(positions * capacity, np.float32)
        inputs: dict[str, NDArray[Any]] = {
            "features": np.zeros((features, self._width), np.float32),
            "recycled": np.zeros((recycled, self._hidden_size), np.float32),
            "input_ids": np.zeros(positions, np.int64),
            "position_ids": np.zeros((1, positions), np.int64),
            "total_length_minus_one": np.zeros(1, np.int32),
            "max_total_length": np.array([capacity], np.int32),
            "attention_bias": self._bias[: positions * capacity].reshape(1, 1, positions, capacity),
            "rows": np.arange(rows, dtype=np.int64),
        }
        inputs |= self._choice_inputs(1)
        outputs = self._choice_outputs(rows, choice.logits)
        outputs["hidden"] = (positions, self._hidden_size), "float32"
        key_value, value_value = self.cache.values
        shared = {"past_key": key_value, "past_value": value_value}
        shared |= {"present_key": key_value, "present_value": value_value}
        return self._keep(key, HeadFrame(self._onnx_session, self._buffers, inputs, outputs, shared))

    def measure(self) -> tuple[float, list[float]]:
        """(seconds of writing one slot, seconds of a level with 1, 2, .. nodes).

        The first run of a round finds its weights in no cache, the levels that follow find them there.
        """
        self.rewind_to(0)
        feature = np.zeros((1, self._width), np.float32)
        append = _timed_cold(lambda: self.append(feature, [0]))
        levels = []
        for count in range(1, MAX_BRANCHES + 1):
            times = []
            for _ in range(MEASURED_RUNS):
                self._nodes.clear()
                times.append(_timed(functools.partial(self.grow, [0] * count, [-1] * count, 1)))
            levels.append(min(times))
        for count in range(MAX_BRANCHES - 1, 0, -1):  # a wider level never costs less: what looks so is noise
            levels[count - 1] = min(levels[count - 1], levels[count])
        self.rewind_to(0)
        return append, levels

    def close(self) -> None:
        """Free the session and its buffers."""
        self._frames.clear()
        self.cache.close()
        self._onnx_session = None


def check_shapes(name: str, onnx_session: Any, wanted: dict[str, tuple[int | None, ...]]) -> None:
    """Raise ManifestError if inputs or outputs of the graph are missing or have other sizes than the manifest says."""
    found = {value.name: value.shape for value in (*onnx_session.get_inputs(), *onnx_session.get_outputs())}
    for value_name, sizes in wanted.items():
        shape = found.get(value_name)
        fits = shape is not None and len(shape) == len(sizes)
        if not fits or any(size is not None and size != other for size, other in zip(sizes, shape or (), strict=True)):
            raise ManifestError(f"The manifest of {name} does not describe its graph ({value_name}): make it again.")


def _timed_cold(run: Any) -> float:
    """The median of a few runs, each after a walk through more memory than the processor's caches hold."""
    walked = np.ones(WALKED_BYTES, np.uint8)[::64]  # a byte of each line; only reading pushes others out
    run()
    times = []
    for _ in range(COLD_RUNS):
        walked.sum()
        times.append(_timed(run))
    return sorted(times)[COLD_RUNS // 2]


def _timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
