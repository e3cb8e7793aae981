"""Builds the graphs of learned heads, Medusa and EAGLE, each with the choice of its best tokens inside.

They compute in 8-bit blocks with float32 between, whatever the target's precision. Medusa serves any number of
sequences at once; EAGLE has one buffer, in which several can lie where the bias keeps them apart. A lone row takes the
attention's own kernel, since a draft need not be bit-equal. What they have in common, `draft` being the rows
of the head (the draft vocabulary):

in    inverse_temperature  f32 [1]: 1 for greedy decoding
      noise                f32 [1 or rows, draft]: added to logits * inverse_temperature before the best are taken;
                           zeros [1, draft] for the plain order
      top_k                i64 [1]: how many tokens a row gives, at most `draft`
out   tokens               i64 [rows, top_k]: the target's ids with the best scores, best first
      log_probs            f32 [rows, top_k]: log softmax(logits * inverse_temperature) of these, without the noise
      logits               f32 [rows, draft]: as the head gives them
"""

from __future__ import annotations

import onnx_ir as ir

from specrun.export.graph_builder import MICROSOFT, GraphBuilder
from specrun.export.speculator_config import EagleConfig, MedusaConfig
from specrun.export.speculator_parts import SpeculatorParts
from specrun.export.weight_file import Stored, WeightFile

_I64, _I32, _F32 = ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT
_Shape = list[int | str]


def build_medusa(config: MedusaConfig, parts: SpeculatorParts, file: WeightFile) -> ir.Model:
    """The graph of a Medusa speculator: every head from each feature, a row of logits each.

    features   f32 [n, taps * hidden]: of each sequence the target's residual streams at the newest position that it has
               run. Head j guesses the token j + 2 places after that position.
    input_ids  i64 [n]: the token after that position; in the layout "medusa-joined" only
    Besides the common inputs and outputs, with rows = heads * n: those of head 0 first. In the layout "medusa" the one
    tap is the last residual stream, to which the graph applies the target's final norm.
    """
    b = GraphBuilder(file)
    hidden, draft = parts.speculator.target.hidden, parts.speculator.draft_vocabulary
    taps = len(parts.speculator.taps)
    inputs = {"features": _value("features", _F32, ["sequences", taps * hidden])}
    choice = _choice_inputs(draft)

    b.scope("medusa")
    if config.layout == "medusa":
        shared = b.norm(inputs["features"], b.weight(parts.target_norm()), parts.target_epsilon)
    else:
        inputs["input_ids"] = _value("input_ids", _I64, ["sequences"])
        x = _combined_taps(b, parts, inputs["features"], taps, config.norm_epsilon)
        shared = _joined(b, parts, b.embed(inputs["input_ids"], parts.embedding()), x, config.norm_epsilon)
    final = None if config.layout == "medusa" else b.weight(parts.vector("final_norm"))
    own_head = "heads.0.head" in parts.speculator
    rows = []
    for head in range(config.heads):
        b.scope(f"heads.{head}")
        z = shared
        for block in range(config.blocks):
            name = f"heads.{head}.blocks.{block}"
            step = b.linear(z, parts.linear(f"{name}.weight", f"{name}.bias"))
            z = b.op("Add", [z, _silu(b, step)])
        if final is not None:
            z = b.norm(z, final, config.norm_epsilon)
        rows.append(b.linear(z, parts.linear(f"heads.{head}.head")) if own_head else z)
    b.scope("head")
    joined = b.op("Concat", [*rows], axis=0)
    logits = joined if own_head else b.linear(joined, parts.head())
    outputs = _choose(b, logits, choice, parts.vocabulary(), ["rows", draft])
    return b.finish([*inputs.values(), *choice.values()], outputs, "medusa")


