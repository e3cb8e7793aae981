"""Weights [out, in] become matrices in a storage that ONNX Runtime computes with.

A `FloatMatrix` is a MatMul; a `BlockMatrix` is MatMulNBits with, for quantisations that carry a minimum per block,
a second term blocksum(x) @ offsets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.export.weights import Blocks, Weights
from specrun.models_cache.errors import UsageError

PRECISIONS = {"cpu": ("int8", "int4", "fp32", "source"), "cuda": ("fp16", "bf16", "int8", "int4")}
FLOAT_PRECISIONS = ("fp32", "fp16", "bf16")
DEFAULT_BLOCKS = {"int8": 32, "int4": 32}
VALID_BLOCKS = (16, 32, 64, 128, 256)
OFFSETS_BLOCK: Final = 16  # of the offsets of 4-bit blocks, rounded to 8 bits
_FITTED_AT_ONCE = 1 << 20  # values, so that the temporaries stay in the caches


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """weight: f32 [N, K]."""

    weight: NDArray[np.float32]
    type_name: str = "fp32"

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """w[n, k] = scales[n, k // block] * (code - 2**(bits - 1)) + offsets[n, k // block], offsets 0 where None.

    type_name: "int8", "int4", or the GGUF types that it holds exactly ("Q4_1", "Q4_K+Q4_1");
    packed: u8 [N, K // block, block * bits // 8], the first of two 4-bit codes in the low half of a byte;
    scales, offsets: f32 [N, K // block];
    offset_blocks: the same offsets as 8-bit blocks, zeros after the last one, if they are stored so.
    """

    type_name: str
    bits: int
    block: int
    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None = None
    offset_blocks: BlockMatrix | None = None

    @property
    def rows(self) -> int:
        return int(self.packed.shape[0])

    @property
    def columns(self) -> int:
        return int(self.packed.shape[1]) * self.block


Matrix = FloatMatrix | BlockMatrix


def check_precision(precision: str, block: int | None, device: str = "cpu") -> None:
    """Refuse an unknown device, precision or block size with a UsageError."""
    if device not in PRECISIONS:
        raise UsageError(f"Unknown device '{device}': choose one of {', '.join(PRECISIONS)}.")
    if precision not in PRECISIONS[device]:
        known = any(precision in names for names in PRECISIONS.values())
        choose = f"choose one of {', '.join(PRECISIONS[device])}"
        if known and device == "cuda":
            raise UsageError(f"Precision '{precision}' does not run on the CUDA provider: {choose}.")
        if known:
            raise UsageError(f"Precision '{precision}' is for a GPU, with --device cuda; here {choose}.")
        raise UsageError(f"Unknown precision '{precision}': {choose}.")
    if block is not None and (precision not in DEFAULT_BLOCKS or block not in VALID_BLOCKS):
        raise UsageError(
            f"Block size {block} does not go with precision '{precision}': int8 and int4 take "
            f"{', '.join(map(str, VALID_BLOCKS))}."
        )


def fused_matrices(weights: Weights, names: list[str], precision: str, block: int | None) -> Iterator[Matrix]:
    """The matrices whose outputs, concatenated, are the projections `names` of one input, as few as possible.

    `source` fuses neighbours of equal block type; the other precisions fuse everything into one.
    """
    if precision == "source":
        parts = [(weights.blocks(name), name) for name in names]
        for kind, group in groupby(parts, key=lambda part: _block_kind(part[0])):
            members = list(group)
            if kind is None:
                yield FloatMatrix(_concatenate([weights.tensor(name) for _, name in members]))
            else:
                yield fuse_blocks([blocks for blocks, _ in members if blocks is not None])
        return
    yield quantize_matrix(_concatenate([weights.tensor(name) for name in names]), precision, block)


def quantize_matrix(weight: NDArray[np.float32], precision: str, block: int | None) -> Matrix:
    """`weight` f32 [N, K] in `precision`; a K that no block size divides stays in fp32."""
    if precision in FLOAT_PRECISIONS:
        return FloatMatrix(weight)  # the data file rounds it
    columns = weight.shape[1]
    block = block or DEFAULT_BLOCKS[precision]
    while columns % block and block > VALID_BLOCKS[0]:
        block //= 2
    if columns % block:
        return FloatMatrix(weight)
    return quantize_8bit(weight, block) if precision == "int8" else quantize_4bit(weight, block)


def quantize_8bit(weight: NDArray[np.float32], block: int) -> BlockMatrix:
    """Symmetric round to nearest, 8 bits, by ONNX Runtime's own quantiser."""
    from onnxruntime.capi import _pybind_state

    native: Any = _pybind_state  # compiled, without type information
    rows, columns = weight.shape
    blocks = columns // block
    packed = np.zeros((rows, blocks, block), np.uint8)
    scales = np.zeros(rows * blocks, np.float32)
    zeros = np.zeros(rows * blocks, np.uint8)
    native.quantize_matmul_8bits(packed, np.ascontiguousarray(weight.T), scales, zeros, block, rows, columns, True)
    return BlockMatrix("int8", 8, block, packed, scales.reshape(rows, blocks))


def quantize_4bit(weight: NDArray[np.float32], block: int) -> BlockMatrix:
    """Sixteen even levels from the least to the greatest value of a block, then scale and offset by least squares.

    A float offset, where ONNX Runtime's own quantisers round to an integer zero point, costs a sixth of the speed (a
    twelfth once `round_offsets` made it 8 bits) and keeps what a source was rounded to before (Q4_1, Q4_K) instead of
    rounding it again.
    """
    rows, columns = weight.shape
    shape = (rows, columns // block)
    packed = np.empty((*shape, block // 2), np.uint8)
    scales, offsets = np.empty(shape, np.float32), np.empty(shape, np.float32)
    step = max(1, _FITTED_AT_ONCE // columns)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        values = weight[piece].reshape(-1, shape[1], block)
        least = values.min(axis=-1, keepdims=True)
        span = values.max(axis=-1, keepdims=True) - least
        codes = np.rint((values - least) * (np.float32(15) / np.where(span > 0, span, np.float32(1))))
        packed[piece] = pack_codes(codes.astype(np.uint8).reshape(-1, columns), 4, block)
        scales[piece], offsets[piece] = _fit(codes - np.float32(8), values)
    return BlockMatrix("int4", 4, block, packed, scales, offsets)


def round_offsets(matrix: Matrix) -> Matrix:
    """The matrix with its offsets in blocks of 8 bits, where it has some: a third of the memory that floats are."""
    if isinstance(matrix, FloatMatrix) or matrix.offsets is None:
        return matrix
    blocks = matrix.offsets.shape[1]
    rounded = quantize_8bit(np.pad(matrix.offsets, ((0, 0), (0, -blocks % OFFSETS_BLOCK))), OFFSETS_BLOCK)
    return replace(matrix, offsets=dequantize_matrix(rounded)[:, :blocks], offset_blocks=rounded)


def _fit(codes: NDArray[np.float32], values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(scales, offsets) f32 [N, blocks] with the least sum over (scale * code + offset - value) ** 2 of each block.

    `codes` and `values` are [N, blocks, block].
    """
    mean = codes.mean(axis=-1)
    deviation = codes - mean[:, :, None]
    spread = np.square(deviation).sum(axis=-1)
    # Without spread the block is one value, and the offset alone holds it.
    scales = np.where(
        spread > 0, (deviation * values).sum(axis=-1) / np.maximum(spread, np.float32(0.5)), np.float32(0)
    )
    return scales, values.mean(axis=-1) - scales * mean


def dequantize_matrix(matrix: Matrix, ids: NDArray[np.integer[Any]] | slice = slice(None)) -> NDArray[np.float32]:
    """The rows `ids` of a matrix as f32."""
    if isinstance(matrix, FloatMatrix):
        return np.asarray(matrix.weight[ids], np.float32)
    packed = matrix.packed[ids]
    if matrix.bits == 4:
        packed = np.stack([packed & 0x0F, packed >> np.uint8(4)], axis=-1).reshape(*packed.shape[:2], matrix.block)
    codes = packed.astype(np.float32) - np.float32(1 << (matrix.bits - 1))
    values = codes * matrix.scales[ids][:, :, None]
    if matrix.offsets is not None:
        values += matrix.offsets[ids][:, :, None]
    return values.reshape(values.shape[0], matrix.columns)


def fuse_blocks(parts: list[Blocks]) -> BlockMatrix:
    """Blocks of one kind, stacked along N, in MatMulNBits storage: the weights exactly as the file has them."""
    first = parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return BlockMatrix(
        "+".join(sorted({part.type_name for part in parts})),
        first.bits,
        first.block,
        np.concatenate([pack_codes(part.codes, part.bits, part.block) for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(offsets) if offsets else None,
    )


def pack_codes(codes: NDArray[np.uint8], bits: int, block: int) -> NDArray[np.uint8]:
    """u8 [N, K], a code a byte -> u8 [N, K // block, block * bits // 8]."""
    rows, columns = codes.shape
    packed = codes if bits == 8 else pack_nibbles(codes)
    return packed.reshape(rows, columns // block, block * bits // 8)


def pack_nibbles(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """u8 [N, even K] of values under 16 -> u8 [N, K // 2], even columns in the low half."""
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def _block_kind(blocks: Blocks | None) -> tuple[int, int, bool] | None:
    return None if blocks is None else (blocks.bits, blocks.block, blocks.offsets is not None)


def _concatenate(arrays: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
