"""Parts that raise, hang, die or take too long: the others go on, and what was found stays on the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_checks.context import DRY, Context
from gpu_checks.main import LIMIT, PARTS
from gpu_checks.runner import Part, Results, _share, run_parts
from gpu_checks.table import lines_of

from .conftest import SCRIPTS

BODIES = {
    "fine": "report.add(answer=42)",
    "raises": "report.add(half=1)\n    raise ValueError('no such kernel')",
    "hangs": "report.add(half=1)\n    import time\n    time.sleep(600)",
    "dies": "report.add(half=1)\n    import os\n    os._exit(7)",
    "spawns": (
        "import subprocess, time\n    child = subprocess.Popen(['sleep', '600'])\n"
        "    report.add(child=child.pid)\n    time.sleep(600)"
    ),
    "context": "report.add(device=context.device, widths=context.amounts.widths, source=str(context.source))",
}
Start = Callable[..., tuple[Context, list[Part], Results]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Make parts of `BODIES`, each with so many seconds."""
    modules, work = tmp_path / "modules", tmp_path / "work"
    modules.mkdir()
    work.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), os.environ.get("PYTHONPATH", "")]))
    for name, body in BODIES.items():
        (modules / f"part_{name}.py").write_text(f"def run(context, report):\n    {body}\n")

    def make(*names: str, seconds: float = 60.0) -> tuple[Context, list[Part], Results]:
        context = Context("cpu", True, tmp_path / "source", work, (), 1, DRY)
        parts = [Part(name, name.title(), f"part_{name}", seconds) for name in names]
        return context, parts, Results(tmp_path / "gpu_check.json", {"device": "cpu"})

    return make


def read(results: Results) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(results.path.read_text())
    return {**value, "parts": {part["name"]: part for part in value["parts"]}}


def test_a_part_that_raises(start: Start) -> None:
    context, parts, results = start("raises", "fine")
    assert not run_parts(parts, context, results, limit=60)
    found = read(results)
    assert found["parts"]["raises"]["status"] == "failed"
    assert found["parts"]["raises"]["figures"] == {"half": 1}
    assert any("no such kernel" in line for line in found["parts"]["raises"]["log"])
    assert found["errors"] == {"raises": "ValueError: no such kernel"}
    assert found["parts"]["fine"]["status"] == "ok"
    assert found["parts"]["fine"]["figures"] == {"answer": 42}
    assert found["finished"]


def test_a_part_that_dies(start: Start) -> None:
    context, parts, results = start("dies", "fine")
    assert not run_parts(parts, context, results, limit=60)
    found = read(results)
    assert found["parts"]["dies"]["status"] == "failed"
    assert "ended with 7" in found["errors"]["dies"]
    assert found["parts"]["dies"]["figures"] == {"half": 1}
    assert found["parts"]["fine"]["status"] == "ok"


def test_a_part_that_hangs(start: Start) -> None:
    context, parts, results = start("hangs", seconds=3.0)
    _, others, _ = start("fine")
    assert not run_parts([*parts, *others], context, results, limit=60)
    found = read(results)
    assert found["parts"]["hangs"]["status"] == "timed out"
    assert found["parts"]["hangs"]["figures"] == {"half": 1}
    assert "more than 3 seconds" in found["errors"]["hangs"]
    assert found["parts"]["fine"]["status"] == "ok"


def test_what_a_part_started_ends_with_it(start: Start) -> None:
    context, parts, results = start("spawns", seconds=3.0)
    run_parts(parts, context, results, limit=60)
    child = read(results)["parts"]["spawns"]["figures"]["child"]
    assert ended(child)


def test_the_limit_of_all_parts(start: Start) -> None:
    """The last one is left out, and says so; none runs longer than what is left."""
    context, parts, results = start("fine", "hangs", "context")
    parts[2] = replace(parts[2], seconds=1.0)  # for which nothing is kept
    began = time.monotonic()
    assert not run_parts(parts, context, results, limit=4)
    found = read(results)
    assert found["parts"]["hangs"]["status"] == "timed out"
    assert found["parts"]["hangs"]["limit_s"] <= 4
    assert found["parts"]["context"]["status"] == "skipped"
    assert "No time" in found["errors"]["context"]
    assert time.monotonic() - began < 60


