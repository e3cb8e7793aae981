"""The width probe: what it finds, where it is kept, and what follows where it finds nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.runtime import Engine
from specrun.runtime import engine as engine_module
from specrun.runtime.calibration import TIMED_WIDTHS, Calibration, calibrate, probe
from specrun.runtime.session import ModelSession, WidthRule, session_opener

from .checks import check_counters
from .conftest import TinyModels
from .tiny_bundles import PROMPT


@pytest.fixture
def home(models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache root: bundles are named by their path."""
    models.bundle("tgt")
    monkeypatch.setenv("SPECRUN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tgt(models: TinyModels) -> Path:
    return models.bundle("tgt").path


def faulty(wrong: Callable[[ModelSession, int, int], bool]) -> Callable[[ModelSession, Any, int], np.ndarray]:
    """`run_batch` whose logits and KV depend on the width: they change where wrong(session, positions, rows) says."""
    original = ModelSession.run_batch

    def run_batch(self: ModelSession, tokens: Any, *, rows: int, parents: Any = None) -> np.ndarray:
        logits = original(self, tokens, rows=rows, parents=parents)
        positions, _, padded_rows = self._padded(max(map(len, tokens)), rows)
        if wrong(self, positions, padded_rows):
            logits += np.float32(1e-5) * (1 + positions)
            for value in self.cache.values:
                value.numpy()[:, :, :64] *= np.float32(1.001)
        return logits

    return run_batch


@pytest.mark.parametrize(
    ("wrong", "multiple"),
    [
        (lambda session, positions, rows: False, 1),
        (lambda session, positions, rows: positions * session.cache.batch % 2 == 1, 2),
        (lambda session, positions, rows: positions * session.cache.batch % 4 != 0, 4),
        (lambda session, positions, rows: positions == 16, None),
        (lambda session, positions, rows: positions == 256, None),
        (lambda session, positions, rows: positions == 33, 2),  # a lone row in the attention's last block
        (lambda session, positions, rows: session.cache.batch > 1, None),
    ],
    ids=["exact", "odd", "not of four", "16", "256", "33", "batch"],
)
def test_probe(
    models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[ModelSession, int, int], bool],
    multiple: int | None,
) -> None:
    """The smallest multiple whose widths agree is found, and None where none does."""
    monkeypatch.setattr(ModelSession, "run_batch", faulty(wrong))
    found = probe(session_opener(models.bundle("tgt"), 1))
    assert found.width_multiple == multiple
    assert set(found.costs) == set(TIMED_WIDTHS)
    assert all(0 < cost < 1 for cost in found.costs.values())
    assert list(found.costs.values()) == sorted(found.costs.values())
    assert found.exactness == ("rounding" if multiple is None else "bitwise")
    assert found.rule == WidthRule(multiple=multiple or 1, exact=multiple is not None)


