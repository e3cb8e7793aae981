"""A model's weights in the data file, in the storage of one precision, as the graphs refer to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specrun.export.quantize import BlockMatrix, Matrix, fused_matrices, quantize_matrix, round_offsets
from specrun.export.rotary import rotary_tables
from specrun.export.weight_file import Stored, WeightFile
from specrun.export.weights import Weights
from specrun.models_cache.progress import Progress

# Positions that a run may hold past the context: the widest verify, padding and the dummy row.
SPARE_POSITIONS = 320
FLOAT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A `Matrix` in the data file. `bits` 32 is float; otherwise blocks of `block` columns.

    `offsets`: those of the blocks, [rows, columns / block] in blocks of their own; float ones are a tensor "offsets".
    A tensor "zero_points" holds the 128 that 8-bit codes mean where an embedding's kernel must be told.
    """

    type_name: str
    rows: int
    columns: int
    bits: int
    block: int
    tensors: dict[str, Stored]
    offsets: StoredMatrix | None = None


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
        matrices = {part: [m for linear in group for m in linear.matrices] for part, group in linears.items()}
        matrices["embedding"] = [self.embedding]
        return {
            part: "+".join(sorted({name for matrix in group for name in matrix.type_name.split("+")}))
            for part, group in matrices.items()
        }


def store_weights(
    weights: Weights, file: WeightFile, precision: str, block: int | None, progress: Progress | None = None
) -> StoredWeights:
    """Quantise and write every tensor of the model, one projection group in memory at a time."""
    config = weights.config
    rounded = precision == "int4" and file.floats == np.float32  # the other types are for the CUDA provider

    def vector(name: str) -> Stored:
        return file.add(name, weights.tensor(name))

    def linear(prefix: str, parts: list[str], biased: bool) -> StoredLinear:
        names = [f"{prefix}.{part}.weight" for part in parts]
        label = f"{prefix}.{'_'.join(parts)}"
        matrices = tuple(
            store_matrix(file, f"{label}.{index}", round_offsets(matrix) if rounded else matrix)
            for index, matrix in enumerate(fused_matrices(weights, names, precision, block))
        )
        bias = None
        if biased:
            biases = [weights.tensor(f"{prefix}.{part}.bias") for part in parts]
            bias = file.add(f"{label}.bias", np.concatenate(biases))
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
    stored = store_matrix(file, name, embedding, zero_points=file.floats != np.float32)
    if weights.config.tied_head:
        return stored, StoredLinear((stored,), None)
    if precision == "source":
        (head,) = fused_matrices(weights, [head_name], precision, None)
    else:
        head = quantize_matrix(weights.tensor(head_name), end_precision, block)
    return stored, StoredLinear((store_matrix(file, head_name, head),), None)


def store_matrix(file: WeightFile, name: str, matrix: Matrix, *, zero_points: bool = False) -> StoredMatrix:
    """Write a matrix. zero_points: and the zero point of each 8-bit block, for an embedding in a graph for CUDA.

    Without them kernels of that provider differed over the years: some took the codes as if their zero were 0.
    """
    if isinstance(matrix, BlockMatrix):
        tensors = {
            "packed": file.add(f"{name}.packed", matrix.packed),
            "scales": file.add(f"{name}.scales", matrix.scales),
        }
        if zero_points and matrix.bits == 8:
            tensors["zero_points"] = file.add(f"{name}.zero_points", np.full(matrix.scales.shape, 128, np.uint8))
        offsets = None
        if matrix.offset_blocks is not None:
            offsets = store_matrix(file, f"{name}.offsets", matrix.offset_blocks)
        elif matrix.offsets is not None:
            tensors["offsets"] = file.add(f"{name}.offsets", np.ascontiguousarray(matrix.offsets.T))
        return StoredMatrix(matrix.type_name, matrix.rows, matrix.columns, matrix.bits, matrix.block, tensors, offsets)
    rows, columns = matrix.weight.shape
    return StoredMatrix(
        FLOAT_NAMES[file.floats.name], rows, columns, 32, 0, {"weight": file.add(f"{name}.weight", matrix.weight)}
    )