def build_eagle(
    config: EagleConfig, parts: SpeculatorParts, file: WeightFile, attention_floats: ir.DataType = _F32
) -> ir.Model:
    """The graph of an EAGLE head: one decoder layer with a KV buffer of its own.

    Slot i of the buffer stands for position i of the text: it is written from the feature of the token there, or from
    a recycled `hidden` where the target has not run yet, and from the token after it. Its logits are of the token
    after that one.

    in    features                 f32 [n, taps * hidden]: the target's residual streams at the speculator's taps
          recycled                 f32 [m, hidden]: outputs `hidden` of earlier runs; n or m may be 0
          input_ids                i64 [n + m]: the token after each of these
          position_ids             i64 [1, n + m]: the position of each feature, which for a node of a tree is not
                                   its slot
          total_length_minus_one   i32 [1]: the last slot written by this run
          max_total_length         i32 [1]: any bound on the length; the last dimension of the bias
          attention_bias           f32 [1, 1, n + m, max_total]: zeros for a chain, -inf where a node must not look
          rows                     i64 [r]: which of the n + m rows give logits
          past_key, past_value     [1, kv_heads, capacity, head_dim], bound to the same buffers as the outputs; of the
                                   type that the attention computes in, `attention_floats`
    out   hidden                   f32 [n + m, hidden]
          present_key, present_value
    Besides the common inputs and outputs, with rows = r; the same for every layout. In "eagle1" the one tap is the last
    residual stream, to which the graph applies the target's final norm.
    """
    b = GraphBuilder(file)
    hidden, draft = parts.speculator.target.hidden, parts.speculator.draft_vocabulary
    taps = len(parts.speculator.taps)
    kv_shape: _Shape = [1, config.kv_heads, "capacity", config.head_dim]
    specs: dict[str, tuple[ir.DataType, _Shape]] = {
        "features": (_F32, ["features", taps * hidden]),
        "recycled": (_F32, ["recycled", hidden]),
        "input_ids": (_I64, ["positions"]),
        "position_ids": (_I64, [1, "positions"]),
        "total_length_minus_one": (_I32, [1]),
        "max_total_length": (_I32, [1]),
        "attention_bias": (_F32, [1, 1, "positions", "max_total"]),
        "rows": (_I64, ["rows"]),
        "past_key": (attention_floats, kv_shape),
        "past_value": (attention_floats, kv_shape),
    }
    inputs = {name: _value(name, dtype, shape) for name, (dtype, shape) in specs.items()}
    choice = _choice_inputs(draft)

    b.scope("eagle")
    first = b.axis(0)
    embedded = b.op("Unsqueeze", [b.embed(inputs["input_ids"], parts.embedding()), first])
    features = _features(b, config, parts, inputs["features"], taps)
    x = b.op("Unsqueeze", [b.op("Concat", [features, inputs["recycled"]], axis=0), first])

    def normed(value: ir.Value, name: str) -> ir.Value:
        return b.norm(value, b.weight(parts.vector(name)), config.norm_epsilon)

    if config.layout == "eagle3":
        both = [normed(embedded, "input_norm"), normed(x, "hidden_norm")]
        residual, attention_input = x, b.op("Concat", [*both], axis=-1)
    elif config.layout == "joined":
        residual = _joined(b, parts, embedded, x, config.norm_epsilon)
        attention_input = normed(residual, "input_norm")
    else:
        residual = b.linear(b.op("Concat", [embedded, x], axis=-1), parts.linear("fc", "fc_bias"))
        attention_input = residual
    attention, *presents = _attention(b, config, parts, attention_input, inputs, attention_floats)
    normed_x, residual = b.add_norm(
        b.linear(attention, parts.linear("output")), residual, b.weight(parts.vector("mlp_norm")), config.norm_epsilon
    )
    gate, up = b.op_multi("Split", [b.linear(normed_x, parts.linear("gate_up"))], 2, axis=-1, num_outputs=2)
    down = b.linear(b.op("Mul", [_silu(b, gate), up]), parts.linear("down"))
    if config.layout != "eagle1":
        final, out = b.add_norm(down, residual, b.weight(parts.vector("final_norm")), config.norm_epsilon)
    else:
        final = out = b.op("Add", [down, residual])

    b.scope("head")
    logits = b.linear(b.op("Gather", [b.op("Squeeze", [final, first]), inputs["rows"]], axis=0), parts.head())
    outputs = _choose(b, logits, choice, parts.vocabulary(), ["rows", draft])
    recycled = _named(b.op("Squeeze", [out, first]), "hidden", _F32, ["positions", hidden])
    for present, name in zip(presents, ("present_key", "present_value"), strict=True):
        _named(present, name, attention_floats, kv_shape)
    return b.finish([*inputs.values(), *choice.values()], [*outputs, recycled, *presents], "eagle")


def _features(b: GraphBuilder, config: EagleConfig, parts: SpeculatorParts, features: ir.Value, taps: int) -> ir.Value:
    """The target's features [n, taps * hidden] in the form of a recycled one, [n, hidden]."""
    if config.layout == "eagle1":
        return b.norm(features, b.weight(parts.target_norm()), parts.target_epsilon)
    return _combined_taps(b, parts, features, taps, config.norm_epsilon)


