"""The worker protocol, between real processes, and the programs that are run to their end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .processes import BenchError, Worker, call, child_environment


def test_answers_and_what_libraries_print(scripted: Callable[..., Worker], tmp_path: Path) -> None:
    worker = scripted()
    answer = worker.ask("run", method="plain", prompt_ids=[3, 4], max_tokens=3, draft_length=0)
    assert answer["token_ids"] == [7, 8, 9]
    assert answer["first"] == 1
    assert worker.ask("next", prompt_ids=[3, 4])["token_id"] == 7
    worker.close()
    assert (tmp_path / "scripted.log").read_text().split("\n")[0] == "library chatter"


def test_waiting_is_counted(scripted: Callable[..., Worker]) -> None:
    worker = scripted()
    before = worker.ask("about")
    after = worker.ask("about")
    assert after["idle_s"] > before["idle_s"] > 0
    assert after["idle_cpu_s"] - before["idle_cpu_s"] < 0.05  # it sleeps


def test_an_error_is_told_and_the_worker_goes_on(scripted: Callable[..., Worker]) -> None:
    worker = scripted()
    with pytest.raises(BenchError, match="scripted: no such method here"):
        worker.ask("run", method="refuse", prompt_ids=[1], max_tokens=2, draft_length=0)
    assert worker.alive
    assert worker.ask("about")["version"] == "1"


def test_an_end_is_told_with_the_last_line_of_the_log(scripted: Callable[..., Worker]) -> None:
    worker = scripted()
    with pytest.raises(BenchError, match=r"scripted ended early: it broke \(all of it is in .*scripted.log\)"):
        worker.ask("run", method="exit", prompt_ids=[1], max_tokens=2, draft_length=0)
    assert not worker.alive
    with pytest.raises(BenchError, match="ended early"):
        worker.ask("about")


def test_what_does_not_leak_into_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH", "/somewhere")
    environment = child_environment()
    assert not {"PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS"} & environment.keys()
    assert environment["PATH"] == "/somewhere"


def test_a_program_that_fails(tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ['GIVEN']); sys.exit(int(os.environ['GIVEN']))"
    call([sys.executable, "-c", script], tmp_path / "log", "not made", {"GIVEN": "0"})
    with pytest.raises(BenchError, match="not made: 5"):
        call([sys.executable, "-c", script], tmp_path / "log", "not made", {"GIVEN": "5"})
