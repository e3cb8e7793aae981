"""Runs the parts, each in a process of its own with its own limit, and keeps what they found after each of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from gpu_checks.context import Context
from gpu_checks.files import write_json

POLL_SECONDS: Final = 0.1
KILL_SECONDS: Final = 5.0
LOG_LINES: Final = 25
KEPT: Final = 0.8  # of the time that is, by their limits, that of the parts to come
SCRIPTS: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the check. module: has `run(context, report)`. seconds: how long it may take."""

    name: str
    title: str
    module: str
    seconds: float


@dataclass(slots=True)
class Outcome:
    """What became of a part.

    status: "ok", "failed", "timed out", "skipped" (no time was left), "running", "interrupted". log: the last lines
    that it printed, where it is not ok.
    """

    name: str
    title: str
    limit_s: float
    status: str = "running"
    seconds: float = 0.0
    error: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


class Results:
    """The one JSON file of a check: rewritten whole after each part, and whenever a part has new figures."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.outcomes: list[Outcome] = []
        self._facts = facts
        self._began = time.monotonic()

    def write(self, *, finished: bool = False) -> None:
        """Write everything so far."""
        known = {outcome.name: outcome.figures for outcome in self.outcomes}
        value = {
            "schema_version": 1,
            **self._facts,
            "finished": finished,
            "seconds": round(time.monotonic() - self._began, 1),
            "environment": known.get("environment", {}),
            "errors": {o.name: o.error for o in self.outcomes if o.error is not None},
            "parts": [asdict(outcome) for outcome in self.outcomes],
        }
        write_json(self.path, value)


def run_parts(
    parts: Sequence[Part],
    context: Context,
    results: Results,
    *,
    limit: float,
    patience: float = 1.0,
    show: Callable[[Outcome], None] | None = None,
) -> bool:
    """Run the parts in turn; whether all went well.

    limit: seconds for all of them; a part for which nothing is left is skipped, and one that hangs leaves some to those
    behind it. patience: times the limit of each.
    show: called with each outcome. An exception, or Ctrl-C, ends the part that runs and is raised once the results are
    written.
    """
    end = time.monotonic() + limit
    context_path = context.work / "context.json"
    (context.work / "parts").mkdir(exist_ok=True)
    context_path.write_text(context.to_json(), encoding="utf-8")
    for number, part in enumerate(parts):
        later = sum(other.seconds for other in parts[number + 1 :])
        share = _share(part.seconds, later, end - time.monotonic())
        outcome = Outcome(part.name, part.title, round(min(part.seconds * patience, share), 1))
        results.outcomes.append(outcome)
        if outcome.limit_s <= 1.0:
            outcome.status, outcome.error, outcome.limit_s = "skipped", "No time was left for this part.", 0.0
        else:
            _run(part, context, context_path, outcome, results)
        results.write()
        if show is not None:
            show(outcome)
    results.write(finished=True)
    return all(outcome.status == "ok" for outcome in results.outcomes)


def _share(own: float, later: float, left: float) -> float:
    """How many of the seconds that are left a part may take at most: parts to come keep most of what is theirs.

    Their limits add up to more than there is, as few of them will need what they may take; so where some hang, those
    behind them still get a turn.
    """
    return left * (1 - KEPT * later / (own + later))


def _run(part: Part, context: Context, context_path: Path, outcome: Outcome, results: Results) -> None:
    result_path, log_path = (context.work / "parts" / f"{part.name}.{kind}" for kind in ("json", "log"))
    result_path.unlink(missing_ok=True)  # of an earlier check in the same folder
    began = time.monotonic()
    results.write()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "gpu_checks.child", part.module, str(context_path), str(result_path)],
            stdin=subprocess.PIPE,  # which the part watches, to end when this process does
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=context.work,
            env=_environment(context),
            start_new_session=True,  # so that whatever it starts ends with it
        )
    seen = ""
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            seen = _read(result_path, seen, outcome, results)
            outcome.seconds = round(time.monotonic() - began, 1)
            if process.returncode is not None:
                outcome.status = "ok" if process.returncode == 0 else "failed"
                break
            if outcome.seconds >= outcome.limit_s:
                outcome.status, outcome.error = "timed out", f"It took more than {outcome.limit_s:g} seconds."
                break
    except BaseException:
        outcome.status, outcome.error = "interrupted", "The check was interrupted."
        raise
    finally:
        _end(process)
        if outcome.status != "ok":
            lines = log_path.read_text("utf-8", "replace").splitlines()
            outcome.log = [line for line in lines if line.strip()][-LOG_LINES:]
            if outcome.error is None:
                outcome.error = f"Its process ended with {process.returncode}: {(outcome.log or ['no output'])[-1]}"
        results.write()


def _read(path: Path, seen: str, outcome: Outcome, results: Results) -> str:
    """Take over the figures that the part has written by now; what was read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:  # it has not begun
        return seen
    if text != seen:
        value = json.loads(text)
        outcome.figures, outcome.error = value["figures"], value["error"]
        results.write()
    return text


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its whole group is gone already
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a process for a while: the rest goes on
        process.wait(KILL_SECONDS)


def _environment(context: Context) -> dict[str, str]:
    paths = [context.site, context.work / "import", SCRIPTS]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "SPECRUN_HOME": str(context.work / "home"),
        "HF_HUB_OFFLINE": "1",
        "PIP_NO_INDEX": "1",
    }
