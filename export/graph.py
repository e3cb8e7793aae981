"""Builds the target graph: prefill, plain steps, K+1 verify positions and token trees in one graph.

Inputs and outputs are those of the table in `INPUTS`; `batch`, `positions`, `pad` (0 or 1), `rows`, `capacity` and
`max_total` are symbolic. All variants of a bundle are built from one `StoredWeights` and share its data file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrun.export.config import ModelConfig
from specrun.export.quantize import BlockMatrix, Matrix, fused_matrices, quantize_matrix
from specrun.export.rotary import rotary_tables
from specrun.export.weight_file import Stored, WeightFile
from specrun.export.weights import Weights
from specrun.models_cache.progress import Progress

OPSET = 23
IR_VERSION = 10
MICROSOFT = "com.microsoft"
# int8 accumulation of MatMulNBits: activations are rounded per row and block, so rows stay independent.
ACCURACY_LEVEL = 4
# Positions that a run may hold past the context: the widest verify, padding and the dummy row.
SPARE_POSITIONS = 320


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A `Matrix` in the data file. `bits` 32 is float; otherwise blocks of `block` columns."""

    type_name: str
    rows: int
    columns: int
    bits: int
    block: int
    tensors: dict[str, Stored]


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """Projections of one input whose outputs are concatenated, plus an optional bias [N]."""

    matrices: tuple[StoredMatrix, ...]
    bias: Stored | None


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One decoder layer."""

    input_norm: Stored
    qkv: StoredLinear
    query_norm: Stored | None
    key_norm: Stored | None
    output: StoredLinear
    mlp_norm: Stored
    gate_up: StoredLinear
    down: StoredLinear


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Everything a graph refers to."""

    embedding: StoredMatrix
    layers: tuple[StoredLayer, ...]
    final_norm: Stored
    head: StoredLinear
    cos: Stored
    sin: Stored

    def type_names(self) -> dict[str, str]:
        """What each part is stored as ("int8", "Q4_K+Q6_K")."""
        linears = {
            "attention": [linear for layer in self.layers for linear in (layer.qkv, layer.output)],
            "mlp": [linear for layer in self.layers for linear in (layer.gate_up, layer.down)],
            "head": [self.head],
        }
        names = {part: {m.type_name for linear in group for m in linear.matrices} for part, group in linears.items()}
        names["embedding"] = {self.embedding.type_name}
        return {part: "+".join(sorted({kind for name in found for kind in name.split("+")})) for part, found in names.items()}


def store_weights(
    weights: Weights, file: WeightFile, precision: str, block: int | None, progress: Progress | None = None
) -> StoredWeights:
    """Quantise and write every tensor of the model, one projection group in memory at a time."""
    config = weights.config

    def vector(name: str) -> Stored:
        return file.add(name, weights.tensor(name))

    def linear(prefix: str, parts: list[str], biased: bool) -> StoredLinear:
        names = [f"{prefix}.{part}.weight" for part in parts]
        label = f"{prefix}.{'_'.join(parts)}"
        matrices = tuple(
            _store_matrix(file, f"{label}.{index}", matrix)
            for index, matrix in enumerate(fused_matrices(weights, names, precision, block))
        )
        bias = None
        if biased:
            bias = file.add(f"{label}.bias", np.concatenate([weights.tensor(f"{prefix}.{part}.bias") for part in parts]))
        return StoredLinear(matrices, bias)

    layers = []
    for index, prefix in enumerate(f"model.layers.{i}" for i in range(config.layers)):
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        normed = config.family.qk_norm
        layers.append(
            StoredLayer(
                input_norm=vector(f"{prefix}.input_layernorm.weight"),
                qkv=linear(attention, ["q_proj", "k_proj", "v_proj"], config.attention_bias),
                query_norm=vector(f"{attention}.q_norm.weight") if normed else None,
                key_norm=vector(f"{attention}.k_norm.weight") if normed else None,
                output=linear(attention, ["o_proj"], config.output_bias),
                mlp_norm=vector(f"{prefix}.post_attention_layernorm.weight"),
                gate_up=linear(mlp, ["gate_proj", "up_proj"], config.mlp_bias),
                down=linear(mlp, ["down_proj"], config.mlp_bias),
            )
        )
        if progress:
            progress("Writing layers", index + 1, config.layers)
    embedding, head = _store_ends(weights, file, precision, block)
    cos, sin = rotary_tables(config, config.context + SPARE_POSITIONS, weights)
    return StoredWeights(
        embedding, tuple(layers), vector("model.norm.weight"), head, file.add("cos", cos), file.add("sin", sin)
    )