def test_without_a_rule_results_say_so(home: Path, tgt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rule holds: generation works, and the result says `exactness: rounding`."""
    monkeypatch.setattr(ModelSession, "run_batch", faulty(lambda session, positions, rows: positions == 16))
    with Engine.load(tgt, draft=tgt, threads=1) as engine:
        assert not engine.target.width_rule.exact
        for method in ("none", "draft", "ngram"):
            result = engine.generate(PROMPT, method=method, max_tokens=20, raw=True, draft_length=4)
            assert result.usage.completion_tokens == 20
            assert result.exactness == "rounding"
            assert result.to_json()["exactness"] == "rounding"
            check_counters(result)


def test_the_probe_is_kept_outside_the_bundle(home: Path, tgt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe for a bundle, thread count and ONNX Runtime; its file lies below the cache root's calibration/."""
    probes: list[int] = []
    real = probe
    monkeypatch.setattr("specrun.runtime.calibration.probe", lambda opener: probes.append(1) or real(opener))
    before = sorted(path.name for path in tgt.iterdir())
    for threads, count in ((1, 1), (1, 1), (2, 2), (1, 2)):
        Engine.load(tgt, threads=threads).close()
        assert len(probes) == count
    assert sorted(path.name for path in tgt.iterdir()) == before
    files = list(home.rglob("*"))
    assert {path.parent.name for path in files if path.is_file()} == {"calibration"}
    assert len([path for path in files if path.is_file()]) == 2
    with Engine.load(tgt, threads=1) as engine:
        engine.recalibrate()
    assert len(probes) == 3


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"width_multiple": 1}',
        '{"width_multiple": 1, "costs": {}}',
        '{"width_multiple": 3, "costs": {"1": 0.1}}',
        '{"width_multiple": "1", "costs": {"1": 0.1}}',
        '{"width_multiple": 1, "costs": {"1": NaN}}',
        '{"width_multiple": 1, "costs": {"1": 1' + "0" * 400 + "}}",
        '{"width_multiple": 1, "costs": {"1": 1e-320}}',
        '{"width_multiple": 1.0, "costs": {"1": 0.1}}',
        "[" * 100_000,
        '{"width_multiple": 1, "costs": {"1": -1}}',
        '{"width_multiple": 1, "costs": {"2": 0.1}}',
        '{"width_multiple": 1, "costs": {"1": 0.1, "x": 1}}',
        "\udcff",
    ],
)
def test_a_damaged_file_is_ignored(home: Path, tgt: Path, content: str) -> None:
    Engine.load(tgt, threads=1).close()
    (path,) = home.rglob("*.json")
    sound = path.read_text()
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with Engine.load(tgt, threads=1) as engine:
        assert engine.generate(PROMPT, method="ngram", max_tokens=9, raw=True).usage.completion_tokens == 9
        assert engine.calibration.exactness == "bitwise"
    assert set(json.loads(path.read_text())) == set(json.loads(sound))


def test_a_kept_file_is_believed(home: Path, tgt: Path) -> None:
    Engine.load(tgt, threads=1).close()
    (path,) = home.rglob("*.json")
    path.write_text(json.dumps({"width_multiple": 4, "costs": {"1": 0.5, "17": 1.0}}))
    with Engine.load(tgt, threads=1) as engine:
        assert engine.target.width_rule == WidthRule(multiple=4)
        assert engine.calibration.cost(9) == 0.75
        assert engine.calibration.cost(34) == 2.0
        expected = engine.generate(PROMPT, max_tokens=30, raw=True).token_ids
        assert engine.recalibrate().width_multiple == 1
        assert engine.generate(PROMPT, max_tokens=30, raw=True).token_ids == expected


def test_a_cache_that_cannot_be_written(tmp_path: Path, tgt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub#2797: a read-only cache works; each start probes anew."""
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    monkeypatch.setenv("SPECRUN_HOME", str(blocked))
    for _ in range(2):
        with Engine.load(tgt, threads=1) as engine:
            assert engine.calibration.exactness == "bitwise"
            assert engine.generate(PROMPT, max_tokens=5, raw=True).usage.completion_tokens == 5
    assert blocked.read_text() == "no folder"


def test_no_probe_where_there_is_a_file(home: Path, models: TinyModels) -> None:
    bundle = models.bundle("tgt")
    found = calibrate(bundle, 1, session_opener(bundle, 1))

    def refuse(batch: int, rule: WidthRule) -> ModelSession:
        raise AssertionError("opened")

    assert calibrate(bundle, 1, refuse) == found
    assert isinstance(found, Calibration)


def test_a_new_rule_drops_what_the_cache_holds(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.engine("tgt")
    engine.generate(PROMPT, max_tokens=5, raw=True)
    monkeypatch.setattr(engine_module, "calibrate", lambda *_, **__: Calibration(2, {1: 1.0}))
    old = engine.calibration, engine.target.width_rule
    try:
        engine.recalibrate()
        assert engine.target.width_rule.multiple == 2
        assert engine.generate(PROMPT, max_tokens=5, raw=True).usage.cached_tokens == 0
    finally:
        engine.calibration, engine.target.width_rule = old
