"""Storage of matrices: what a graph multiplies by is what the quantiser, or the GGUF file, says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specrun.export.gguf_blocks import BLOCK_TYPES
from specrun.export.graph_builder import GraphBuilder
from specrun.export.quantize import (
    VALID_BLOCKS,
    BlockMatrix,
    FloatMatrix,
    Matrix,
    check_precision,
    fused_matrices,
    pack_codes,
    pack_nibbles,
    quantize_matrix,
    round_offsets,
)
from specrun.export.weight_file import WeightFile
from specrun.export.weight_store import StoredLinear, store_matrix
from specrun.export.weights import open_weights
from specrun.models_cache.errors import UsageError

from .graph_runner import open_session
from .tiny_models import VOCABULARY, gguf_from_folder


def values(matrix: Matrix) -> np.ndarray:
    """What a matrix stands for, f32 [N, K], read from its documented layout."""
    if isinstance(matrix, FloatMatrix):
        return matrix.weight
    flat = matrix.packed.reshape(matrix.rows, -1)
    codes = flat if matrix.bits == 8 else np.stack([flat & 15, flat >> 4], axis=-1).reshape(matrix.rows, -1)
    blocks = codes.reshape(matrix.rows, -1, matrix.block) - 2.0 ** (matrix.bits - 1)
    result = blocks * matrix.scales[:, :, None]
    if matrix.offsets is not None:
        result += matrix.offsets[:, :, None]
    return result.reshape(matrix.rows, -1).astype(np.float32)


def run_linear(matrices: list[Matrix], x: np.ndarray, folder: Path, bias: np.ndarray | None = None) -> np.ndarray:
    """x [positions, K] through the nodes that a graph has for one linear layer."""
    folder.mkdir()
    with WeightFile(folder / "data") as file:
        stored = StoredLinear(
            tuple(store_matrix(file, f"m{index}", matrix) for index, matrix in enumerate(matrices)),
            None if bias is None else file.add("bias", bias),
        )
        b = GraphBuilder(file)
        shape = ir.Shape(["batch", "positions", x.shape[-1]])
        value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        y = b.linear(value, stored)
        y.name = "y"
        ir.save(b.finish([value], [y], "linear"), folder / "linear.onnx")
    (result,) = open_session(folder / "linear.onnx").run(["y"], {"x": x[None].astype(np.float32)})
    return np.asarray(result)[0]


def run_embedding(matrix: Matrix, ids: np.ndarray, folder: Path) -> np.ndarray:
    folder.mkdir()
    with WeightFile(folder / "data") as file:
        stored = store_matrix(file, "embedding", matrix)
        b = GraphBuilder(file)
        value = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["batch", "positions"]))
        y = b.embed(value, stored)
        y.name = "y"
        ir.save(b.finish([value], [y], "embedding"), folder / "embedding.onnx")
    (result,) = open_session(folder / "embedding.onnx").run(["y"], {"ids": ids})
    return np.asarray(result)


def is_column_by_column(found: np.ndarray, weight: np.ndarray) -> None:
    """`found` = identity @ weight.T: int8 activations hold a one among zeros exactly, so only rounding is left."""
    np.testing.assert_allclose(found, weight.T, rtol=1e-5, atol=2e-6 * np.abs(weight).max())


def random_matrix(rows: int, columns: int) -> np.ndarray:
    """Blocks of different spread and mean, an all-zero and a constant one."""
    rng = np.random.default_rng(rows * columns)
    weight = rng.standard_normal((rows, columns // 16, 16)) * rng.uniform(0.01, 1, (rows, columns // 16, 1))
    weight += rng.standard_normal((rows, columns // 16, 1)) * 0.1
    weight[0, 0], weight[1, 0], weight[2, 0] = 0, 0.25, -0.25
    return weight.reshape(rows, -1).astype(np.float32)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "F32", *sorted(BLOCK_TYPES)])
def test_source_matrices_are_the_dequantised_ones(
    type_name: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = open_weights(gguf_from_folder(tiny_folder("llama-wide"), tmp_path / "wide.gguf", lambda name: type_name))
    for index, (prefix, parts) in enumerate(
        [("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")), ("mlp", ("down_proj",))]
    ):
        names = [f"model.layers.1.{prefix}.{part}.weight" for part in parts]
        matrices = list(fused_matrices(weights, names, "source", None))
        assert len(matrices) == 1
        expected = np.concatenate([weights.tensor(name) for name in names])
        is_column_by_column(run_linear(matrices, np.eye(256), tmp_path / str(index)), expected)
    (embedding,) = fused_matrices(weights, ["model.embed_tokens.weight"], "source", None)
    ids = np.arange(VOCABULARY)[::-1].reshape(2, -1).copy()
    found = run_embedding(embedding, ids, tmp_path / "embedding")
    rows = weights.tensor("model.embed_tokens.weight")[ids]
    if isinstance(embedding, BlockMatrix) and embedding.offsets is not None:  # two terms: the last bit may differ
        np.testing.assert_allclose(found, rows, rtol=1e-6, atol=1e-6 * np.abs(rows).max())
    else:
        np.testing.assert_array_equal(found, rows)


MIXES = {
    "types of one kind": (("Q4_1", "Q4_K", "Q4_1"), 1),
    "offsets beside none": (("Q4_K", "Q4_K", "Q6_K"), 2),
    "all different": (("Q4_0", "Q5_1", "Q6_K"), 3),
    "floats between": (("Q8_0", "F16", "Q8_0"), 3),
    "floats of two types": (("BF16", "F32", "Q5_K"), 2),
    "two with offsets": (("Q4_1", "Q5_1", "Q5_0"), 3),
}


@pytest.mark.parametrize("mix", MIXES)
def test_mixed_types_of_one_input(mix: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    types, count = MIXES[mix]
    of_part = dict(zip(("attn_q", "attn_k", "attn_v"), types, strict=True))
    path = gguf_from_folder(
        tiny_folder("llama-wide"), tmp_path / "wide.gguf", lambda name: of_part.get(name.split(".")[-2], "F32")
    )
    weights = open_weights(path)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    matrices = list(fused_matrices(weights, names, "source", None))
    assert len(matrices) == count
    expected = np.concatenate([weights.tensor(name) for name in names])
    bias = np.arange(len(expected), dtype=np.float32)
    found = run_linear(matrices, np.eye(256), tmp_path / "linear", bias)
    np.testing.assert_allclose(found - bias, expected.T, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("columns", [256, 768])  # 768 = 3 blocks of 256: an odd number
@pytest.mark.parametrize("block", VALID_BLOCKS)
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_block_sizes(precision: str, block: int, columns: int, tmp_path: Path) -> None:
    weight = random_matrix(12, columns)
    matrix = quantize_matrix(weight, precision, block)
    assert isinstance(matrix, BlockMatrix)
    assert (matrix.type_name, matrix.block, matrix.rows, matrix.columns) == (precision, block, 12, columns)
    is_column_by_column(run_linear([matrix], np.eye(columns), tmp_path / "linear"), values(matrix))


@pytest.mark.parametrize("block", VALID_BLOCKS)
def test_embedding_of_int8_blocks(block: int, tmp_path: Path) -> None:
    matrix = quantize_matrix(random_matrix(24, 768), "int8", block)
    ids = np.array([[0, 5, 23], [23, 1, 2]])
    np.testing.assert_array_equal(run_embedding(matrix, ids, tmp_path / "embedding"), values(matrix)[ids])


@pytest.mark.parametrize(("columns", "block", "stored"), [(80, 16, 16), (96, 32, 32), (96, 256, 32), (48, None, 16)])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_blocks_shrink_until_they_divide_the_columns(
    precision: str, columns: int, block: int | None, stored: int, tmp_path: Path
) -> None:
    matrix = quantize_matrix(random_matrix(10, columns), precision, block)
    assert isinstance(matrix, BlockMatrix)
    assert matrix.block == stored
    is_column_by_column(run_linear([matrix], np.eye(columns), tmp_path / "linear"), values(matrix))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_columns_that_no_block_divides_stay_floats(precision: str) -> None:
    weight = random_matrix(10, 80)[:, :72]
    matrix = quantize_matrix(weight, precision, None)
    assert isinstance(matrix, FloatMatrix)
    np.testing.assert_array_equal(matrix.weight, weight)
    assert matrix.type_name == "fp32"


def test_eight_bits_round_to_nearest() -> None:
    weight = random_matrix(12, 256)
    matrix = quantize_matrix(weight, "int8", 32)
    assert isinstance(matrix, BlockMatrix)
    # The grid reaches from -128 to 127 steps, so the far end may be one step off.
    steps = np.repeat(np.abs(matrix.scales), 32, axis=1)
    error = np.abs(values(matrix) - weight)
    assert np.mean(error <= 0.501 * steps) > 0.9
    assert (error <= 1.001 * steps).all()


@pytest.mark.parametrize("block", [16, 32, 256])
def test_four_bits_are_a_least_squares_fit_of_rounded_codes(block: int) -> None:
    weight = random_matrix(12, 768)
    matrix = quantize_matrix(weight, "int4", block)
    assert isinstance(matrix, BlockMatrix)
    assert matrix.offsets is not None
    error = (values(matrix) - weight).reshape(12, -1, block)
    steps = np.abs(matrix.scales)[:, :, None]
    # As good as the grid from the least to the greatest value, at least.
    spans = np.ptp(weight.reshape(error.shape), axis=-1, keepdims=True)
    assert (steps <= 1.1 * spans / 15 + 1e-6).all()
    assert (np.square(error).mean(axis=-1, keepdims=True) <= np.square(spans / 15) / 8 + 1e-9).mean() > 0.9
    # Nothing is left that a better offset or scale would take away.
    centred = weight.reshape(error.shape) - weight.reshape(error.shape).mean(axis=-1, keepdims=True)
    np.testing.assert_allclose(error.mean(axis=-1), 0, atol=1e-6)
    fitted = values(matrix).reshape(error.shape) - values(matrix).reshape(error.shape).mean(axis=-1, keepdims=True)
    np.testing.assert_allclose((error * fitted).mean(axis=-1), 0, atol=1e-5 * float(np.square(centred).max()))
    if block == 16:  # blocks of one value
        np.testing.assert_allclose(values(matrix)[[0, 1, 2], :16], weight[[0, 1, 2], :16], rtol=1e-6)


@pytest.mark.parametrize(("columns", "block"), [(768, 32), (768, 16), (96, 32), (256, 256)])
def test_offsets_of_eight_bits(columns: int, block: int, tmp_path: Path) -> None:
    weight = random_matrix(12, columns)
    matrix = quantize_matrix(weight, "int4", block)
    rounded = round_offsets(matrix)
    assert isinstance(matrix, BlockMatrix)
    assert isinstance(rounded, BlockMatrix)
    assert matrix.offsets is not None
    assert rounded.offsets is not None
    assert rounded.offset_blocks is not None
    assert rounded.offset_blocks.bits == 8
    np.testing.assert_array_equal(rounded.offsets, values(rounded.offset_blocks)[:, : columns // block])
    most = np.abs(matrix.offsets).max(axis=1, keepdims=True)
    assert (np.abs(rounded.offsets - matrix.offsets) <= most / 127).all()
    is_column_by_column(run_linear([rounded], np.eye(columns), tmp_path / "linear"), values(rounded))
    x = np.random.default_rng(3).standard_normal((5, columns))
    found, exact = run_linear([rounded], x, tmp_path / "rows"), x @ values(rounded).T.astype(np.float64)
    assert np.linalg.norm(found - exact) < 0.02 * np.linalg.norm(exact)


def test_only_fitted_offsets_are_rounded() -> None:
    for matrix in (FloatMatrix(random_matrix(4, 32)), quantize_matrix(random_matrix(4, 32), "int8", 32)):
        assert round_offsets(matrix) is matrix


@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_four_bits_keep_a_grid_of_sixteen_levels(scale: float) -> None:
    # What a source was rounded to before (Q4_1, Q4_K) is not rounded again.
    rng = np.random.default_rng(5)
    codes = rng.integers(0, 16, (8, 4, 32))
    codes[:, :, 0], codes[:, :, 1] = 0, 15
    grid = (codes - rng.uniform(-5, 20, (8, 4, 1))) * rng.uniform(0.5, 1, (8, 4, 1)) * scale
    weight = grid.reshape(8, 128).astype(np.float32)
    found = values(quantize_matrix(weight, "int4", 32))
    np.testing.assert_allclose(found, weight, rtol=0, atol=2e-6 * np.abs(weight).max())


def test_packing() -> None:
    codes = np.arange(64, dtype=np.uint8).reshape(2, 32) % 16
    packed = pack_codes(codes, 4, 16)
    assert packed.shape == (2, 2, 8)
    assert packed[0, 0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    np.testing.assert_array_equal(pack_codes(codes, 8, 16), codes.reshape(2, 2, 16))
    assert pack_nibbles(np.array([[3, 9]], np.uint8)).tolist() == [[0x93]]


@pytest.mark.parametrize(("precision", "block"), [("fp64", None), ("fp16", None), ("", None), ("INT8", None)])
def test_unknown_precisions_are_refused(precision: str, block: int | None) -> None:
    with pytest.raises(UsageError, match="choose one of int8, int4, fp32, source"):
        check_precision(precision, block)


@pytest.mark.parametrize(
    ("precision", "block"), [("int8", 0), ("int8", 33), ("int4", 8), ("int4", 512), ("fp32", 32), ("source", 32)]
)
def test_blocks_that_do_not_fit_the_precision_are_refused(precision: str, block: int) -> None:
    with pytest.raises(UsageError, match=f"Block size {block} does not go with precision '{precision}'"):
        check_precision(precision, block)


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "source"])
def test_known_precisions(precision: str) -> None:
    check_precision(precision, None)
