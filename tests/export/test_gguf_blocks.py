from __future__ import annotations

import gguf
import numpy as np
import pytest

from specrun.export.gguf_blocks import BLOCK_TYPES, Blocks, decode_blocks

from .tiny_models import random_rows

HAS_OFFSETS = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}


def weights_of(blocks: Blocks) -> np.ndarray:
    """The formula of `Blocks`, in float64."""
    count, columns = blocks.codes.shape
    centred = blocks.codes.astype(np.float64).reshape(count, -1, blocks.block) - 2 ** (blocks.bits - 1)
    values = centred * blocks.scales.astype(np.float64)[:, :, None]
    if blocks.offsets is not None:
        values += blocks.offsets.astype(np.float64)[:, :, None]
    return values.reshape(count, columns)


@pytest.mark.parametrize("type_name", sorted(BLOCK_TYPES))
def test_formula_gives_the_weights_of_the_file(type_name: str) -> None:
    raw = random_rows(type_name, 24, 512, np.random.default_rng(3))
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    blocks = decode_blocks(type_name, raw)
    found = weights_of(blocks)
    if type_name in HAS_OFFSETS:
        # The offset is rounded to float32 once, and so is the sum that gguf forms; both scale with the largest term.
        assert blocks.offsets is not None
        size = np.repeat(np.abs(blocks.offsets) + 2.0**blocks.bits * np.abs(blocks.scales), blocks.block, axis=1)
        assert (np.abs(found - expected) <= 2.0**-23 * size).all()
    else:
        assert blocks.offsets is None
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("type_name", sorted(BLOCK_TYPES))
def test_shapes_dtypes_and_storage(type_name: str) -> None:
    blocks = decode_blocks(type_name, random_rows(type_name, 6, 512, np.random.default_rng(4)))
    bits, block = BLOCK_TYPES[type_name].bits, BLOCK_TYPES[type_name].block
    assert (blocks.type_name, blocks.bits, blocks.block) == (type_name, bits, block)
    assert (blocks.codes.shape, blocks.codes.dtype) == ((6, 512), np.uint8)
    assert (blocks.scales.shape, blocks.scales.dtype) == ((6, 512 // block), np.float32)
    assert int(blocks.codes.max()) < 2**bits
    assert (blocks.offsets is not None) == (type_name in HAS_OFFSETS)
    if blocks.offsets is not None:
        assert (blocks.offsets.shape, blocks.offsets.dtype) == (blocks.scales.shape, np.float32)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_values_come_back(type_name: str) -> None:
    values = np.random.default_rng(5).standard_normal((8, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
    found = weights_of(decode_blocks(type_name, raw))
    steps = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127}[type_name]
    assert np.abs(found - values).max() < 1.05 * np.abs(values).max() * 2 / steps


@pytest.mark.parametrize("type_name", ["Q5_1", "Q5_K"])
def test_five_bit_offsets_are_centred_on_sixteen(type_name: str) -> None:
    # Around 128 the two terms would cancel, and int8 activations would magnify the rest (.09 instead of .009).
    blocks = decode_blocks(type_name, random_rows(type_name, 4, 512, np.random.default_rng(6)))
    assert int(blocks.codes.min()) == 128 - 16
    assert int(blocks.codes.max()) == 128 + 15


def test_unknown_type() -> None:
    with pytest.raises(KeyError):
        decode_blocks("IQ2_XS", np.zeros((1, 74), np.uint8))
