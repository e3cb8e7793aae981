"""Attention over a prefix that all rows share, stored once, and each row's own suffix behind it.

Two parts and one softmax. The prefix part is plain products over all rows at once: scores s = q K^T of every query of
every row, m = max s, p = softmax(s), t = max p (so 1 / t is the sum of exp(s - m)), o = p V. The suffix part is
GroupQueryAttention over the row's own buffers, whose slot 0 holds a zero key and a zero value and gets the score m by
the attention bias: it stands for the prefix's best key, and its weight a = exp(m) / (exp(m) + sum of the suffix) comes
out beside the output g. Then with w = a + (1 - a) t

    out = (t g + a o) / w

is the attention over both. It is the merge by log-sum-exp without a logarithm: only products, sums and divisions of
fp32, which are the same in every lane, so that a row's bits do not depend on where it lies among others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specrun.export.config import ModelConfig
from specrun.export.graph_builder import MICROSOFT, GraphBuilder

SOFTMAX_WEIGHTS = 2  # GroupQueryAttention's qk_output: the weights after the softmax


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What the layers have in common: shapes and positions, computed once a run."""

    positions: ir.Value  # i64 [1]
    position_ids: ir.Value  # i64 [batch, positions], without those of the dummy row
    heads_shape: ir.Value  # batch, positions, heads, head_dim
    ones_shape: ir.Value  # batch, positions, heads, 1
    grouped_shape: ir.Value  # kv_heads, batch, positions, group
    slice_ends: ir.Value  # positions, 1


def shared_parts(b: GraphBuilder, config: ModelConfig, inputs: dict[str, ir.Value], positions: ir.Value) -> SharedParts:
    """Shapes of the parts of each layer."""
    rows = b.op("Shape", [inputs["input_ids"]])

    def numbers(name: str, *values: int) -> ir.Value:
        return b.constant(name, np.array(values, np.int64))

    heads, group = config.heads, config.heads // config.kv_heads
    return SharedParts(
        positions,
        b.slice_axis1(inputs["position_ids"], positions),
        b.op("Concat", [rows, numbers("heads_and_dim", heads, config.head_dim)], axis=0),
        b.op("Concat", [rows, numbers("heads_and_one", heads, 1)], axis=0),
        b.op("Concat", [numbers("kv_heads", config.kv_heads), rows, numbers("group", group)], axis=0),
        b.op("Concat", [positions, numbers("one", 1)], axis=0),
    )


def prefix_part(
    b: GraphBuilder,
    config: ModelConfig,
    index: int,
    qkv: ir.Value,
    rotary: tuple[ir.Value, ir.Value] | None,
    inputs: dict[str, ir.Value],
    parts: SharedParts,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(m as a bias f32 [batch, heads, padded_positions, max_total], t [batch, positions, heads, 1], o [..., head_dim]).

    The queries of a key/value head are the rows of one product: batch x positions x group of them, in `prefix_queries`
    groups of equal size.
    """
    group, width = config.heads // config.kv_heads, config.heads * config.head_dim

    def shape(name: str, *values: int) -> ir.Value:
        return b.constant(name, np.array(values, np.int64))

    query = b.op("Slice", [qkv, shape("zero", 0), shape("query_width", width), b.axis(2)])
    if rotary is not None:
        query = b.op("RotaryEmbedding", [query, parts.position_ids, *rotary], MICROSOFT)
    query = b.op("Reshape", [query, shape("by_kv_head", -1, config.kv_heads, group * config.head_dim)])
    query = b.op("Transpose", [query], perm=[1, 0, 2])
    query = b.op("Reshape", [query, inputs["prefix_queries"]])
    key, value = inputs[f"prefix_key.{index}"], inputs[f"prefix_value.{index}"]
    scores = b.op("FusedMatMul", [query, key], MICROSOFT, transB=1, alpha=1.0 / math.sqrt(config.head_dim))
    best = b.op("ReduceMax", [scores, b.axis(-1)], keepdims=1)
    weights = b.op("Softmax", [scores], axis=-1)
    top = b.op("ReduceMax", [weights, b.axis(-1)], keepdims=1)
    output = b.op("MatMul", [weights, value])

    best = b.op("Transpose", [b.op("Reshape", [best, parts.grouped_shape])], perm=[1, 0, 3, 2])
    best = b.op("Reshape", [best, shape("by_head", 0, config.heads, -1, 1)])
    bias = b.op("Pad", [best, inputs["bias_pads"]])
    top = b.op("Transpose", [b.op("Reshape", [top, parts.grouped_shape])], perm=[1, 2, 0, 3])
    output = b.op("Reshape", [output, shape("by_row", config.kv_heads, -1, group * config.head_dim)])
    output = b.op("Transpose", [output], perm=[1, 0, 2])
    return bias, b.op("Reshape", [top, parts.ones_shape]), b.op("Reshape", [output, parts.heads_shape])


def merge(
    b: GraphBuilder,
    config: ModelConfig,
    suffix: ir.Value,
    weights: ir.Value,
    prefix: tuple[ir.Value, ir.Value],
    parts: SharedParts,
) -> ir.Value:
    """Attention over prefix and suffix f32 [batch, positions, heads * head_dim].

    suffix [batch, positions, heads * head_dim] and weights [batch, heads, padded_positions, max_total] are those of
    GroupQueryAttention; prefix is (t, o) of `prefix_part`.
    """
    top, output = prefix
    starts = b.constant("zeros_2", np.zeros(2, np.int64))
    share = b.op("Slice", [weights, starts, parts.slice_ends, b.constant("axes_23", np.array([2, 3], np.int64))])
    share = b.op("Transpose", [share], perm=[0, 2, 1, 3])
    one = b.constant("one_f32", np.array(1.0, np.float32))
    whole = b.op("Add", [share, b.op("Mul", [b.op("Sub", [one, share]), top])])
    own = b.op("Mul", [b.op("Reshape", [suffix, parts.heads_shape]), b.op("Div", [top, whole])])
    shared = b.op("Mul", [output, b.op("Div", [share, whole])])
    joined = b.constant("joined_heads", np.array([0, 0, config.heads * config.head_dim], np.int64))
    return b.op("Reshape", [b.op("Add", [own, shared]), joined])
