"""fp32 graphs compute what transformers computes, however the text is cut into runs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from specrun.export.graph import feature_taps
from specrun.export.reference import reference_logits
from specrun.export.weights import Weights, open_weights

from .graph_runner import GRAPHS, GraphRunner, write_graphs
from .tiny_models import VARIANTS, gguf_from_folder, token_ids, transformers_logits, transformers_residuals

TEXT = token_ids(32)  # longer than every window
Graphs = Callable[[str], tuple[Path, Weights]]

CHAINS = {
    "one chunk": [32],
    "chunks": [7, 9, 2, 14],
    "steps": [20, 1],
    "verify widths": [3, 1, 5, 1, 1, 6, 2, 9, 3],
}


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the last bit where that was measured; elsewhere kernels may round rows by the width of their run."""
    if platform.machine() in ("x86_64", "AMD64"):
        np.testing.assert_array_equal(found, expected)
    close(found, expected)


@pytest.fixture(scope="module")
def expected_logits(tiny_folder: Callable[[str], Path]) -> Callable[[str], np.ndarray]:
    known: dict[str, np.ndarray] = {}

    def make(variant: str) -> np.ndarray:
        if variant not in known:
            known[variant] = transformers_logits(tiny_folder(variant), TEXT)
        return known[variant]

    return make


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_equal_transformers(
    variant: str, graph: str, fp32_graphs: Graphs, expected_logits: Callable[[str], np.ndarray]
) -> None:
    folder, weights = fp32_graphs(variant)
    runner = GraphRunner(folder / f"{graph}.onnx", weights)
    for widths in CHAINS.values():
        runner.lengths[0] = 0
        close(runner.chain(TEXT, widths), expected_logits(variant))
    close(reference_logits(weights, TEXT), expected_logits(variant))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_features_are_the_residual_streams(
    variant: str,
    fp32_graphs: Graphs,
    tiny_folder: Callable[[str], Path],
    expected_logits: Callable[[str], np.ndarray],
) -> None:
    folder, weights = fp32_graphs(variant)
    config = weights.config
    residuals = transformers_residuals(tiny_folder(variant), TEXT)
    runner = GraphRunner(folder / "target.onnx", weights)
    runner.run([TEXT[:20]])
    runner.run([TEXT[20:]])
    *entering, last = np.split(runner.features[0], len(feature_taps(config.layers)), axis=-1)
    for tap, found in zip(feature_taps(config.layers), entering, strict=False):
        close(found, residuals[tap][20:])
    normed = last / np.sqrt(np.mean(np.square(last), axis=-1, keepdims=True) + config.norm_epsilon)
    head = weights.tensor("model.embed_tokens.weight" if config.tied_head else "lm_head.weight")
    close(normed * weights.tensor("model.norm.weight") @ head.T, expected_logits(variant)[20:])


def test_taps_of_small_and_large_models() -> None:
    assert [feature_taps(layers) for layers in (1, 2, 3, 5, 30)] == [
        (0, 1), (0, 1, 2), (0, 1, 2, 3), (2, 5), (2, 15, 27, 30),
    ]  # fmt: skip


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2-window", "smollm3"])
def test_every_cut_gives_the_same_bits(variant: str, fp32_graphs: Graphs) -> None:
    # Width 1 with its dummy row included: this is what speculation's exactness stands on.
    folder, weights = fp32_graphs(variant)
    runner = GraphRunner(folder / "target.onnx", weights)
    whole = runner.chain(TEXT, CHAINS["one chunk"])
    for widths in CHAINS.values():
        runner.lengths[0] = 0
        same(runner.chain(TEXT, widths), whole)


