"""Builds the target graph: prefill, plain steps, K+1 verify positions and token trees in one graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from specrun.export.config import ModelConfig
from specrun.export.graph_builder import MICROSOFT, THETA, GraphBuilder
from specrun.export.shared_attention import SOFTMAX_WEIGHTS, SharedParts, merge, prefix_part, shared_parts
from specrun.export.weight_file import Stored, WeightFile
from specrun.export.weight_store import StoredLayer, StoredWeights


def feature_taps(layers: int) -> tuple[int, ...]:
    """The residual streams that heads read: those entering layers 2, n / 2 and n - 3 (EAGLE-3), and the last one, n."""
    return tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0), layers}))


def build_target(
    config: ModelConfig,
    stored: StoredWeights,
    file: WeightFile,
    *,
    ragged: bool,
    taps: tuple[int, ...] = (),
    trees: bool = True,
    dummy_row: bool = True,
    shared: bool = False,
) -> ir.Model:
    """The graph of a target or of a draft model.

    Inputs, for `positions` new tokens of each row behind what its KV buffers hold:

    input_ids                 i64 [batch, positions]
    query_lengths             i32 [batch]: positions that count for the attention, its dummy row included
    pad_rows                  f32 [batch, 0 or 1, qkv]: the dummy row, so that the attention never sees a lone one
    total_lengths_minus_one   i32 [batch]: position of the last counted row
    max_total_length          i32 [1]: any bound on the lengths; the last dimension of the bias
    position_ids              i64 [batch, positions + pad]
    attention_bias            f32 [batch or 1, 1, positions + pad, max_total]: zeros for a chain, -inf where a node of a
                              token tree must not look
    logit_rows                i64 [batch, rows]: the positions whose logits are wanted
    past_key.i, past_value.i  f32 [batch, kv_heads, capacity, head_dim], bound to the same buffers as the outputs

    Outputs: logits f32 [batch, rows, vocabulary]; with `taps` features f32 [batch, positions, taps * hidden], the
    residual streams entering those layers (n: leaving the last), before any norm; present_key.i, present_value.i.

    The window of a sliding layer counts slots of the cache, not `position_ids`: of a token tree longer than that
    window with its past, only the part laid out as a chain from the past on is right there.

    `ragged` feeds `query_lengths` to the attention, so that rows of a batch may have different numbers of new
    positions; without it the graph loads in ONNX Runtime builds older than 1.32 and serves batch 1, and without dummy
    rows also several rows of one position each.

    Where `file` holds floats of 16 bits, the graph is one for the CUDA provider: keys, values, bias and dummy row are
    of that type, logits and features still f32. That provider's attention has no kernel for f32, and with a bias, even
    of zeros, it leaves its flash kernel for an unfused one; so a chain there has a graph of its own, without `trees`:
    no `attention_bias`, and positions that follow from the lengths. Without `dummy_row` there are no `pad_rows`: it
    costs two copies a layer there, and runs of a pinned width need none.

    `shared` makes the variant of best-of-N, for rows behind one prefix (`shared_attention`) and for the CPU alone.
    Instead of the bias it has

    prefix_key.i, prefix_value.i  f32 [kv_heads, 1, prefix, head_dim]: what all rows begin with, without their positions
    prefix_queries                i64 [4]: kv_heads, groups, batch * positions * heads / (kv_heads * groups), head_dim;
                                  with as many products (kv_heads * groups) as threads none is cut in pieces, whose size
                                  would depend on the batch
    bias_pads                     i64 [8]: 0 0 0 0, 0 0 pad max_total - 1, what makes a bias of a column

    and the rows' own buffers, with all lengths and `max_total`, begin with a slot that stands for the prefix and holds
    zeros; `position_ids` still count from the start of the prefix.
    """
    b = GraphBuilder(file)
    floats = b.floats
    kv_shape: list[int | str] = ["batch", config.kv_heads, "capacity", config.head_dim]
    qkv_width = (config.heads + 2 * config.kv_heads) * config.head_dim
    i64, i32, f32 = ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT
    specs: dict[str, tuple[ir.DataType, list[int | str]]] = {
        "input_ids": (i64, ["batch", "positions"]),
        "query_lengths": (i32, ["batch"]),
        "pad_rows": (floats, ["batch", "pad", qkv_width]),
        "total_lengths_minus_one": (i32, ["batch"]),
        "max_total_length": (i32, [1]),
        "position_ids": (i64, ["batch", "padded_positions"]),
        "attention_bias": (floats, ["bias_batch", 1, "padded_positions", "max_total"]),
        "logit_rows": (i64, ["batch", "rows"]),
    }
    if not dummy_row:
        del specs["pad_rows"]
        specs["position_ids"][1][1] = "positions"
        specs["attention_bias"][1][2] = "positions"
    if not trees:
        del specs["position_ids"], specs["attention_bias"]
    if shared:
        del specs["attention_bias"]
        specs |= {"prefix_queries": (i64, [4]), "bias_pads": (i64, [8])}
        for index in range(config.layers):
            for part in ("key", "value"):
                specs[f"prefix_{part}.{index}"] = (f32, [config.kv_heads, 1, "prefix", config.head_dim])
    for index in range(config.layers):
        specs[f"past_key.{index}"] = (floats, kv_shape)
        specs[f"past_value.{index}"] = (floats, kv_shape)
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        for name, (dtype, shape) in specs.items()
    }

    b.scope("model")
    positions = b.op("Shape", [inputs["input_ids"]], start=1, end=2) if dummy_row else None
    parts = shared_parts(b, config, inputs, positions) if shared and positions is not None else None
    residual = b.embed(inputs["input_ids"], stored.embedding)
    hidden = b.norm(residual, b.weight(stored.layers[0].input_norm), config.norm_epsilon)
    presents: list[ir.Value] = []
    tapped: dict[int, ir.Value] = {}
    for index, layer in enumerate(stored.layers):
        tapped[index] = residual
        b.scope(f"layers.{index}")
        attention, key, value = _attention(b, config, index, layer, stored, hidden, inputs, positions, ragged, parts)
        for present, name in ((key, "present_key"), (value, "present_value")):
            present.name = f"{name}.{index}"
            present.type, present.shape = ir.TensorType(floats), ir.Shape(kv_shape)
            presents.append(present)
        hidden, residual = b.add_norm(
            b.linear(attention, layer.output), residual, b.weight(layer.mlp_norm), config.norm_epsilon
        )
        next_norm = stored.layers[index + 1].input_norm if index + 1 < config.layers else stored.final_norm
        hidden, residual = b.add_norm(_mlp(b, layer, hidden), residual, b.weight(next_norm), config.norm_epsilon)

    b.scope("head")
    rows = b.op("Unsqueeze", [inputs["logit_rows"], b.axis(-1)])
    logits = b.float32(b.linear(b.op("GatherND", [hidden, rows], batch_dims=1), stored.head))
    logits.name = "logits"
    logits.type, logits.shape = ir.TensorType(f32), ir.Shape(["batch", "rows", config.vocabulary])
    outputs = [logits]
    if taps:
        tapped[config.layers] = residual
        features = b.float32(b.op("Concat", [tapped[tap] for tap in taps], axis=-1))
        features.name = "features"
        features.type, features.shape = ir.TensorType(f32), ir.Shape(["batch", "positions", len(taps) * config.hidden])
        outputs.append(features)
    model = b.finish([*inputs.values()], [*outputs, *presents], "target")
    if floats != f32:
        model.metadata_props[THETA] = repr(config.rope.theta)  # tables of 16 bits tell it only roughly
    return model


def _attention(
    b: GraphBuilder,
    config: ModelConfig,
    index: int,
    layer: StoredLayer,
    stored: StoredWeights,
    hidden: ir.Value,
    inputs: dict[str, ir.Value],
    positions: ir.Value | None,
    ragged: bool,
    shared: SharedParts | None,
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(attention output [batch, positions, heads * head_dim], present key, present value)."""
    qkv = b.linear(hidden, layer.qkv)
    if layer.query_norm is not None and layer.key_norm is not None:
        sizes = np.array([config.heads, config.kv_heads, config.kv_heads], np.int64) * config.head_dim
        query, key, value = b.op_multi("Split", [qkv, b.constant("qkv_sizes", sizes)], 3, axis=-1)
        query = _head_norm(b, config, query, layer.query_norm)
        key = _head_norm(b, config, key, layer.key_norm)
        qkv = b.op("Concat", [query, key, value], axis=-1)
    # The attention's kernel for a lone row sums in another order, so it never sees one: the dummy row is counted.
    padded = b.op("Concat", [qkv, inputs["pad_rows"]], axis=1) if positions is not None else qkv
    settings = config.layer_configs[index]
    rotary = (b.weight(stored.cos), b.weight(stored.sin)) if settings.rotary else None
    if shared is None:
        bias = inputs.get("attention_bias")
    else:
        bias, *prefix = prefix_part(b, config, index, qkv, rotary, inputs, shared)
    arguments: list[ir.Value | None] = [
        padded,
        None,
        None,
        inputs[f"past_key.{index}"],
        inputs[f"past_value.{index}"],
        inputs["total_lengths_minus_one"],
        inputs["max_total_length"],
        *(rotary or (None, None)),
        inputs.get("position_ids") if rotary else None,
        bias,
    ]
    if ragged:
        arguments += [None] * 5 + [inputs["query_lengths"]]
    while arguments[-1] is None:
        arguments.pop()
    attributes: dict[str, Any] = {
        "num_heads": config.heads,
        "kv_num_heads": config.kv_heads,
        "do_rotary": int(settings.rotary),
    }
    if settings.sliding_window is not None:
        attributes["local_window_size"] = settings.sliding_window
    if shared is None or positions is None:
        output, key, value = b.op_multi("GroupQueryAttention", arguments, 3, MICROSOFT, **attributes)
        return output if positions is None else b.slice_axis1(output, positions), key, value
    attributes["qk_output"] = SOFTMAX_WEIGHTS
    output, key, value, weights = b.op_multi("GroupQueryAttention", arguments, 4, MICROSOFT, **attributes)
    return merge(b, config, b.slice_axis1(output, positions), weights, (prefix[0], prefix[1]), shared), key, value


def _head_norm(b: GraphBuilder, config: ModelConfig, x: ir.Value, gamma: Stored) -> ir.Value:
    """RMS norm of each head of x [batch, positions, heads * head_dim]."""
    heads = b.op("Reshape", [x, b.constant("split_heads", np.array([0, 0, -1, config.head_dim], np.int64))])
    normed = b.norm(heads, b.weight(gamma), config.norm_epsilon)
    return b.op("Reshape", [normed, b.constant("join_heads", np.array([0, 0, -1], np.int64))])


def _mlp(b: GraphBuilder, layer: StoredLayer, x: ir.Value) -> ir.Value:
    """down(silu(gate(x)) * up(x)); QuickGelu with alpha 1 is silu."""
    gate, up = b.op_multi("Split", [b.linear(x, layer.gate_up)], 2, axis=-1, num_outputs=2)
    return b.linear(b.op("Mul", [b.op("QuickGelu", [gate], MICROSOFT, alpha=1.0), up]), layer.down)
