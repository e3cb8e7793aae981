"""A process that answers requests, one JSON object a line: the caller's side and the loop of the process itself.

Only the standard library is used, since both ends may run in different environments. Between requests a process sleeps
in a read; how much processor time it used there all the same is counted, so that a spinning one shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Answer = dict[str, Any]


class BenchError(Exception):
    """Something that the person at the terminal can read and act on."""


class Worker:
    """A running `worker_*.py`. Raises BenchError when it fails, with the last line of what it wrote to its log."""

    def __init__(self, python: Path, script: Path, arguments: list[str], log: Path) -> None:
        self.name = script.stem
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [os.fspath(python), os.fspath(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=child_environment(),
            )

    def ask(self, command: str, **values: Any) -> Answer:
        """Send a request and wait for its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps({"command": command, **values}) + "\n")
            stdin.flush()
            line = stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise BenchError(f"{self.name} ended early: {last_line(self._log)} (all of it is in {self._log})")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process; it leaves when its input ends."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def child_environment() -> dict[str, str]:
    """This environment without what would leak into another Python, and without a network for the hub."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"}


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def serve(commands: dict[str, Callable[..., Answer]]) -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    idle_s = idle_cpu_s = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle_s += time.perf_counter() - wall
        idle_cpu_s += time.process_time() - cpu
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer = commands[command](**request)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        answer |= {"idle_s": idle_s, "idle_cpu_s": idle_cpu_s}
        wall, cpu = time.perf_counter(), time.process_time()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