def _store_ends(
    weights: Weights, file: WeightFile, precision: str, block: int | None
) -> tuple[StoredMatrix, StoredLinear]:
    """Embedding and head; a tied pair is stored once. int4 keeps both at 8 bits: they cost fidelity most."""
    name, head_name = "model.embed_tokens.weight", "lm_head.weight"
    if precision == "source":
        (embedding,) = fused_matrices(weights, [name], precision, None)
    else:
        end_precision = "int8" if precision == "int4" else precision
        embedding = quantize_matrix(weights.tensor(name), end_precision, block)
    stored = _store_matrix(file, name, embedding)
    if weights.config.tied_head:
        return stored, StoredLinear((stored,), None)
    if precision == "source":
        (head,) = fused_matrices(weights, [head_name], precision, None)
    else:
        head = quantize_matrix(weights.tensor(head_name), end_precision, block)
    return stored, StoredLinear((_store_matrix(file, head_name, head),), None)


def _store_matrix(file: WeightFile, name: str, matrix: Matrix) -> StoredMatrix:
    if isinstance(matrix, BlockMatrix):
        tensors = {
            "packed": file.add(f"{name}.packed", matrix.packed),
            "scales": file.add(f"{name}.scales", matrix.scales),
        }
        if matrix.zero_points is not None:
            tensors["zero_points"] = file.add(f"{name}.zero_points", matrix.zero_points)
        if matrix.offsets is not None:
            tensors["offsets"] = file.add(f"{name}.offsets", np.ascontiguousarray(matrix.offsets.T))
        return StoredMatrix(matrix.type_name, matrix.rows, matrix.columns, matrix.bits, matrix.block, tensors)
    rows, columns = matrix.weight.shape
    return StoredMatrix(matrix.type_name, rows, columns, 32, 0, {"weight": file.add(f"{name}.weight", matrix.weight)})


