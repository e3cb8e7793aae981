"""A score that an external command gives."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Final

from specrun.models_cache.errors import ScoreError, UsageError
from specrun.runtime.best_of.candidates import Candidate
from specrun.runtime.best_of.function import checked_number

SECONDS: Final = 60.0
_MOST_OUTPUT: Final = 1 << 16  # that is read
_MOST_WRITTEN: Final = 1 << 26  # before the command is ended
_TICK: Final = 0.05


class CommandScore:
    """What a command prints for each candidate: one JSON object on its stdin, a number on its stdout.

    The object has `prompt`, `text` and `index`. The command runs once a candidate and without a shell, its words split
    as a shell splits them. seconds: how long it may take each time. Raises UsageError for a command without words.
    """

    name = "command"

    def __init__(self, command: str | Sequence[str], *, seconds: float = SECONDS) -> None:
        try:
            words = shlex.split(command, posix=os.name != "nt") if isinstance(command, str) else list(command)
        except ValueError as error:
            raise UsageError(f"The command {command!r} is not in words ({error}): mend its quotes.") from None
        if not words:
            raise UsageError("The score's command is empty: give one, as in command:./rate.py.")
        self._words = words
        self._seconds = seconds

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`. Raises ScoreError: not found, a failure, too slow, or something else than a number printed."""
        return [self._score(prompt, candidate) for candidate in candidates]

    def _score(self, prompt: str, candidate: Candidate) -> float:
        task = json.dumps({"prompt": prompt, "text": candidate.text, "index": candidate.index}).encode("ascii")
        what = f"The score's command {self._words[0]!r}"
        # Files, not pipes: nothing that the command leaves behind can hold them open.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(task + b"\n")
            given.seek(0)
            try:
                process = subprocess.Popen(self._words, stdin=given, stdout=out, stderr=err, start_new_session=True)
            except OSError as error:
                raise ScoreError(f"{what} cannot be started: {error.strerror or error}.") from error
            try:
                code = self._wait(process, (out, err))
            except ScoreError as error:
                raise ScoreError(f"{what} {error} for candidate {candidate.index}.") from None
            finally:
                _kill(process)
            if code:
                said = _start(err).strip().splitlines()
                reason = f": {said[-1]}" if said else "."
                raise ScoreError(f"{what} fails with exit code {code} for candidate {candidate.index}{reason}")
            text = _start(out).strip()
        try:
            number = float(text)
        except ValueError:
            raise ScoreError(
                f"{what} printed {text!r:.80} for candidate {candidate.index}: it must print one number."
            ) from None
        return checked_number(number, f"{what} printed", candidate.index)

    def _wait(self, process: subprocess.Popen[bytes], written: Sequence[IO[bytes]]) -> int:
        """Its exit code. Raises ScoreError for one that takes too long, or would fill the disk."""
        end = time.monotonic() + self._seconds
        while True:
            try:
                return process.wait(min(_TICK, max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                if any(os.fstat(file.fileno()).st_size > _MOST_WRITTEN for file in written):
                    raise ScoreError(f"prints more than {_MOST_WRITTEN >> 20} MB") from None
                if time.monotonic() >= end:
                    raise ScoreError(f"takes more than {self._seconds:g} seconds") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it started; its group still exists while it is not waited for, or its children live."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            process.poll()  # nobody is left in the group
    else:
        process.kill()
    process.wait()


def _start(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode("utf-8", "replace")
