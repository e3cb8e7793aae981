"""Medusa, EAGLE and draft forward passes in plain numpy, apart from the graphs, and a runner for the graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from specrun.export.quantize import FloatMatrix
from specrun.export.speculator_config import DraftConfig, EagleConfig, MedusaConfig
from specrun.export.speculator_graph import build_eagle, build_medusa
from specrun.export.speculator_parts import SpeculatorParts
from specrun.export.speculator_weights import Speculator
from specrun.export.target_ends import TargetEnds
from specrun.export.weight_file import WeightFile

from .graph_runner import open_session

CAPACITY = 48
POSITIONS = 96


def random_ends(vocabulary: int, hidden: int, seed: int = 5) -> TargetEnds:
    rng = np.random.default_rng(seed)
    matrices = [FloatMatrix((rng.standard_normal((vocabulary, hidden)) * 0.2).astype(np.float32)) for _ in range(2)]
    norm = (1 + 0.3 * rng.standard_normal(hidden)).astype(np.float32)
    return TargetEnds(matrices[0], matrices[1], norm, 1e-5)


def write_graph(speculator: Speculator, ends: TargetEnds, folder: Path) -> Path:
    """Write the graph of a Medusa or EAGLE speculator; returns its path."""
    folder.mkdir(parents=True)
    with WeightFile(folder / "speculator.onnx.data") as file:
        parts = SpeculatorParts(speculator, ends, file, POSITIONS)
        config = speculator.config
        if isinstance(config, MedusaConfig):
            model = build_medusa(config, parts, file)
        else:
            assert isinstance(config, EagleConfig)
            model = build_eagle(config, parts, file)
        ir.save(model, folder / "speculator.onnx")
    return folder / "speculator.onnx"


class EagleRunner:
    """An EAGLE session with its KV buffers; `length` slots are written and may be lowered."""

    def __init__(self, path: Path, speculator: Speculator) -> None:
        self.speculator = speculator
        config = speculator.config
        assert isinstance(config, EagleConfig)
        self.session = open_session(path)
        self.length = 0
        shape = (1, config.kv_heads, CAPACITY, config.head_dim)
        self.caches = {"key": np.zeros(shape, np.float32), "value": np.zeros(shape, np.float32)}

    def run(
        self,
        features: np.ndarray | None,
        recycled: np.ndarray | None,
        tokens: list[int],
        *,
        rows: list[int] | None = None,
        bias: np.ndarray | None = None,
        positions: list[int] | None = None,
        **choice: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """Append the slots of `features` and `recycled`; every output but the cache, which grows."""
        import onnxruntime as ort

        target, count = self.speculator.target, len(tokens)
        width = len(self.speculator.taps) * target.hidden
        start = self.length
        attention_bias = np.zeros((1, 1, count, CAPACITY), np.float32)
        if bias is not None:
            attention_bias[0, 0, :, start : start + count] = bias
        steps = list(range(start, start + count)) if positions is None else positions
        inputs = {
            "features": np.zeros((0, width), np.float32) if features is None else features,
            "recycled": np.zeros((0, target.hidden), np.float32) if recycled is None else recycled,
            "input_ids": np.array(tokens, np.int64),
            "position_ids": np.array([steps], np.int64),
            "total_length_minus_one": np.array([start + count - 1], np.int32),
            "max_total_length": np.array([CAPACITY], np.int32),
            "attention_bias": attention_bias,
            "rows": np.array(range(count) if rows is None else rows, np.int64),
            **plain_choice(self.speculator.draft_vocabulary),
            **choice,
        }
        binding = self.session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        shared = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in self.caches.items()}
        for name, value in shared.items():
            binding.bind_ortvalue_input(f"past_{name}", value)
        for output in ("tokens", "log_probs", "logits", "hidden"):
            binding.bind_output(output)
        for name, value in shared.items():
            binding.bind_ortvalue_output(f"present_{name}", value)
        self.session.run_with_iobinding(binding)
        self.length += count
        names = ("tokens", "log_probs", "logits", "hidden")
        return dict(zip(names, binding.copy_outputs_to_cpu()[:4], strict=True))


def plain_choice(draft: int, top_k: int = 4) -> dict[str, np.ndarray]:
    """The common inputs for the plain order."""
    return {
        "inverse_temperature": np.ones(1, np.float32),
        "noise": np.zeros((1, draft), np.float32),
        "top_k": np.array([top_k], np.int64),
    }


def reference_medusa(speculator: Speculator, ends: TargetEnds, feature: np.ndarray, token: int) -> np.ndarray:
    """Logits f64 [heads, draft]."""
    config = speculator.config
    assert isinstance(config, MedusaConfig)
    if config.layout == "medusa":
        shared = _norm(feature, ends.final_norm, ends.norm_epsilon)
    else:
        table = speculator.tensor("embedding") if "embedding" in speculator else ends.embedding.weight
        embedded = table[[token]].astype(np.float64)
        shared = _join(speculator, embedded, _combine(speculator, feature, config.norm_epsilon), config.norm_epsilon)
    rows = []
    for head in range(config.heads):
        z = shared
        for block in range(config.blocks):
            name = f"heads.{head}.blocks.{block}"
            z = z + _silu(
                z @ speculator.tensor(f"{name}.weight").T.astype(np.float64) + speculator.tensor(f"{name}.bias")
            )
        if config.layout != "medusa":
            z = _norm(z, speculator.tensor("final_norm"), config.norm_epsilon)
        own = f"heads.{head}.head"
        matrix = speculator.tensor(own) if own in speculator else _cut_head(speculator, ends)
        rows.append(z @ matrix.T)
    return np.concatenate(rows)


def reference_eagle(
    speculator: Speculator, ends: TargetEnds, features: np.ndarray, recycled: np.ndarray, tokens: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """(logits f64 [slots, draft], hidden f64 [slots, hidden]) of a chain from slot 0 on."""
    config = speculator.config
    assert isinstance(config, EagleConfig)
    t = speculator.tensor
    epsilon = config.norm_epsilon
    table = t("embedding") if "embedding" in speculator else ends.embedding.weight
    embedded = table[tokens].astype(np.float64)
    if config.layout != "eagle1":
        x = np.concatenate([_combine(speculator, features, epsilon), recycled])
        if config.layout == "joined":
            x = _join(speculator, embedded, x, epsilon)
            joined = _norm(x, t("input_norm"), epsilon)
        else:
            both = [_norm(embedded, t("input_norm"), epsilon), _norm(x, t("hidden_norm"), epsilon)]
            joined = np.concatenate(both, -1)
    else:
        features = np.concatenate([_norm(features, ends.final_norm, ends.norm_epsilon), recycled])
        x = np.concatenate([embedded, features], -1) @ t("fc").T.astype(np.float64)
        if "fc_bias" in speculator:
            x = x + t("fc_bias")
        joined = x
    x = x + _attend(config, speculator, "", joined)
    x = x + _mlp(speculator, "", _norm(x, t("mlp_norm"), epsilon))
    final = _norm(x, t("final_norm"), epsilon) if config.layout != "eagle1" else x
    return final @ _cut_head(speculator, ends).T, x


def _combine(speculator: Speculator, features: np.ndarray, epsilon: float) -> np.ndarray:
    if "tap_norms" in speculator:
        taps = features.reshape(features.shape[0], -1, speculator.target.hidden)
        features = _norm(taps, speculator.tensor("tap_norms"), epsilon).reshape(features.shape)
    return features @ speculator.tensor("fc").T.astype(np.float64)


def _join(speculator: Speculator, embedded: np.ndarray, x: np.ndarray, epsilon: float) -> np.ndarray:
    both = [
        _norm(embedded, speculator.tensor("embedding_norm"), epsilon),
        _norm(x, speculator.tensor("hidden_norm"), epsilon),
    ]
    return np.concatenate(both, -1) @ speculator.tensor("join").T.astype(np.float64)


def reference_draft(speculator: Speculator, ends: TargetEnds, tokens: list[int]) -> np.ndarray:
    """Logits f64 [tokens, draft]."""
    config = speculator.config
    assert isinstance(config, DraftConfig)
    t = speculator.tensor
    x = ends.embedding.weight[tokens].astype(np.float64)
    for index in range(config.layers):
        name = f"layers.{index}."
        x = x + _attend(config, speculator, name, _norm(x, t(f"{name}input_norm"), config.norm_epsilon))
        x = x + _mlp(speculator, name, _norm(x, t(f"{name}mlp_norm"), config.norm_epsilon))
    return _norm(x, t("final_norm"), config.norm_epsilon) @ _cut_head(speculator, ends).T


def _cut_head(speculator: Speculator, ends: TargetEnds) -> np.ndarray:
    if "head" in speculator:
        return speculator.tensor("head").astype(np.float64)
    rows = ends.head.weight.astype(np.float64)
    return rows if speculator.vocabulary is None else rows[speculator.vocabulary]


def _attend(config: EagleConfig | DraftConfig, speculator: Speculator, prefix: str, x: np.ndarray) -> np.ndarray:
    count, size = x.shape[0], config.head_dim
    qkv = x @ speculator.tensor(f"{prefix}qkv").T.astype(np.float64)
    if f"{prefix}qkv_bias" in speculator:
        qkv = qkv + speculator.tensor(f"{prefix}qkv_bias")
    heads = qkv.reshape(count, -1, size)
    query, key, value = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=1)
    angles = np.arange(count)[:, None] * config.rope_theta ** (-np.arange(0, size, 2) / size)[None]
    query, key = _rotate(query, angles), _rotate(key, angles)
    out = np.empty((count, config.heads, size))
    for head in range(config.heads):
        shared = head // (config.heads // config.kv_heads)
        scores = query[:, head] @ key[:, shared].T / np.sqrt(size)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ value[:, shared]
    return out.reshape(count, -1) @ speculator.tensor(f"{prefix}output").T.astype(np.float64)


def _rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    left, right = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def _mlp(speculator: Speculator, prefix: str, x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ speculator.tensor(f"{prefix}gate_up").T.astype(np.float64), 2, axis=-1)
    return (_silu(gate) * up) @ speculator.tensor(f"{prefix}down").T.astype(np.float64)


def _norm(x: np.ndarray, gamma: np.ndarray, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + epsilon) * gamma


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
