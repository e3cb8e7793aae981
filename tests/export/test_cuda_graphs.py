"""Bundles for the CUDA provider: what their graphs are, and that they compute what the fp32 graph computes.

The CPU provider runs the graphs of fp16 too, so the numbers are checked without a GPU. It has no attention of bf16:
there the structure is checked, and that each operator is one the CUDA provider has kernels of that type for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from specrun.export.bundle import export_bundle
from specrun.export.speculators import attach_speculator
from specrun.export.target_ends import read_target_ends, read_target_layer
from specrun.models_cache.errors import UnsupportedModelError, UsageError
from specrun.models_cache.integrity import verify_bundle
from specrun.models_cache.layout import Bundle, models_dir
from specrun.runtime.backend import build_features

from ..conftest import Run, write_tiny_source
from .tiny_speculators import tiny_speculator, tiny_target

PRECISIONS = ("fp16", "bf16", "int8", "int4")
VARIANTS = {"target": (True, False), "target_batch1": (False, False), "target_tree": (False, True)}  # ragged, trees
# Operators of com.microsoft and ai.onnx that the CUDA provider of onnxruntime-gpu 1.31.1 has kernels of both types for
# (read from that library), and so all that a graph for it may hold.
KERNELS = {
    "GroupQueryAttention", "MatMulNBits", "GatherBlockQuantized", "SkipSimplifiedLayerNormalization", "QuickGelu",
    "FusedMatMul", "RMSNormalization", "Gather", "GatherND", "Split", "Concat", "Cast", "Add", "Mul", "MatMul",
    "Reshape", "Unsqueeze", "Transpose", "ReduceSum",
}  # fmt: skip


@pytest.fixture(params=PRECISIONS)
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Bundle:
    return export_bundle(str(write_tiny_source(tmp_path / "tiny")), precision=request.param, device="cuda")


def load(bundle: Bundle, graph: str) -> ir.Graph:
    return ir.load(bundle.path / bundle.manifest.graphs[graph].file).graph


def test_the_variants_share_one_weights_file(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert {name: (graph.max_batch is None) for name, graph in manifest.graphs.items()} == {
        name: ragged for name, (ragged, _) in VARIANTS.items()
    }
    assert {graph.data for graph in manifest.graphs.values()} == {("target.onnx.data",)}
    assert manifest.graphs["target"].requires == ("query_seqlens",)
    assert manifest.graphs["target_batch1"].requires == ()
    assert verify_bundle(bundle) == []


@pytest.mark.parametrize("graph", VARIANTS)
def test_graphs_pass_the_checker(bundle: Bundle, graph: str) -> None:
    # The operators of onnxruntime have no schema in onnx: names, types of the others and structure are checked.
    onnx.checker.check_model(str(bundle.path / bundle.manifest.graphs[graph].file))


@pytest.mark.parametrize("graph", VARIANTS)
def test_what_a_graph_holds(bundle: Bundle, graph: str) -> None:
    ragged, trees = VARIANTS[graph]
    floats = bundle.manifest.kv.dtype
    found = load(bundle, graph)
    assert {node.op_type for node in found} <= KERNELS
    for node in found:
        if node.op_type == "GroupQueryAttention":
            inputs = [value.name if value is not None else None for value in node.inputs]
            assert ("query_lengths" in inputs) == ragged
            assert (len(inputs) > 10 and inputs[10] == "attention_bias") == trees
            assert (len(inputs) > 9 and inputs[9] == "position_ids") == trees
    types = {spec.name: spec.dtype for spec in bundle.manifest.graphs[graph].inputs}
    assert {types[name] for name in types if name.startswith("past_")} == {floats}
    assert types.get("attention_bias") == (floats if trees else None)
    assert "pad_rows" not in types
    outputs = {spec.name: spec.dtype for spec in bundle.manifest.graphs[graph].outputs}
    assert (outputs["logits"], outputs["features"]) == ("float32", "float32")
    numbers = {value.const_value.dtype.name for value in found.initializers.values() if value.const_value is not None}
    assert numbers <= {"FLOAT16" if floats == "float16" else "BFLOAT16", "UINT8", "INT64"}


@pytest.mark.parametrize("method", ["target", "medusa-joined", "joined", "draft"])
def test_an_embedding_in_blocks_says_where_zero_is(tmp_path: Path, method: str) -> None:
    """Without zero points some kernels of that provider take 8-bit codes as if their zero were 0 and not 128."""
    source = str(write_tiny_source(tmp_path / "tiny"))
    for device in ("cuda", "cpu"):
        bundle = export_bundle(source, precision="int4", device=device)
        path = bundle.path / bundle.manifest.graphs["target"].file
        if method != "target":
            sizes = bundle.manifest.sizes
            target = tiny_target(sizes.hidden, sizes.layers, sizes.vocabulary)
            path = attach_speculator(bundle, tiny_speculator(method, target)).path / "speculator.onnx"
        (node,) = (node for node in ir.load(path).graph if node.op_type == "GatherBlockQuantized")
        assert len(node.inputs) == (4 if device == "cuda" else 3)
        if device == "cuda":
            _, _, scales, zeros = node.inputs
            assert zeros is not None
            assert scales is not None
            assert zeros.const_value is not None
            assert scales.const_value is not None
            assert zeros.const_value.shape == scales.const_value.shape
            assert set(zeros.const_value.numpy().ravel().tolist()) == {128}


def test_every_variant_loads_or_is_of_a_type_that_the_cpu_lacks(bundle: Bundle) -> None:
    for graph in VARIANTS:
        spec = bundle.manifest.graphs[graph]
        path = str(bundle.path / spec.file)
        if not build_features().issuperset(spec.requires):  # onnxruntime-gpu 1.31, which takes another variant
            with pytest.raises(Exception, match="INVALID_GRAPH"):
                onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        elif bundle.manifest.kv.dtype == "bfloat16":
            with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
                onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        else:
            onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("precision", "rmse"), [("fp16", 0.02), ("int8", 0.06), ("int4", 0.6)])
def test_numbers_are_those_of_the_source(tmp_path: Path, precision: str, rmse: float) -> None:
    source = str(write_tiny_source(tmp_path / "tiny"))
    found = export_bundle(source, precision=precision, device="cuda").manifest.fidelity
    assert found is not None
    assert found.logit_rmse < rmse
    exact = export_bundle(source, precision="fp32").manifest.fidelity
    assert exact is not None
    assert found.logit_rmse > exact.logit_rmse


def two_runs(bundle: Bundle, graph: str, tokens: list[int]) -> np.ndarray:
    """Logits of all tokens, in two runs."""
    session: Any = onnxruntime.InferenceSession(str(bundle.path / bundle.manifest.graphs[graph].file))
    sizes, capacity = bundle.manifest.sizes, 64
    wanted = {value.name for value in session.get_inputs()}
    kv = np.zeros((1, sizes.kv_heads, capacity, sizes.head_dim), np.float16)
    past = {name: onnxruntime.OrtValue.ortvalue_from_numpy(kv.copy()) for name in wanted if name.startswith("past_")}
    pieces = []
    for start, end in ((0, 7), (7, len(tokens))):
        width = end - start
        inputs = {
            "input_ids": np.array([tokens[start:end]]),
            "query_lengths": np.array([width], np.int32),
            "total_lengths_minus_one": np.array([end - 1], np.int32),
            "max_total_length": np.array([capacity], np.int32),
            "position_ids": np.arange(start, end)[None],
            "attention_bias": np.zeros((1, 1, width, capacity), np.float16),
            "logit_rows": np.arange(width)[None],
        }
        binding = session.io_binding()
        for name in wanted & set(inputs):
            binding.bind_cpu_input(name, inputs[name])
        for name, value in past.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past", "present"), value)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        pieces.append(binding.get_outputs()[-1].numpy()[0])
    return np.concatenate(pieces)


def test_the_variants_agree(tmp_path: Path) -> None:
    bundle = export_bundle(str(write_tiny_source(tmp_path / "tiny")), device="cuda")
    tokens = [(11 * index + 3) % bundle.manifest.sizes.tokens for index in range(19)]
    chain, tree = (two_runs(bundle, graph, tokens) for graph in ("target_batch1", "target_tree"))
    assert np.allclose(chain, tree, atol=2e-2)
    if "query_seqlens" in build_features():
        assert np.array_equal(chain, two_runs(bundle, "target", tokens))


def test_names_and_refusals(tmp_path: Path) -> None:
    source = str(write_tiny_source(tmp_path / "tiny"))
    assert export_bundle(source, device="cuda").path == models_dir() / "tiny-cuda"
    assert export_bundle(source, device="cuda", precision="int4").manifest.name == "tiny-cuda-int4"
    assert export_bundle(source, device="cuda", precision="int4").manifest.precision["requested"] == "int4, cuda"
    with pytest.raises(UsageError, match=r"'fp32' does not run on the CUDA provider: choose one of fp16"):
        export_bundle(source, device="cuda", precision="fp32")
    with pytest.raises(UsageError, match=r"'bf16' is for a GPU, with --device cuda; here choose one of int8"):
        export_bundle(source, precision="bf16")
    with pytest.raises(UsageError, match="Unknown device 'tpu'"):
        export_bundle(source, device="tpu")
    export_bundle(source, name="kept", precision="int8")
    with pytest.raises(UsageError, match="kept is there already, made from tiny as int8"):
        export_bundle(source, name="kept", precision="int8", device="cuda")


def test_numbers_too_large_for_fp16_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrun.export import weights_safetensors

    source = str(write_tiny_source(tmp_path / "tiny"))
    tensor = weights_safetensors.SafetensorsWeights.tensor

    def large(self: Any, name: str) -> Any:
        found = tensor(self, name)
        return found * 1e6 if name == "model.norm.weight" else found

    monkeypatch.setattr(weights_safetensors.SafetensorsWeights, "tensor", large)
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has numbers that are too large .* take bf16"):
        export_bundle(source, device="cuda")
    assert export_bundle(source, device="cuda", precision="bf16").manifest.fidelity is None


def test_a_speculator_can_be_made_of_it(bundle: Bundle) -> None:
    ends = read_target_ends(bundle)
    assert ends.rope_theta == 10_000.0
    assert ends.final_norm.dtype == np.float32
    layer = read_target_layer(bundle, 0)
    assert layer.qkv.dtype == layer.down.dtype == np.float32
    assert np.isfinite(layer.qkv).all()


def test_the_command(tmp_path: Path, run: Run) -> None:
    source = str(write_tiny_source(tmp_path / "tiny"))
    result = run("export", source, "--device", "cuda", "--precision", "int8", "--json")
    assert result.returncode == 0, result.stderr
    assert '"precision": "int8, cuda"' in result.stdout
    assert (models_dir() / "tiny-cuda-int8" / "target_tree.onnx").is_file()
