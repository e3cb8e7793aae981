"""A forward pass in plain numpy, independent of the graphs: what a model's weights mean, written out once.

It keeps the weights of one layer in memory at a time and no KV cache, so it is slow; tests and the fidelity
figures of a bundle compare against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import LayerConfig, ModelConfig
from specrun.export.rotary import rotary_tables
from specrun.export.weights import Weights

Array = NDArray[np.float32]
Ids = Sequence[int] | NDArray[np.int64]

_HEAD_ROWS = 16_384  # rows of the head at a time, to bound memory


def reference_logits(weights: Weights, token_ids: Ids, rows: Ids | None = None) -> Array:
    """Logits after each token, float32 [len(token_ids), vocabulary], or of the positions in `rows` only.

    Computed in float32 with the dequantised weights. Raises ValueError for an empty or unknown token sequence.
    """
    config = weights.config
    tokens = np.asarray(token_ids, np.int64)
    if tokens.ndim != 1 or tokens.size == 0 or tokens.min() < 0 or tokens.max() >= config.vocabulary:
        raise ValueError(f"token_ids must be a non-empty sequence of ids below {config.vocabulary}.")
    embedding = weights.tensor("model.embed_tokens.weight")
    x = embedding[tokens]
    del embedding
    tables = rotary_tables(config, tokens.size, weights)
    for index, layer in enumerate(config.layer_configs):
        prefix = f"model.layers.{index}"
        normed = _rms_norm(x, weights.tensor(f"{prefix}.input_layernorm.weight"), config.norm_epsilon)
        x = x + _attention(weights, prefix, layer, normed, tables)
        normed = _rms_norm(x, weights.tensor(f"{prefix}.post_attention_layernorm.weight"), config.norm_epsilon)
        gate = _linear(weights, f"{prefix}.mlp.gate_proj", normed)
        up = _linear(weights, f"{prefix}.mlp.up_proj", normed)
        x = x + _linear(weights, f"{prefix}.mlp.down_proj", _silu(gate) * up)
    x = _rms_norm(x, weights.tensor("model.norm.weight"), config.norm_epsilon)
    if rows is not None:
        x = x[np.asarray(rows, np.int64)]
    head = weights.tensor("model.embed_tokens.weight" if config.tied_head else "lm_head.weight")
    logits = np.empty((x.shape[0], config.vocabulary), np.float32)
    for start in range(0, config.vocabulary, _HEAD_ROWS):
        logits[:, start : start + _HEAD_ROWS] = x @ head[start : start + _HEAD_ROWS].T
    return logits


def _attention(weights: Weights, prefix: str, layer: LayerConfig, x: Array, tables: tuple[Array, Array]) -> Array:
    """Causal grouped-query attention over x [positions, hidden]."""
    config, count = weights.config, x.shape[0]
    query = _heads(weights, f"{prefix}.self_attn.q", config.heads, x)
    key = _heads(weights, f"{prefix}.self_attn.k", config.kv_heads, x)
    value = _linear(weights, f"{prefix}.self_attn.v_proj", x).reshape(count, config.kv_heads, -1).swapaxes(0, 1)
    if layer.rotary:
        query, key = _rotate(query, *tables), _rotate(key, *tables)
    mask = _mask(count, layer.sliding_window)
    group = config.heads // config.kv_heads
    scale = np.float32(config.head_dim**-0.5)
    mixed = np.empty((count, config.heads, config.head_dim), np.float32)
    for head in range(config.heads):
        scores = np.where(mask, query[head] @ key[head // group].T * scale, np.float32(-np.inf))
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed[:, head] = (scores / scores.sum(axis=-1, keepdims=True)) @ value[head // group]
    return _linear(weights, f"{prefix}.self_attn.o_proj", mixed.reshape(count, -1))


def _heads(weights: Weights, prefix: str, heads: int, x: Array) -> Array:
    """Project x to queries or keys, [heads, positions, head_dim], and normalise each where the family does."""
    config: ModelConfig = weights.config
    split = _linear(weights, f"{prefix}_proj", x).reshape(x.shape[0], heads, config.head_dim)
    if config.family.qk_norm:
        split = _rms_norm(split, weights.tensor(f"{prefix}_norm.weight"), config.norm_epsilon)
    return split.swapaxes(0, 1)


def _linear(weights: Weights, name: str, x: Array) -> Array:
    result: Array = x @ weights.tensor(f"{name}.weight").T
    bias = f"{name}.bias"
    return result + weights.tensor(bias) if bias in weights.names() else result


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    mean = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(epsilon)) * weight, np.float32)


def _silu(x: Array) -> Array:
    # exp(-|x|) never overflows: x * sigmoid(x) by the sign of x.
    small = np.exp(-np.abs(x))
    return np.asarray(x * np.where(x >= 0, np.float32(1), small) / (np.float32(1) + small), np.float32)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    left, right = np.split(x, 2, axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _mask(count: int, window: int | None) -> NDArray[np.bool_]:
    """True where the row's position sees the column's: not later, and within the window, the row's own included."""
    distance = np.arange(count)[:, None] - np.arange(count)[None, :]
    seen: NDArray[np.bool_] = (distance >= 0) & (distance < (count if window is None else window))
    return seen