@pytest.mark.parametrize("graph", GRAPHS)
def test_logit_rows_choose_and_repeat_positions(graph: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs("llama")
    runner = GraphRunner(folder / f"{graph}.onnx", weights)
    whole = runner.run([TEXT])[0]
    for rows in ([31], [4, 0, 31, 4]):
        runner.lengths[0] = 0
        same(runner.run([TEXT], rows=[rows])[0], whole[rows])


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2-window", "smollm3"])
def test_junk_behind_a_rewind_does_not_leak(variant: str, graph: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs(variant)
    runner = GraphRunner(folder / f"{graph}.onnx", weights)
    whole = runner.chain(TEXT, [32])
    runner.lengths[0] = 0
    for cache in runner.caches.values():
        cache[:] = 1e6  # finite: what earlier texts leave behind
    for start, width in ((0, 9), (9, 1), (10, 5), (15, 1), (16, 8), (24, 8)):
        junk = [3 + (token * 7 + start) % 150 for token in TEXT[start : start + 6]]
        runner.run([junk])
        runner.lengths[0] = start
        same(runner.run([TEXT[start : start + width]])[0], whole[start : start + width])


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen2-window", "smollm3"])
def test_ragged_rows_equal_solo_rows(variant: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs(variant)
    texts = [TEXT, TEXT[::-1], [*TEXT[5:], *TEXT[:5]]]
    solo = []
    for text in texts:
        runner = GraphRunner(folder / "target.onnx", weights)
        solo.append(runner.chain(text, [32]))
    batch = GraphRunner(folder / "target.onnx", weights, batch=3)
    for counts in ((9, 4, 14), (1, 3, 2), (1, 1, 1), (0, 5, 1), (2, 0, 0), (6, 4, 7)):
        starts = list(batch.lengths)
        new = [text[start : start + count] for text, start, count in zip(texts, starts, counts, strict=True)]
        logits = batch.run(new)
        for row, count in enumerate(counts):
            same(logits[row, :count], solo[row][starts[row] : starts[row] + count])


def tree_bias(parents: list[int]) -> np.ndarray:
    """Minus infinity between a node and what is neither itself nor its ancestor; parents come first, -1 is the past."""
    bias = np.full((len(parents), len(parents)), -np.inf, np.float32)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            bias[node, ancestor] = 0
            ancestor = parents[ancestor]
    return bias


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_chain_with_its_bias_spelt_out_is_the_plain_chain(variant: str, graph: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs(variant)
    runner = GraphRunner(folder / f"{graph}.onnx", weights)
    plain = runner.chain(TEXT, [20, 12])
    runner.lengths[0] = 20
    logits = runner.run([TEXT[20:]], bias=tree_bias(list(range(-1, 11))), position_ids=np.arange(20, 32)[None])
    same(logits[0], plain[20:])


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("variant", sorted(name for name in VARIANTS if name not in ("mistral", "qwen2-window")))
def test_each_path_of_a_tree_equals_its_chain(variant: str, graph: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs(variant)
    runner = GraphRunner(folder / f"{graph}.onnx", weights)
    past = TEXT[:20]
    runner.chain(past, [20])
    #          0 -> 1 -> 3 -> 6
    #          |    `--> 4
    #          `--> 2 -> 5
    parents, tokens, depths = [-1, 0, 0, 1, 1, 2, 3], TEXT[20:27], [0, 1, 1, 2, 2, 2, 3]
    logits = runner.run([tokens], bias=tree_bias(parents), position_ids=20 + np.array([depths]))[0]
    for path in ([0, 1, 3, 6], [0, 1, 4], [0, 2, 5]):
        runner.lengths[0] = 20
        close(logits[path], runner.run([[tokens[node] for node in path]])[0])


def test_a_tree_within_the_window(fp32_graphs: Graphs) -> None:
    # The window counts slots of the cache, so beyond it a tree would be wrong (see build_target).
    folder, weights = fp32_graphs("mistral")
    runner = GraphRunner(folder / "target.onnx", weights)
    parents, depths = [-1, 0, 0, 1, 1, 2, 3], [0, 1, 1, 2, 2, 2, 3]
    logits = runner.run([TEXT[:7]], bias=tree_bias(parents), position_ids=np.array([depths]))[0]
    for path in ([0, 1, 3, 6], [0, 1, 4], [0, 2, 5]):
        runner.lengths[0] = 0
        close(logits[path], runner.run([[TEXT[node] for node in path]])[0])


# tensai#37, llama.cpp#2376: 8 heads with 2 KV heads, q and k permuted for llama only; llama.cpp#11345: a tied head
@pytest.mark.parametrize("variant", ["llama-heads", "llama-tied", "mistral", "qwen2", "qwen3", "smollm3"])
def test_graphs_of_gguf_files_equal_transformers(
    variant: str, tiny_folder: Callable[[str], Path], expected_logits: Callable[[str], np.ndarray], tmp_path: Path
) -> None:
    window = {"attention.sliding_window": 8} if variant == "mistral" else {}
    weights = open_weights(gguf_from_folder(tiny_folder(variant), tmp_path / "tiny.gguf", metadata=window))
    for precision in ("fp32", "source"):  # a file of floats has no blocks to keep
        folder = write_graphs(weights, tmp_path / precision, precision)
        close(GraphRunner(folder / "target.onnx", weights).chain(TEXT, [16, 1]), expected_logits(variant))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_structure(variant: str, graph: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs(variant)
    model = onnx.load(folder / f"{graph}.onnx", load_external_data=False)
    onnx.checker.check_model(str(folder / f"{graph}.onnx"))
    assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 23), ("com.microsoft", 1)}
    names = [value.name for value in model.graph.input]
    caches = [f"past_{part}.{i}" for i in range(weights.config.layers) for part in ("key", "value")]
    assert names[8:] == caches
    presents = [name.replace("past", "present") for name in caches]
    assert [value.name for value in model.graph.output] == ["logits", "features", *presents]
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)
    attention = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    assert len(attention) == weights.config.layers
    for node in attention:
        assert ("query_lengths" in node.input) == GRAPHS[graph]
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                assert entry.value == "target.onnx.data"


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_moves_with_its_data(graph: str, fp32_graphs: Graphs, tmp_path: Path) -> None:
    folder, weights = fp32_graphs("llama")
    expected = GraphRunner(folder / f"{graph}.onnx", weights).run([TEXT])
    moved = tmp_path / "verschoben 移动"
    moved.mkdir()
    for file in (f"{graph}.onnx", "target.onnx.data"):
        (moved / file).write_bytes((folder / file).read_bytes())
    np.testing.assert_array_equal(GraphRunner(moved / f"{graph}.onnx", weights).run([TEXT]), expected)


def test_the_same_weights_give_the_same_bytes(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for precision in ("fp32", "int8", "int4"):
        left, right = (
            write_graphs(open_weights(tiny_folder("qwen3")), tmp_path / f"{precision} {side}", precision)
            for side in ("left", "right")
        )
        for file in sorted(path.name for path in left.iterdir()):
            assert (left / file).read_bytes() == (right / file).read_bytes(), file
