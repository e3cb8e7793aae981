"""What parts do where this ONNX Runtime, or the memory, cannot do what they want: they say so and do the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_checks.child import Report
from gpu_checks.context import DRY, Context
from gpu_checks.parts import best_of, costs, kv_memory
from gpu_checks.random_model import SHAPES, write_bundle
from specrun.models_cache.errors import BackendError
from specrun.models_cache.layout import Bundle
from specrun.runtime import session
from specrun.runtime.kv_shape import KVShape


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", True, tmp_path / "source", tmp_path, (), 1, DRY)


@pytest.fixture
def bundle(tmp_path: Path, isolated_home: Path) -> Bundle:
    return write_bundle("tiny", SHAPES["tiny"], "fp32", "cpu", tmp_path)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "result.json")


def one_row_only(bundle: Bundle, threads: int, device: str) -> Any:
    """An opener as an ONNX Runtime gives it that runs one row at a time."""
    opener = session.session_opener(bundle, threads, device)

    def open_session(batch: int, rule: session.WidthRule) -> session.ModelSession:
        if batch > 1:
            raise BackendError("This ONNX Runtime runs tiny one row at a time.")
        return opener(batch, rule)

    return open_session


def test_batches_that_cannot_be_run(
    context: Context, bundle: Bundle, report: Report, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(costs, "session_opener", one_row_only)
    costs.measure(context, bundle, (1, 2), (1, 2, 4), report)
    found = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert [row["batch"] for row in found["v"]] == [1]
    assert set(found["left_out"]) == {"batch 2", "batch 4"}
    assert "one row at a time" in found["left_out"]["batch 4"]
    with pytest.raises(RuntimeError, match=r"No batch could be run: .* one row at a time"):
        costs.measure(context, bundle, (1, 2), (2,), report)


def test_runs_whose_logits_are_too_many(
    context: Context, bundle: Bundle, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "LOGIT_BYTES", 4 * 4 * SHAPES["tiny"].vocabulary)
    costs.measure(context, bundle, (1, 4, 5), (1, 2), report)
    assert [list(row) for row in report.figures["ms"]] == [["batch", "1", "4"], ["batch", "1"]]
    assert set(report.figures["left_out"]) == {"batch 1, width 5", "batch 2, width 4", "batch 2, width 5"}


def test_a_wider_run_costs_more(context: Context, bundle: Bundle, report: Report) -> None:
    costs.measure(context, bundle, (1, 256), (1,), report)
    assert report.figures["v"][0]["256"] > 2


def test_buffers_without_the_runtime(bundle: Bundle) -> None:
    held, how = kv_memory._take(one_row_only(bundle, 1, "cpu"), bundle, 3, 100, "cpu")
    assert "one row at a time" in how
    size = sum(value.numpy().nbytes for value in held)
    assert size == KVShape.of_bundle(bundle).kv_bytes(100, 3)
    own, how = kv_memory._take(session.session_opener(bundle, 1), bundle, 3, 256, "cpu")
    assert how == "the runtime's buffers"
    assert own.cache.nbytes == KVShape.of_bundle(bundle).kv_bytes(256, 3)


@pytest.mark.parametrize(("free", "batch"), [(10.0, 32), (1.0, 16), (0.51, 8), (0.0, 1)])
def test_a_batch_that_fits(bundle: Bundle, free: float, batch: int) -> None:
    """Of 32 rows, as many as have room with a tenth to spare."""
    shapes = [KVShape.of_bundle(bundle)] * 2
    room = int(free * sum(shape.kv_bytes(256, 32) for shape in shapes))
    memory: Any = type("Memory", (), {"read": lambda self: (0, room)})()
    assert kv_memory._batch(32, 256, shapes, memory) == batch


def test_an_engine_without_best_of(context: Context, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __enter__(self) -> Engine:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(best_of.models, "open_engine", lambda context: Engine())
    best_of.run(context, report)
    assert report.figures == {"built": False, "n": DRY.samples}
