from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specrun.export.fidelity import WIDTHS, compare_logits, measure_fidelity
from specrun.export.weights import Weights
from specrun.models_cache.errors import BackendError

from .graph_runner import write_graphs
from .tiny_models import CONTEXT, token_ids

Graphs = Callable[[str], tuple[Path, Weights]]


def test_equal_logits() -> None:
    logits = np.random.default_rng(0).standard_normal((5, 9)).astype(np.float32)
    found = compare_logits(logits, logits)
    assert (found.logit_rmse, found.argmax_agreement, found.mean_kl, found.positions) == (0, 1, 0, 5)


def test_figures_of_a_small_example() -> None:
    expected = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]], np.float32))
    got = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]], np.float32))
    found = compare_logits(expected, got)
    assert found.logit_rmse == pytest.approx(np.log(2) * np.sqrt(2 / 6), rel=1e-6)
    assert found.argmax_agreement == 0.5
    assert found.mean_kl == pytest.approx(0.25 * np.log(2) / 2, rel=1e-6)


def test_a_shift_of_all_logits_is_no_divergence() -> None:
    logits = np.array([[1000.0, -1000.0, 3.0]], np.float32)
    found = compare_logits(logits, logits + 2)
    assert found.logit_rmse == pytest.approx(2)
    assert found.mean_kl == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("variant", ["llama", "mistral", "qwen3"])
def test_fp32_graphs_are_the_source(variant: str, fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs(variant)
    for graph in ("target", "target_batch1"):
        found, widths = measure_fidelity(weights, folder / f"{graph}.onnx", token_ids(200))
        assert found.logit_rmse < 1e-4
        assert found.argmax_agreement == 1
        assert abs(found.mean_kl) < 1e-6
        assert found.positions == 200
        assert widths == (*WIDTHS, 200 - sum(WIDTHS))


def test_worse_precision_shows(fp32_graphs: Graphs, tmp_path: Path) -> None:
    _, weights = fp32_graphs("llama")
    errors = []
    for precision in ("fp32", "int8", "int4"):
        graph = write_graphs(weights, tmp_path / precision, precision) / "target.onnx"
        errors.append(measure_fidelity(weights, graph, token_ids(60))[0].logit_rmse)
    assert errors[0] * 10 < errors[1] < errors[2] / 2


@pytest.mark.parametrize(("count", "widths"), [(1, (1,)), (4, (1, 2)), (5, (1, 2)), (7, (1, 2, 3))])
def test_short_texts(count: int, widths: tuple[int, ...], fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs("llama")
    found, ran = measure_fidelity(weights, folder / "target.onnx", token_ids(count))
    assert (found.positions, ran) == (count, widths)


def test_no_more_than_the_context(fp32_graphs: Graphs) -> None:
    folder, weights = fp32_graphs("llama")
    found, _ = measure_fidelity(weights, folder / "target.onnx", token_ids(CONTEXT + 40))
    assert found.positions == CONTEXT


def test_without_onnxruntime(fp32_graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, weights = fp32_graphs("llama")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendError, match=r"pip install 'specrun\[cpu\]'"):
        measure_fidelity(weights, folder / "target.onnx", token_ids(4))