def _combined_taps(b: GraphBuilder, parts: SpeculatorParts, features: ir.Value, taps: int, epsilon: float) -> ir.Value:
    """Residual streams [n, taps * hidden] through `fc`, each normalised before where there are norms: [n, hidden]."""
    if norms := parts.tap_norms():
        split = b.op_multi("Split", [features], taps, axis=-1, num_outputs=taps) if taps > 1 else [features]
        normed = [b.norm(tap, b.weight(gamma), epsilon) for tap, gamma in zip(split, norms, strict=True)]
        features = b.op("Concat", [*normed], axis=-1)
    return b.linear(features, parts.linear("fc"))


def _joined(b: GraphBuilder, parts: SpeculatorParts, embedded: ir.Value, x: ir.Value, epsilon: float) -> ir.Value:
    """The token's embedding and x, both [..., hidden], normalised and through `join`."""
    both = [
        b.norm(embedded, b.weight(parts.vector("embedding_norm")), epsilon),
        b.norm(x, b.weight(parts.vector("hidden_norm")), epsilon),
    ]
    return b.linear(b.op("Concat", [*both], axis=-1), parts.linear("join"))


def _attention(
    b: GraphBuilder,
    config: EagleConfig,
    parts: SpeculatorParts,
    x: ir.Value,
    inputs: dict[str, ir.Value],
    floats: ir.DataType,
) -> list[ir.Value]:
    """[attention output [1, positions, heads * head_dim], present key, present value].

    floats: what the attention computes in; the CUDA provider has it for types of 16 bits alone.
    """

    def cast(value: ir.Value) -> ir.Value:
        return value if floats == _F32 else b.op("Cast", [value], to=floats)

    cos, sin = parts.rotary(config)
    arguments: list[ir.Value | None] = [
        cast(b.linear(x, parts.linear("qkv", "qkv_bias"))),
        None,
        None,
        inputs["past_key"],
        inputs["past_value"],
        inputs["total_length_minus_one"],
        inputs["max_total_length"],
        cast(b.weight(cos)),
        cast(b.weight(sin)),
        inputs["position_ids"],
        cast(inputs["attention_bias"]),
    ]
    sizes = {"num_heads": config.heads, "kv_num_heads": config.kv_heads}
    output, *presents = b.op_multi("GroupQueryAttention", arguments, 3, MICROSOFT, do_rotary=1, **sizes)
    return [output if floats == _F32 else b.op("Cast", [output], to=_F32), *presents]


def _choice_inputs(draft: int) -> dict[str, ir.Value]:
    """The inputs that say how the best tokens are chosen."""
    return {
        "inverse_temperature": _value("inverse_temperature", _F32, [1]),
        "noise": _value("noise", _F32, ["noise_rows", draft]),
        "top_k": _value("top_k", _I64, [1]),
    }


def _choose(
    b: GraphBuilder, logits: ir.Value, choice: dict[str, ir.Value], vocabulary: Stored | None, shape: _Shape
) -> list[ir.Value]:
    """The outputs tokens, log_probs and logits of `logits` [rows, draft]."""
    b.scope("choice")
    scaled = b.op("Mul", [logits, choice["inverse_temperature"]])
    scores = b.op("Add", [scaled, choice["noise"]])
    _, best = b.op_multi("TopK", [scores, choice["top_k"]], 2, axis=-1)
    taken = b.op("GatherElements", [b.op("LogSoftmax", [scaled], axis=-1), best], axis=-1)
    tokens = b.op("Identity", [best]) if vocabulary is None else b.op("Gather", [b.weight(vocabulary), best], axis=0)
    row = shape[0]
    return [
        _named(tokens, "tokens", _I64, [row, "top_k"]),
        _named(taken, "log_probs", _F32, [row, "top_k"]),
        _named(logits, "logits", _F32, shape),
    ]


def _silu(b: GraphBuilder, x: ir.Value) -> ir.Value:
    """QuickGelu with alpha 1."""
    return b.op("QuickGelu", [x], MICROSOFT, alpha=1.0)


def _value(name: str, dtype: ir.DataType, shape: _Shape) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _named(value: ir.Value, name: str, dtype: ir.DataType, shape: _Shape) -> ir.Value:
    value.name = name
    value.type, value.shape = ir.TensorType(dtype), ir.Shape(shape)
    return value
