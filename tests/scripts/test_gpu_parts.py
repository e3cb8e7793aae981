"""What parts do where this ONNX Runtime, or the memory, cannot do what they want: they say so and do the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpu_checks import models
from gpu_checks.child import Report, for_each
from gpu_checks.context import DRY, Context
from gpu_checks.parts import correctness, costs, exactness, export, kv_memory
from gpu_checks.random_model import SHAPES, write_bundle
from specrun.models_cache.errors import BackendError
from specrun.models_cache.layout import Bundle
from specrun.runtime import Engine, calibration
from specrun.runtime.calibration import Calibration
from specrun.runtime.kv_shape import KVShape
from specrun.runtime.session import ModelSession, WidthRule
from specrun.runtime.verify import VerifyCase


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("cpu", True, tmp_path / "source", tmp_path, (), 1, DRY)


@pytest.fixture
def bundle(tmp_path: Path, isolated_home: Path) -> Bundle:
    return write_bundle("tiny", SHAPES["tiny"], "fp32", "cpu", tmp_path)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "result.json")


@pytest.fixture
def engine(bundle: Bundle) -> Iterator[Engine]:
    with Engine(bundle, threads=1) as engine:
        yield engine


@pytest.fixture
def one_row_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine be as on an ONNX Runtime that runs one row at a time."""
    open_session = engine._open_session

    def refuse(batch: int, rule: WidthRule) -> ModelSession:
        if batch > 1:
            raise BackendError("This ONNX Runtime runs tiny one row at a time.")
        return open_session(batch, rule)

    monkeypatch.setattr(engine, "_open_session", refuse)


@pytest.mark.usefixtures("one_row_only")
def test_batches_that_cannot_be_run(engine: Engine, report: Report, tmp_path: Path) -> None:
    costs.measure(engine, (1, 2), (1, 2, 4), report)
    found = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert [row["batch"] for row in found["v"]] == [1]
    assert set(found["left_out"]) == {"batch 2", "batch 4"}
    assert "one row at a time" in found["left_out"]["batch 4"]
    with pytest.raises(RuntimeError, match=r"No batch could be run: .* one row at a time"):
        costs.measure(engine, (1, 2), (2,), report)


