"""How close a graph stays to the dequantised source: logits on a fixed text, against an independent numpy forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import ModelConfig
from specrun.export.reference import reference_logits
from specrun.export.weights import Weights
from specrun.models_cache.errors import BackendError
from specrun.models_cache.manifest import Fidelity

TEXT = """Tides are caused by the pull of the Moon and, to a lesser degree, of the Sun on the oceans. Twice a day the
water rises and falls; where the coast narrows, as in the Bay of Fundy, the range can exceed 16 metres.

def mean(values: list[float]) -> float:
    if not values:
        raise ValueError("mean of nothing")
    return sum(values) / len(values)

Question: A train leaves at 9:40 and arrives at 12:05. How long is the journey? Answer: 2 hours and 25 minutes.
The museum, which had been closed since 1987, reopened last spring with three new halls, a library and a small
garden where visitors may sit, read and talk. "We wanted a place for everyone," said its director, "not only for those
who already love painting." Les enfants jouent dans le jardin; die Kinder lesen ein Buch.
"""
# Every width is run once and then the rest in one chunk, so that each is known to work.
WIDTHS = tuple(range(1, 17))
FLOATS: dict[str, Any] = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


def measure_fidelity(weights: Weights, graph_path: Path, token_ids: list[int]) -> tuple[Fidelity, tuple[int, ...]]:
    """(figures, widths that were run) of the graph at `graph_path` on `token_ids`."""
    config = weights.config
    token_ids = token_ids[: config.context]
    expected = reference_logits(weights, np.asarray(token_ids, np.int64))
    got, widths = _graph_logits(config, graph_path, token_ids)
    return compare_logits(expected, got), widths


def compare_logits(expected: NDArray[np.float32], got: NDArray[np.float32]) -> Fidelity:
    """RMSE, argmax agreement and mean KL(expected || got) in nats of f32 [positions, vocabulary]."""
    squares, agreement, divergence = 0.0, 0, 0.0
    for p_row, q_row in zip(expected.astype(np.float64), got.astype(np.float64), strict=True):
        squares += float(np.mean((p_row - q_row) ** 2))
        agreement += int(np.argmax(p_row) == np.argmax(q_row))
        log_p, log_q = _log_softmax(p_row), _log_softmax(q_row)
        divergence += float(np.sum(np.exp(log_p) * (log_p - log_q)))
    count = len(expected)
    return Fidelity(float(np.sqrt(squares / count)), agreement / count, divergence / count, count)


def _log_softmax(row: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = row - row.max()
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted))))


def _graph_logits(
    config: ModelConfig, graph_path: Path, token_ids: list[int]
) -> tuple[NDArray[np.float32], tuple[int, ...]]:
    """Logits of every position, run in chunks of the widths above."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(
            "ONNX Runtime is not installed, so the graph cannot be checked: "
            "install it with `pip install 'specrun[cpu]'`."
        ) from error
    ort: Any = onnxruntime  # it ships no type information
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(str(graph_path), options, providers=["CPUExecutionProvider"])
    shape = (1, config.kv_heads, len(token_ids) + 2, config.head_dim)
    types = {value.name: FLOATS[value.type] for value in session.get_inputs() if value.type in FLOATS}
    cache: dict[str, Any] = {}
    for layer in range(config.layers):
        for part in ("key", "value"):
            zeros = np.zeros(shape, types[f"past_{part}.{layer}"])
            cache[f"{part}.{layer}"] = ort.OrtValue.ortvalue_from_numpy(zeros)
    pieces, widths, start = [], [], 0
    for width in (*WIDTHS, len(token_ids)):
        width = min(width, len(token_ids) - start)
        if width == 0:
            break
        pieces.append(_run(session, ort, config, cache, token_ids[start : start + width], start, shape[2]))
        widths.append(width)
        start += width
    return np.concatenate(pieces), tuple(dict.fromkeys(widths))


def _run(
    session: Any, ort: Any, config: ModelConfig, cache: dict[str, Any], tokens: list[int], start: int, capacity: int
) -> NDArray[np.float32]:
    width = len(tokens)
    wanted = {value.name: value.type for value in session.get_inputs()}
    pad = int(width == 1 and "pad_rows" in wanted)
    qkv_width = (config.heads + 2 * config.kv_heads) * config.head_dim
    inputs: dict[str, NDArray[Any]] = {
        "input_ids": np.array([tokens], np.int64),
        "query_lengths": np.array([width + pad], np.int32),
        "pad_rows": np.zeros((1, pad, qkv_width), np.float32),
        "total_lengths_minus_one": np.array([start + width + pad - 1], np.int32),
        "max_total_length": np.array([capacity], np.int32),
        "position_ids": np.arange(start, start + width + pad, dtype=np.int64)[None],
        "attention_bias": np.zeros((1, 1, width + pad, capacity), np.float32),
        "logit_rows": np.arange(width, dtype=np.int64)[None],
    }
    binding = session.io_binding()
    for name, array in inputs.items():
        if name not in wanted:
            continue
        array = array.astype(FLOATS.get(wanted[name], array.dtype), copy=False)
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    logits: NDArray[np.float32] = np.empty((1, width, config.vocabulary), np.float32)
    binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
    for name, value in cache.items():
        binding.bind_ortvalue_input(f"past_{name}", value)
        binding.bind_ortvalue_output(f"present_{name}", value)
    session.run_with_iobinding(binding)
    first: NDArray[np.float32] = logits[0]
    return first
