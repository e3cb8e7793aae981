"""Quantised graphs: as close to the dequantised weights as int8 activations allow, and every tensor stored once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from specrun.export.gguf_blocks import BLOCK_TYPES
from specrun.export.reference import reference_logits
from specrun.export.weight_file import WeightFile
from specrun.export.weight_store import store_weights
from specrun.export.weights import Weights, open_weights

from .graph_runner import GRAPHS, GraphRunner, write_graphs
from .tiny_models import VOCABULARY, gguf_from_folder, save_tiny, token_ids

TEXT = token_ids(32)

# Types of single tensors beside the default of a file, as mixed quantisations have them.
MIXED_FILES: dict[str, Callable[[str], str]] = {
    "Q4_K_M": lambda name: "Q6_K" if ("attn_v" in name and "blk.1" in name) or name == "token_embd.weight" else "Q4_K",
    "qkv of three kinds": lambda name: {"attn_q": "Q4_1", "attn_k": "Q5_0", "attn_v": "F16"}.get(_part(name), "Q8_0"),
    "gate unlike up": lambda name: {"ffn_gate": "Q4_0", "ffn_up": "Q4_1"}.get(_part(name), "Q5_1"),
    "float embedding": lambda name: "BF16" if name == "token_embd.weight" else "Q5_K",
    "float layers": lambda name: "Q4_K" if name in ("token_embd.weight", "output.weight") else "F16",
}
# The random blocks of these make weights so small that little of the logits comes through them.
SMOOTH = ("Q4_K", "Q5_K", "Q4_K_M", "float embedding", "float layers")


def _part(name: str) -> str:
    return name.split(".")[-2]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """RMSE of logits, in units of their standard deviation."""
    return float(np.sqrt(np.mean((found - expected) ** 2)) / np.std(expected))


def graph_logits(weights: Weights, folder: Path, precision: str, block: int | None = None) -> np.ndarray:
    write_graphs(weights, folder, precision, block)
    both = [GraphRunner(folder / f"{graph}.onnx", weights).chain(TEXT, [13, 1, 4]) for graph in GRAPHS]
    np.testing.assert_array_equal(both[0], both[1])
    return both[0]


@pytest.mark.parametrize("types", [*sorted(BLOCK_TYPES), "F16", "BF16", *MIXED_FILES])
def test_source_keeps_every_weight(types: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    type_of = MIXED_FILES.get(types, lambda name: types)
    weights = open_weights(gguf_from_folder(tiny_folder("llama-wide"), tmp_path / "wide.gguf", type_of))
    expected = reference_logits(weights, TEXT)
    found = graph_logits(weights, tmp_path / "graphs", "source")
    # Scales in the wrong place in one projection of one layer cost three times as much, wrong nibbles thirty times.
    bound = 1e-4 if types in ("F16", "BF16") else 0.015 if types in SMOOTH else 0.06
    assert relative_error(found, expected) < bound


@pytest.mark.parametrize("variant", ["llama-heads", "llama-tied", "mistral", "qwen2", "qwen3", "smollm3"])
def test_source_of_every_family(variant: str, tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    window = {"attention.sliding_window": 8} if variant == "mistral" else {}
    path = gguf_from_folder(tiny_folder(variant), tmp_path / "tiny.gguf", lambda name: "Q8_0", metadata=window)
    weights = open_weights(path)
    found = graph_logits(weights, tmp_path / "graphs", "source")
    assert relative_error(found, reference_logits(weights, TEXT)) < 0.06


@pytest.mark.parametrize(("precision", "bound"), [("int8", 0.06), ("int4", 0.6)])
@pytest.mark.parametrize("variant", ["llama", "llama-linear", "qwen2", "qwen3", "smollm3"])
def test_quantised_graphs_stay_close(
    variant: str, precision: str, bound: float, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = open_weights(tiny_folder(variant))
    error = relative_error(graph_logits(weights, tmp_path / "graphs", precision), reference_logits(weights, TEXT))
    assert error < bound


@pytest.mark.parametrize("block", [16, 64, 256])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_block_sizes_reach_the_graph(
    precision: str, block: int, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    weights = open_weights(tiny_folder("llama-wide"))
    found = graph_logits(weights, tmp_path / "graphs", precision, block)
    model = onnx.load(tmp_path / "graphs" / "target.onnx", load_external_data=False)
    products = [n for n in model.graph.node if n.op_type == "MatMulNBits" and ".offsets." not in n.input[1]]
    attributes = [{a.name: a.i for a in node.attribute} for node in products]
    assert {a["block_size"] for a in attributes} == {block}
    bits = [a["bits"] for a in attributes]
    assert bits == ([8] * 9 if precision == "int8" else [4] * 8 + [8])  # int4 keeps its head at 8 bits
    assert relative_error(found, reference_logits(weights, TEXT)) < (0.12 if precision == "int8" else 0.8)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_odd_widths_stay_floats(precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from . import tiny_models

    prefix, options = tiny_models.VARIANTS["llama"]
    monkeypatch.setitem(tiny_models.VARIANTS, "odd", (prefix, {**options, "intermediate_size": 100}))
    weights = open_weights(save_tiny("odd", tmp_path / "odd"))
    with WeightFile(tmp_path / "data") as file:
        names = store_weights(weights, file, precision, None).type_names()
    assert names["mlp"] == f"fp32+{precision}"
    assert names["attention"] == precision
    assert names["embedding"] == names["head"] == "int8"
    error = relative_error(graph_logits(weights, tmp_path / "graphs", precision), reference_logits(weights, TEXT))
    assert error < (0.06 if precision == "int8" else 0.6)


def external_ranges(path: Path) -> dict[str, tuple[int, int]]:
    """Initializer -> (offset, length) in the data file."""
    ranges = {}
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            ranges[tensor.name] = (int(entries["offset"]), int(entries["length"]))
    return ranges


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "source"])
def test_a_tied_head_is_the_embedding_itself(
    precision: str, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("llama-tied")
    path = folder if precision != "source" else gguf_from_folder(folder, tmp_path / "t.gguf", lambda name: "Q8_0")
    weights = open_weights(path)
    graphs = write_graphs(weights, tmp_path / "graphs", precision)
    ranges = external_ranges(graphs / "target.onnx")
    size = VOCABULARY * 64 * (4 if precision == "fp32" else 1)
    of_vocabulary = [found for name, found in ranges.items() if "embed_tokens" in name and found[1] == size]
    assert of_vocabulary
    assert len(set(of_vocabulary)) == 1
    assert not any("lm_head" in name for name in ranges)
    # The graphs share everything, and nothing else is in the file.
    assert ranges == external_ranges(graphs / "target_batch1.onnx")
    stored = sum(length for _, length in set(ranges.values()))
    padding = 4096 * len(set(ranges.values()))
    assert stored <= (graphs / "target.onnx.data").stat().st_size <= stored + padding


def test_small_tensors_stay_in_the_graph_file(fp32_graphs: Callable[[str], tuple[Path, Weights]]) -> None:
    folder, _ = fp32_graphs("llama")
    for offset, length in external_ranges(folder / "target.onnx").values():
        assert length >= 1024
        assert offset % 4096 == 0
