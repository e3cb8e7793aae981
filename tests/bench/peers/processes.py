"""Processes that the driver starts: workers that answer requests, and programs that are run to their end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Answer = dict[str, Any]

# What would leak into another Python, or change how many threads a runtime takes.
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")


class BenchError(Exception):
    """Something that the person at the terminal can read and act on."""


class Worker:
    """A running `workers/worker_*.py`. Raises BenchError when it fails, with the last line of what it wrote to its log.

    name: what messages call it. `alive`: whether it can still be asked.
    """

    def __init__(self, name: str, python: Path, script: Path, arguments: list[str], log: Path) -> None:
        self.name = name
        self.alive = True
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [os.fspath(python), os.fspath(script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=None if python == Path(sys.executable) else child_environment(),
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
            self.alive = False
            raise BenchError(f"{self.name} ended early: {last_line(self._log)} (all of it is in {self._log})")
        answer: Answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process; it leaves when its input ends."""
        self.alive = False
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.close()
            self._process.wait(timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            stdout.close()


def child_environment() -> dict[str, str]:
    """This environment without what would leak into another Python, and without a network for the hub."""
    kept = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
    return kept | {"PYTHONNOUSERSITE": "1", "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"}


def call(command: list[str], log: Path, failure: str, variables: Mapping[str, str] | None = None) -> None:
    """Run a program to its end. Raises BenchError(failure) with the last line of its log where it fails."""
    environment = child_environment() | dict(variables or {})
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=environment)
    if done.returncode:
        raise BenchError(f"{failure}: {last_line(log)} (all of it is in {log})")


def last_line(path: Path) -> str:
    """The last line of a log that is not empty."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