def test_parts_that_hang_leave_some_to_the_others(start: Start) -> None:
    """Even where the limits of all add up to more than there is."""
    context, parts, results = start("hangs", "fine", "context")
    assert not run_parts(parts, context, results, limit=24)
    found = read(results)
    assert [part["status"] for part in found["parts"].values()] == ["timed out", "ok", "ok"]
    assert found["parts"]["hangs"]["limit_s"] == pytest.approx(24 * (1 - 0.8 * 2 / 3), abs=0.2)


def test_no_part_may_take_what_all_may_take() -> None:
    """Whatever hangs, the ones behind get a turn; with time enough each has all of its own."""
    left = LIMIT
    for number, part in enumerate(PARTS):
        later = sum(other.seconds for other in PARTS[number + 1 :])
        limit = min(part.seconds, _share(part.seconds, later, left))
        assert 2 < limit <= left
        left -= limit
    assert _share(60.0, 100.0, 480.0) > 60.0
    assert _share(60.0, 0.0, 7.0) == 7.0
    assert LIMIT < 480


def test_figures_of_an_earlier_check_are_not_taken(start: Start, tmp_path: Path) -> None:
    """The folder may be one that is kept; a part whose process dies before it begins has no figures."""
    context, parts, results = start("fine")
    (context.work / "parts").mkdir()
    (context.work / "parts" / "fine.json").write_text(json.dumps({"figures": {"answer": 41}, "error": None}))
    (tmp_path / "modules" / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    assert not run_parts(parts, context, results, limit=60)
    found = read(results)["parts"]["fine"]
    assert (found["status"], found["figures"]) == ("failed", {})
    assert "ended with 3" in found["error"]


def test_a_part_is_told_everything(start: Start) -> None:
    context, parts, results = start("context")
    shown: list[str] = []
    assert run_parts(parts, context, results, limit=60, show=lambda outcome: shown.extend(lines_of(outcome)))
    figures = read(results)["parts"]["context"]["figures"]
    assert figures == {"device": "cpu", "widths": list(DRY.widths), "source": str(context.source)}
    assert Context.from_json(context.to_json()) == context
    assert shown[0].startswith("== Context: ok")
    assert any("widths: 1, 2, 5" in line for line in shown)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_whole_is_killed(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    """What was found by then is on the disk: the parts that were done, and of the one that ran what it had reported."""
    context, _, results = start("fine", "spawns")
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(SCRIPTS)!r})\n"
        "from pathlib import Path\n"
        "from gpu_checks import main\n"
        "from gpu_checks.context import Context\n"
        "from gpu_checks.runner import Part, Results, run_parts\n"
        f"context = Context.from_json({context.to_json()!r})\n"
        f"results = Results(Path({str(results.path)!r}), {{}})\n"
        "parts = [Part(name, name, 'part_' + name, 120.0) for name in ('fine', 'spawns')]\n"
        "with main._ends_by_signal():\n"
        "    run_parts(parts, context, results, limit=300)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        child = wait_for(lambda: read(results)["parts"]["spawns"]["figures"]["child"])
        process.send_signal(number)
        process.wait(60)
        found = read(results)
        assert found["parts"]["fine"]["figures"] == {"answer": 42}
        assert found["parts"]["spawns"]["figures"] == {"child": child}
        assert not found["finished"]
        if number == signal.SIGKILL:
            assert found["parts"]["spawns"]["status"] == "running"
        else:
            assert found["parts"]["spawns"]["status"] == "interrupted"
        assert ended(child)
    finally:
        process.kill()
        if not ended(child, 0.0):
            os.killpg(os.getpgid(child), signal.SIGKILL)


def wait_for(get: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while True:
        try:
            return get()
        except (OSError, ValueError, KeyError):
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.05)


def ended(process: int, seconds: float = 10.0) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    end = time.monotonic() + seconds
    while True:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
