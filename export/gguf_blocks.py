"""The exact quantised form of GGUF tensors, in the terms that MatMulNBits computes in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix: w[n, k] = scales[n, k // block] * (codes[n, k] - 2**(bits - 1)) + offsets[n, k // block].

    `codes` uint8 [N, K], one a byte; `scales` float32 [N, K / block]; `offsets` likewise, None where zero by
    construction. `bits` (4 or 8) is the MatMulNBits storage that holds the codes exactly; `type_name` is the GGUF type.
    """

    type_name: str
    bits: int
    block: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None


def decode_blocks(type_name: str, rows: NDArray[np.uint8]) -> Blocks:
    """Take the raw rows of a quantised GGUF matrix apart.

    `rows` is uint8 [N, bytes per row]. Raises KeyError for a type that is not in `BLOCK_TYPES`.
    The layouts are those of ggml-quants.c; fields are little-endian.
    """
    block_type = BLOCK_TYPES[type_name]
    raw = rows.reshape(rows.shape[0], -1, block_type.size)
    codes, scales, offsets = block_type.decode(raw)
    count = rows.shape[0]
    return Blocks(
        type_name,
        block_type.bits,
        block_type.block,
        codes.reshape(count, -1),
        scales.reshape(count, -1),
        None if offsets is None else offsets.reshape(count, -1),
    )


_Decoded = tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32] | None]


def _half(raw: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
    """The float16 at byte `start` of each block, as float32 [N, blocks, 1]."""
    return np.ascontiguousarray(raw[:, :, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: NDArray[np.uint8], run: int) -> NDArray[np.uint8]:
    """Runs of `run` bytes become the `run` low halves, then the `run` high halves: [N, blocks, 2 * bytes]."""
    shape = packed.shape
    split = packed.reshape(*shape[:2], -1, run)
    codes = np.empty((*split.shape[:3], 2, run), np.uint8)
    np.bitwise_and(split, 0x0F, out=codes[..., 0, :])
    np.right_shift(split, 4, out=codes[..., 1, :])
    return codes.reshape(*shape[:2], -1)


def _fifth_bits(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bit j of a 32-bit field belongs to code j: [N, blocks, 32], worth 16 each."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _scales_and_minima(raw: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The eight 6-bit scales and minima of a K block, in 12 bytes, times d and -dmin: each float32 [N, blocks, 8]."""
    low, middle, high = raw[:, :, 4:8], raw[:, :, 8:12], raw[:, :, 12:16]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    minima = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=-1)
    return _half(raw, 0) * scales.astype(np.float32), -_half(raw, 2) * minima.astype(np.float32)


def _q4_0(raw: NDArray[np.uint8]) -> _Decoded:
    return _nibbles(raw[:, :, 2:], 16), _half(raw, 0), None


def _q4_1(raw: NDArray[np.uint8]) -> _Decoded:
    scale = _half(raw, 0)
    return _nibbles(raw[:, :, 4:], 16), scale, np.float32(8) * scale + _half(raw, 2)


def _q5_0(raw: NDArray[np.uint8]) -> _Decoded:
    codes = _nibbles(raw[:, :, 6:], 16) | _fifth_bits(raw[:, :, 2:6])
    return codes + np.uint8(128 - 16), _half(raw, 0), None


def _q5_1(raw: NDArray[np.uint8]) -> _Decoded:
    codes = _nibbles(raw[:, :, 8:], 16) | _fifth_bits(raw[:, :, 4:8])
    scale = _half(raw, 0)
    # Centred on 16, not 128: the codes and the offset would cancel, and int8 activations magnify what is left.
    return codes + np.uint8(128 - 16), scale, np.float32(16) * scale + _half(raw, 2)


def _q8_0(raw: NDArray[np.uint8]) -> _Decoded:
    return raw[:, :, 2:] ^ np.uint8(0x80), _half(raw, 0), None  # int8 + 128


def _q4_k(raw: NDArray[np.uint8]) -> _Decoded:
    scales, minima = _scales_and_minima(raw)
    return _nibbles(raw[:, :, 16:], 32), scales, np.float32(8) * scales + minima


def _q5_k(raw: NDArray[np.uint8]) -> _Decoded:
    scales, minima = _scales_and_minima(raw)
    codes = _nibbles(raw[:, :, 48:], 32).reshape(*raw.shape[:2], 8, 32)
    high = raw[:, :, 16:48]
    for part in range(8):  # bit `part` of each byte belongs to the sub-block `part`
        codes[:, :, part] |= ((high >> np.uint8(part)) & np.uint8(1)) << np.uint8(4)
    codes += np.uint8(128 - 16)
    return codes, scales, np.float32(16) * scales + minima


def _q6_k(raw: NDArray[np.uint8]) -> _Decoded:
    codes = _nibbles(raw[:, :, :128], 64).reshape(*raw.shape[:2], 2, 4, 32)
    high = raw[:, :, 128:192].reshape(*raw.shape[:2], 2, 32)
    for part in range(4):
        codes[:, :, :, part] |= ((high >> np.uint8(2 * part)) & np.uint8(3)) << np.uint8(4)
    codes += np.uint8(128 - 32)
    scales = np.ascontiguousarray(raw[:, :, 192:208]).view(np.int8).astype(np.float32)
    return codes, _half(raw, 208) * scales, None


@dataclass(frozen=True, slots=True)
class _BlockType:
    size: int  # bytes of one block of the file
    bits: int
    block: int
    decode: Callable[[NDArray[np.uint8]], _Decoded]


BLOCK_TYPES: dict[str, _BlockType] = {
    "Q4_0": _BlockType(18, 4, 32, _q4_0),
    "Q4_1": _BlockType(20, 4, 32, _q4_1),
    "Q5_0": _BlockType(22, 8, 32, _q5_0),
    "Q5_1": _BlockType(24, 8, 32, _q5_1),
    "Q8_0": _BlockType(34, 8, 32, _q8_0),
    "Q4_K": _BlockType(144, 4, 32, _q4_k),
    "Q5_K": _BlockType(176, 8, 32, _q5_k),
    "Q6_K": _BlockType(210, 8, 16, _q6_k),
}
