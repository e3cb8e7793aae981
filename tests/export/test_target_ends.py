"""What speculators share with a target, read out of bundles of every precision, tied or not."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specrun.export.quantize import BlockMatrix, FloatMatrix, Matrix
from specrun.export.target_ends import (
    TargetEnds,
    dequantize_matrix,
    read_target_ends,
    read_target_layer,
    rows_8bit,
)
from specrun.export.weights import Weights, open_weights
from specrun.models_cache import GraphSpec, find_bundle
from specrun.models_cache.errors import IntegrityError

from .graph_runner import write_graphs
from .tiny_models import gguf_from_folder


def graphs_of(weights: Weights, folder: Path, precision: str) -> Any:
    """Graphs without the rest of a bundle."""
    write_graphs(weights, folder, precision)
    graphs = {"target": GraphSpec("target.onnx", ("target.onnx.data",), (), None, (), ())}
    return SimpleNamespace(path=folder, manifest=SimpleNamespace(graphs=graphs, sizes=weights.config))


def ends_of(weights: Weights, folder: Path, precision: str) -> TargetEnds:
    """The ends of these."""
    return read_target_ends(graphs_of(weights, folder, precision))


def both(ends: TargetEnds, weights: Weights) -> list[tuple[Matrix, np.ndarray]]:
    """(found, expected) of embedding and head."""
    embedding = weights.tensor("model.embed_tokens.weight")
    head = embedding if weights.config.tied_head else weights.tensor("lm_head.weight")
    return [(ends.embedding, embedding), (ends.head, head)]


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_ends_are_those_of_the_weights(
    variant: str, precision: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = open_weights(tiny_folder(variant))
    ends = ends_of(weights, tmp_path / "graphs", precision)
    for matrix, expected in both(ends, weights):
        assert isinstance(matrix, FloatMatrix if precision == "fp32" else BlockMatrix)
        np.testing.assert_allclose(dequantize_matrix(matrix), expected, atol=0 if precision == "fp32" else 0.01)
    np.testing.assert_array_equal(ends.final_norm, weights.tensor("model.norm.weight"))
    assert ends.norm_epsilon == pytest.approx(weights.config.norm_epsilon, rel=1e-6)
    assert ends.rope_theta == pytest.approx(weights.config.rope.theta, rel=1e-3)


def test_a_data_file_with_several_names(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """As tools make them that store equal files once."""
    weights = open_weights(tiny_folder("llama"))
    bundle = graphs_of(weights, tmp_path / "graphs", "int8")
    os.link(tmp_path / "graphs" / "target.onnx.data", tmp_path / "other")
    embedding = dequantize_matrix(read_target_ends(bundle).embedding)
    np.testing.assert_allclose(embedding, weights.tensor("model.embed_tokens.weight"), atol=0.01)


def test_rotary_base_under_a_scaling(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """One that divides all frequencies leaves the base as it is."""
    folder = tmp_path / "scaled"
    shutil.copytree(tiny_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (folder / "config.json").write_text(json.dumps(config))
    assert ends_of(open_weights(folder), tmp_path / "graphs", "fp32").rope_theta == pytest.approx(5e4, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_layers(precision: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    weights = open_weights(tiny_folder("llama"))
    bundle = graphs_of(weights, tmp_path / "graphs", precision)
    layer = read_target_layer(bundle, 1)
    near = {"atol": 0 if precision == "fp32" else 0.01}
    for name, parts in {
        "input_norm": ["input_layernorm"],
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "output": ["self_attn.o_proj"],
        "mlp_norm": ["post_attention_layernorm"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }.items():
        expected = np.concatenate([weights.tensor(f"model.layers.1.{part}.weight") for part in parts])
        np.testing.assert_allclose(getattr(layer, name), expected, **near)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("llama-tied", kind) for kind in ("Q4_1", "Q4_0", "Q8_0", "Q5_1")]
    + [("llama-wide", kind) for kind in ("Q4_1", "Q8_0", "Q6_K", "Q4_K")],
)
def test_blocks_of_a_gguf_file(variant: str, kind: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    weights = open_weights(gguf_from_folder(tiny_folder(variant), tmp_path / "model.gguf", lambda name: kind))
    for matrix, expected in both(ends_of(weights, tmp_path / "graphs", "source"), weights):
        assert isinstance(matrix, BlockMatrix)
        np.testing.assert_allclose(dequantize_matrix(matrix), expected, atol=1e-6)
        ids = np.array([0, 7, 8, 100])
        np.testing.assert_allclose(dequantize_matrix(rows_8bit(matrix, ids)), expected[ids], atol=0.01)
        np.testing.assert_allclose(dequantize_matrix(rows_8bit(matrix)), expected, atol=0.01)


def test_8_bit_rows_are_copied() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (9, 2, 16), dtype=np.uint8)
    scales = rng.random((9, 2)).astype(np.float32)
    cut = rows_8bit(BlockMatrix("int8", 8, 16, packed, scales), np.array([1, 5]))
    assert isinstance(cut, BlockMatrix)
    assert cut.block == 16
    np.testing.assert_array_equal(cut.packed, packed[[1, 5]])
    np.testing.assert_array_equal(cut.scales, scales[[1, 5]])
    # Rows that no block size divides stay as they are.
    odd = FloatMatrix(rng.random((5, 12)).astype(np.float32))
    kept = rows_8bit(odd, np.array([2]))
    assert isinstance(kept, FloatMatrix)
    np.testing.assert_array_equal(kept.weight, odd.weight[[2]])


def test_a_graph_that_specrun_did_not_make(tiny: str) -> None:
    bundle = find_bundle(tiny)
    wrong = dataclasses.replace(bundle.manifest.sizes, vocabulary=299)
    with pytest.raises(IntegrityError, match="sizes of its manifest"):
        read_target_ends(dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, sizes=wrong)))
    path = bundle.path / "target.onnx"
    model = ir.load(path)
    for tensor in model.graph.initializers.values():
        if isinstance(tensor.const_value, ir.ExternalTensor):
            old = tensor.const_value
            tensor.const_value = ir.ExternalTensor(
                "../../outside", old.offset, old.length, old.dtype, shape=old.shape, name=old.name, base_dir=path.parent
            )
    ir.save(model, path)
    with pytest.raises(IntegrityError, match="no target graph that specrun exported"):
        read_target_ends(bundle)
    path.write_bytes(b"not a graph")
    with pytest.raises(IntegrityError, match="is no ONNX graph"):
        read_target_ends(bundle)