class GraphBuilder:
    """Adds nodes to a graph; values are `onnx_ir.Value`s."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self._tape = ir.tape.Tape()
        self._constants: dict[str, ir.Value] = {}
        self._scope = ""
        self._count = 0

    def scope(self, name: str) -> None:
        """Names of the nodes that follow begin with `name`."""
        self._scope, self._count = name, 0

    def op(self, kind: str, inputs: list[ir.Value | None], domain: str = "", **attributes: Any) -> ir.Value:
        """Append a node with one output."""
        return self.op_multi(kind, inputs, 1, domain, **attributes)[0]

    def op_multi(
        self, kind: str, inputs: list[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        """Append a node with several outputs."""
        self._count += 1
        name = f"{self._scope}/{kind}.{self._count}"
        values = self._tape.op_multi_out(
            kind,
            inputs,
            attributes=attributes,
            num_outputs=outputs,
            domain=domain,
            name=name,
        )
        for index, value in enumerate(values):
            value.name = f"{name}:{index}"
        return list(values)

    def weight(self, stored: Stored) -> ir.Value:
        """The initializer for a stored tensor."""
        assert stored.name is not None
        if stored.name not in self._constants:
            self._constants[stored.name] = self._tape.initializer(stored)
        return self._constants[stored.name]

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """A small constant, shared under its name."""
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.Tensor(array, name=name))
        return self._constants[name]

    def linear(self, x: ir.Value, linear: StoredLinear) -> ir.Value:
        """x [batch, positions, K] -> [batch, positions, sum of N]."""
        outputs = []
        sums: dict[int, ir.Value] = {}
        for matrix in linear.matrices:
            y = self._matmul(x, matrix)
            if "offsets" in matrix.tensors:
                if matrix.block not in sums:
                    sums[matrix.block] = self._block_sums(x, matrix.block)
                term = self.op("MatMul", [sums[matrix.block], self.weight(matrix.tensors["offsets"])])
                y = self.op("Add", [y, term])
            outputs.append(y)
        y = outputs[0] if len(outputs) == 1 else self.op("Concat", [*outputs], axis=-1)
        return y if linear.bias is None else self.op("Add", [y, self.weight(linear.bias)])

    def _matmul(self, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
        tensors = matrix.tensors
        if matrix.bits == 32:
            # The weight stays [N, K] so that a tied embedding is stored once; the kernel prepacks it at load.
            return self.op("FusedMatMul", [x, self.weight(tensors["weight"])], MICROSOFT, transB=1)
        inputs: list[ir.Value | None] = [x, self.weight(tensors["packed"]), self.weight(tensors["scales"])]
        if "zero_points" in tensors:
            inputs.append(self.weight(tensors["zero_points"]))
        return self.op(
            "MatMulNBits",
            inputs,
            MICROSOFT,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.block,
            accuracy_level=ACCURACY_LEVEL,
        )

    def _block_sums(self, x: ir.Value, block: int) -> ir.Value:
        shape = self.constant(f"blocks_of_{block}", np.array([0, 0, -1, block], np.int64))
        axis = self.constant("last_axis", np.array([-1], np.int64))
        return self.op("ReduceSum", [self.op("Reshape", [x, shape]), axis], keepdims=0)

    def embed(self, ids: ir.Value, matrix: StoredMatrix) -> ir.Value:
        """ids [batch, positions] -> [batch, positions, hidden], from the same bytes that a tied head multiplies."""
        tensors = matrix.tensors
        if matrix.bits == 32:
            return self.op("Gather", [self.weight(tensors["weight"]), ids], axis=0)
        packed = tensors["packed"]
        flat = self._file.view(f"{packed.name}.flat", packed, (matrix.rows, matrix.columns * matrix.bits // 8))
        x = self.op(
            "GatherBlockQuantized",
            [self.weight(flat), ids, self.weight(tensors["scales"])],
            MICROSOFT,
            bits=matrix.bits,
            block_size=matrix.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if "offsets" not in tensors:
            return x
        offsets = self.op("Gather", [self.weight(tensors["offsets"]), ids], axis=1)  # [blocks, batch, positions]
        offsets = self.op("Unsqueeze", [self.op("Transpose", [offsets], perm=[1, 2, 0]), self._axis(-1)])
        split = self.op("Reshape", [x, self.constant(f"blocks_of_{matrix.block}", np.array([0, 0, -1, matrix.block], np.int64))])
        joined = self.constant("hidden_shape", np.array([0, 0, matrix.columns], np.int64))
        return self.op("Reshape", [self.op("Add", [split, offsets]), joined])

    def _axis(self, axis: int) -> ir.Value:
        return self.constant(f"axis_{axis}", np.array([axis], np.int64))

    def slice_axis1(self, x: ir.Value, end: ir.Value) -> ir.Value:
        """x[:, :end]."""
        return self.op("Slice", [x, self.constant("zero", np.array([0], np.int64)), end, self._axis(1)])

    def norm(self, x: ir.Value, gamma: ir.Value, epsilon: float) -> ir.Value:
        """RMS norm over the last axis."""
        return self.op("RMSNormalization", [x, gamma], axis=-1, epsilon=epsilon)

    def add_norm(self, x: ir.Value, residual: ir.Value, gamma: ir.Value, epsilon: float) -> tuple[ir.Value, ir.Value]:
        """(RMS norm of x + residual, x + residual)."""
        outputs = self.op_multi("SkipSimplifiedLayerNormalization", [x, residual, gamma], 4, MICROSOFT, epsilon=epsilon)
        for unused in outputs[1:3]:
            unused.name = ""  # mean and inverse deviation are only for training
        return outputs[0], outputs[3]

    def finish(self, inputs: list[ir.Value], outputs: list[ir.Value], name: str) -> ir.Model:
        """The model."""
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET, MICROSOFT: 1},
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="specrun")


def build_target(config: ModelConfig, stored: StoredWeights, file: WeightFile, *, ragged: bool) -> ir.Model:
    """The target graph of design.md.

    `ragged` feeds `query_lengths` to the attention, so that rows of a batch may have different numbers of new
    positions; without it the graph loads in ONNX Runtime builds older than 1.32 and serves batch 1.
    """
    b = GraphBuilder(file)
    kv_shape = ["batch", config.kv_heads, "capacity", config.head_dim]
    qkv_width = (config.heads + 2 * config.kv_heads) * config.head_dim
    i64, i32, f32 = ir.DataType.INT64, ir.DataType.INT32, ir.DataType.FLOAT
    specs: dict[str, tuple[ir.DataType, list[int | str]]] = {
        "input_ids": (i64, ["batch", "positions"]),
        "query_lengths": (i32, ["batch"]),
        "pad_rows": (f32, ["batch", "pad", qkv_width]),
        "total_lengths_minus_one": (i32, ["batch"]),
        "max_total_length": (i32, [1]),
        "position_ids": (i64, ["batch", "padded_positions"]),
        "attention_bias": (f32, ["bias_batch", 1, "padded_positions", "max_total"]),
        "logit_rows": (i64, ["batch", "rows"]),
    }
    for layer in range(config.layers):
        specs[f"past_key.{layer}"] = (f32, [*kv_shape])
        specs[f"past_value.{layer}"] = (f32, [*kv_shape])
    inputs = {
        name: ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        for name, (dtype, shape) in specs.items()
    }

    b.scope("model")
    positions = b.op("Shape", [inputs["input_ids"]], start=1, end=2)
    residual = b.embed(inputs["input_ids"], stored.embedding)
    hidden = b.norm(residual, b.weight(stored.layers[0].input_norm), config.norm_epsilon)
    presents: list[ir.Value] = []
    for index, layer in enumerate(stored.layers):
        b.scope(f"layers.{index}")
        attention, key, value = _attention(b, config, index, layer, stored, hidden, inputs, positions, ragged)
        for present, name in ((key, "present_key"), (value, "present_value")):
            present.name = f"{name}.{index}"
            present.type, present.shape = ir.TensorType(f32), ir.Shape(kv_shape)
            presents.append(present)
        hidden, residual = b.add_norm(
            b.linear(attention, layer.output), residual, b.weight(layer.mlp_norm), config.norm_epsilon
        )
        next_norm = stored.layers[index + 1].input_norm if index + 1 < config.layers else stored.final_norm
        hidden, residual = b.add_norm(_mlp(b, layer, hidden), residual, b.weight(next_norm), config.norm_epsilon)

    b.scope("head")
    rows = b.op("Unsqueeze", [inputs["logit_rows"], b._axis(-1)])
    logits = b.linear(b.op("GatherND", [hidden, rows], batch_dims=1), stored.head)
    logits.name = "logits"
    logits.type, logits.shape = ir.TensorType(f32), ir.Shape(["batch", "rows", config.vocabulary])
    return b.finish([*inputs.values()], [logits, *presents], "target")


def _attention(
    b: GraphBuilder,
    config: ModelConfig,
    index: int,
    layer: StoredLayer,
    stored: StoredWeights,
    hidden: ir.Value,
    inputs: dict[str, ir.Value],
    positions: ir.Value,
    ragged: bool,
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
    padded = b.op("Concat", [qkv, inputs["pad_rows"]], axis=1)
    settings = config.layer_configs[index]
    arguments: list[ir.Value | None] = [
        padded,
        None,
        None,
        inputs[f"past_key.{index}"],
        inputs[f"past_value.{index}"],
        inputs["total_lengths_minus_one"],
        inputs["max_total_length"],
        b.weight(stored.cos) if settings.rotary else None,
        b.weight(stored.sin) if settings.rotary else None,
        inputs["position_ids"] if settings.rotary else None,
        inputs["attention_bias"],
    ]
    if ragged:
        arguments += [None] * 5 + [inputs["query_lengths"]]
    attributes: dict[str, Any] = {
        "num_heads": config.heads,
        "kv_num_heads": config.kv_heads,
        "do_rotary": int(settings.rotary),
    }
    if settings.sliding_window is not None:
        attributes["local_window_size"] = settings.sliding_window
    output, key, value = b.op_multi("GroupQueryAttention", arguments, 3, MICROSOFT, **attributes)
    return b.slice_axis1(output, positions), key, value


def _head_norm(b: GraphBuilder, config: ModelConfig, x: ir.Value, gamma: Stored) -> ir.Value:
    """RMS norm of each head of x [batch, positions, heads * head_dim]."""
    heads = b.op("Reshape", [x, b.constant("split_heads", np.array([0, 0, -1, config.head_dim], np.int64))])
    normed = b.norm(heads, b.weight(gamma), config.norm_epsilon)
    return b.op("Reshape", [normed, b.constant("join_heads", np.array([0, 0, -1], np.int64))])


def _mlp(b: GraphBuilder, layer: StoredLayer, x: ir.Value) -> ir.Value:
    """down(silu(gate(x)) * up(x)); QuickGelu with alpha 1 is silu."""
    gate, up = b.op_multi("Split", [b.linear(x, layer.gate_up)], 2, axis=-1, num_outputs=2)
    return b.linear(b.op("Mul", [b.op("QuickGelu", [gate], MICROSOFT, alpha=1.0), up]), layer.down)
