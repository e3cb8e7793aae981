"""Builds graphs of tiny models and runs them through ONNX Runtime directly, apart from `specrun.runtime`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from specrun.export.graph import build_target, feature_taps
from specrun.export.weight_file import WeightFile
from specrun.export.weight_store import SPARE_POSITIONS, store_weights
from specrun.export.weights import Weights

GRAPHS = {"target": True, "target_batch1": False}  # name -> takes query_lengths


def write_graphs(weights: Weights, folder: Path, precision: str = "fp32", block: int | None = None) -> Path:
    """Write all variants into `folder`, which is made, and return it; behind a prefix only without a window."""
    folder.mkdir(parents=True)
    with WeightFile(folder / "target.onnx.data") as file:
        stored = store_weights(weights, file, precision, block)
        for name, ragged in GRAPHS.items():
            taps = feature_taps(weights.config.layers)
            ir.save(build_target(weights.config, stored, file, ragged=ragged, taps=taps), folder / f"{name}.onnx")
        if all(layer.sliding_window is None for layer in weights.config.layer_configs):
            model = build_target(weights.config, stored, file, ragged=True, taps=taps, shared=True)
            ir.save(model, folder / "target_shared.onnx")
    return folder


def open_session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class GraphRunner:
    """A session with KV buffers of `capacity` positions a row; `lengths` says how many are true and may be lowered.

    `features` [batch, positions, taps * hidden] are those of the last run.
    """

    def __init__(self, path: Path, weights: Weights, batch: int = 1, capacity: int = 128) -> None:
        self.config = config = weights.config
        assert capacity <= config.context + SPARE_POSITIONS
        self.session = open_session(path)
        self.lengths = [0] * batch
        self.capacity = capacity
        shape = (batch, config.kv_heads, capacity, config.head_dim)
        names = [f"{part}.{layer}" for layer in range(config.layers) for part in ("key", "value")]
        self.caches = {name: np.zeros(shape, np.float32) for name in names}

    def run(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        rows: Sequence[Sequence[int]] | None = None,
        pad: int | None = None,
        bias: np.ndarray | None = None,
        position_ids: np.ndarray | None = None,
    ) -> np.ndarray:
        """Append `tokens[row]` to each row; logits [batch, rows, vocabulary] of the positions `rows`, by default all.

        A shorter row is filled up with a junk token. `pad` is 1 for a lone position unless given. `bias`
        [positions, positions] is between the new positions, and the past is seen by all.
        """
        batch, width = len(tokens), max(map(len, tokens))
        pad = int(width == 1) if pad is None else pad
        ids = np.full((batch, width), 11, np.int64)
        for row, new in enumerate(tokens):
            ids[row, : len(new)] = new
        # A lone row of a ragged batch counts a junk neighbour.
        counts = [(max(len(new), min(2, width)) if batch > 1 else width) + pad if len(new) else 0 for new in tokens]
        past = np.array(self.lengths, np.int64)
        attention_bias = np.zeros((1, 1, width + pad, self.capacity), np.float32)
        if bias is not None:
            assert batch == 1
            attention_bias[0, 0, :width, past[0] : past[0] + width] = bias
        steps = past[:, None] + np.arange(width + pad)[None] if position_ids is None else position_ids
        config = self.config
        inputs = {
            "input_ids": ids,
            "query_lengths": np.array(counts, np.int32),
            "pad_rows": np.zeros((batch, pad, (config.heads + 2 * config.kv_heads) * config.head_dim), np.float32),
            "total_lengths_minus_one": np.maximum(past + counts - 1, 0).astype(np.int32),
            "max_total_length": np.array([self.capacity], np.int32),
            "position_ids": steps.astype(np.int64),
            "attention_bias": attention_bias,
            "logit_rows": np.tile(np.arange(width), (batch, 1)) if rows is None else np.array(rows, np.int64),
        }
        logits = self._run(inputs)
        for row, new in enumerate(tokens):
            self.lengths[row] += len(new)
        return logits

    def chain(self, tokens: Sequence[int], widths: Sequence[int]) -> np.ndarray:
        """Append `tokens` to row 0, `widths` at a time, the last width again and again; logits [tokens, vocabulary]."""
        pieces, start = [], 0
        remaining = list(widths)
        while start < len(tokens):
            width = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            pieces.append(self.run([tokens[start : start + width]])[0])
            start += width
        return np.concatenate(pieces)

    def _run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        binding: Any = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        logits = np.empty((*inputs["logit_rows"].shape, self.config.vocabulary), np.float32)
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        width = len(feature_taps(self.config.layers)) * self.config.hidden
        self.features = np.empty((*inputs["input_ids"].shape, width), np.float32)
        binding.bind_ortvalue_output("features", ort.OrtValue.ortvalue_from_numpy(self.features))
        for name, array in self.caches.items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(f"past_{name}", value)
            binding.bind_ortvalue_output(f"present_{name}", value)
        self.session.run_with_iobinding(binding)
        return logits