def test_runs_whose_logits_are_too_many(engine: Engine, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LOGIT_BYTES", 4 * 4 * SHAPES["tiny"].vocabulary)
    costs.measure(engine, (1, 4, 5), (1, 2), report)
    assert [list(row) for row in report.figures["ms"]] == [["batch", "1", "4"], ["batch", "1"]]
    assert set(report.figures["left_out"]) == {"batch 1, width 5", "batch 2, width 4", "batch 2, width 5"}


def test_a_wider_run_costs_more(engine: Engine, report: Report) -> None:
    costs.measure(engine, (1, 256), (1,), report)
    assert report.figures["v"][0]["256"] > 2


@pytest.mark.usefixtures("one_row_only")
def test_buffers_without_the_runtime(engine: Engine) -> None:
    held, how = kv_memory._take(engine, 3, 100, "cpu")
    assert "one row at a time" in how
    size = sum(value.numpy().nbytes for value in held)
    assert size == KVShape.of_bundle(engine.bundle).kv_bytes(100, 3)


def test_buffers_of_the_runtime(engine: Engine) -> None:
    session, how = kv_memory._take(engine, 3, 256, "cpu")
    assert how == "the runtime's buffers"
    assert session.cache.nbytes == KVShape.of_bundle(engine.bundle).kv_bytes(256, 3)


@pytest.mark.parametrize(("free", "batch"), [(10.0, 32), (1.0, 16), (0.51, 8), (0.0, 1)])
def test_a_batch_that_fits(bundle: Bundle, free: float, batch: int) -> None:
    """Of 32 rows, as many as have room with a tenth to spare."""
    shapes = [KVShape.of_bundle(bundle)] * 2
    room = int(free * sum(shape.kv_bytes(256, 32) for shape in shapes))
    memory: Any = type("Memory", (), {"read": lambda self: (0, room)})()
    assert kv_memory._batch(32, 256, shapes, memory) == batch


class Double:
    """An engine that only stands there."""

    methods = ("none", "ngram")
    context = 64
    target: Any = None
    broken = ""
    calibration = Calibration(1, {1: 1.0})

    def generate(self, prompt: str, *, method: str, max_tokens: int) -> None:
        if method == self.broken:
            raise BackendError(f"{method} has no kernel")

    def reset(self) -> None:
        pass

    def __enter__(self) -> Double:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Rows:
    """A session of it."""

    cache: Any = type("Cache", (), {"close": lambda self: None})()


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that only stand there, and sessions over them."""
    monkeypatch.setattr(models, "open_engine", lambda *arguments, **options: Double())
    monkeypatch.setattr(models, "open_rows", lambda engine: Rows())
    monkeypatch.setattr(models, "text_ids", lambda engine, count: [*range(count)])


@pytest.mark.usefixtures("doubles")
def test_logits_of_another_model(context: Context, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no rounding fails the part; the figures are there."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(correctness, "_logits", lambda session, ids, width: rng.standard_normal((10, 50)).astype("f4"))
    with pytest.raises(RuntimeError, match="The logits of int8, fp32 are not those of the model"):
        correctness.run(context, report)
    assert len(report.figures["logits"]) == 2 * (1 + len(correctness.STEPS))


def test_the_device_against_the_processor_needs_no_probe_there(
    engine: Engine, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of graphs of 16 bits that takes the processor longer than the part may."""
    ids = models.text_ids(engine, 20)
    wanted = correctness._logits(engine.target, ids, len(ids))
    monkeypatch.setattr(calibration, "probe", lambda *arguments: pytest.fail("it was probed"))
    monkeypatch.setenv("SPECRUN_HOME", str(context.work / "elsewhere"))
    assert np.array_equal(correctness._on_cpu(context, engine, ids), wanted)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(("multiple", "fails"), [(1, True), (None, False)])
def test_texts_that_differ(
    context: Context, report: Report, monkeypatch: pytest.MonkeyPatch, multiple: int | None, fails: bool
) -> None:
    """They fail the part where equal bits are promised, and are a finding where only rounding is."""
    cases: list[Any] = [
        VerifyCase("ngram", 4, "greedy", 1, 8, True, None),
        SimpleNamespace(
            method="ngram",
            draft_length=4,
            sampling="greedy",
            tokens=8,
            equal=False,
            difference="token 3",
            holds=not fails,
        ),
    ]
    monkeypatch.setattr(exactness, "verify", lambda *arguments, **options: iter(cases))
    monkeypatch.setattr(exactness, "_pinned", lambda session, ids, width: {"width": width})
    monkeypatch.setattr(Double, "calibration", Calibration(multiple, {1: 1.0}))
    if fails:
        with pytest.raises(RuntimeError, match="Texts differ from plain decoding in int8, fp32 by more"):
            exactness.run(context, report)
    else:
        exactness.run(context, report)
    assert (report.figures["cases"], report.figures["unequal"]) == (4, 2)
    row = report.figures["verify"][0]
    assert (row["cases"], row["equal"], row["difference"]) == (2, 1, "K 4, greedy, token 3")


@pytest.mark.usefixtures("doubles")
def test_one_method_fails_alone(context: Context, report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are verified, and then the part fails by name."""
    asked: list[tuple[str, ...]] = []

    def verify(engine: object, prompts: object, *, methods: list[str], **options: object) -> Iterator[VerifyCase]:
        asked.append(tuple(methods))
        yield VerifyCase(methods[0], 4, "greedy", 1, 8, True, None)

    monkeypatch.setattr(exactness, "verify", verify)
    monkeypatch.setattr(exactness, "_pinned", lambda session, ids, width: {"width": width})
    monkeypatch.setattr(Double, "methods", ("none", "ngram", "medusa", "eagle"))
    monkeypatch.setattr(Double, "broken", "medusa")
    with pytest.raises(RuntimeError, match=r"int8, fp32: .* medusa: BackendError: medusa has no kernel"):
        exactness.run(context, report)
    assert asked == [("ngram", "eagle")] * 2
    assert report.figures["cases"] == 2


def test_one_precision_fails_alone(report: Report) -> None:
    done: list[str] = []

    def work(name: str) -> None:
        if name == "bf16":
            raise BackendError("no such kernel")
        done.append(name)

    with pytest.raises(RuntimeError, match="It failed for bf16: BackendError: no such kernel"):
        for_each(("fp16", "bf16", "int8"), report, work)
    assert done == ["fp16", "int8"]
    assert report.figures["failed"] == {"bf16": "BackendError: no such kernel"}
    for_each(("fp16",), report, work)


def test_wide_runs_go_alone(engine: Engine, report: Report) -> None:
    costs.measure(engine, (1, 64, 65), (1, 2), report)
    assert [list(row) for row in report.figures["v"]] == [["batch", "1", "64", "65"], ["batch", "1", "64"]]
    assert report.figures["left_out"] == {}


def test_one_export_fails_alone(context: Context, report: Report) -> None:
    amounts = replace(context.amounts, precisions=("int8", "int3"))
    with pytest.raises(RuntimeError, match="check-int3-cpu could not be exported: UsageError: Unknown precision"):
        export.run(replace(context, amounts=amounts), report)
    made = {row["bundle"] for row in report.figures["bundles"]}
    assert made == {"check-int8-cpu", "check-fp32-cpu", "tiny", "tiny-draft"}
    assert set(report.figures["failed"]) == {"check-int3-cpu"}
