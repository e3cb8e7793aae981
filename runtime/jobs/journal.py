"""A file that only grows, a line a write; what a crash left of its last lines is cut off when it is opened again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from specrun.runtime.jobs.answer_line import Written, read_written
from specrun.runtime.jobs.disk import disk_errors, sync

SYNC_S = 1.0  # the most work that a power cut may cost


class Journal:
    """Lines of answers in a file. Each is on the way to the disk when `append` returns, and on it after `sync`.

    output: the file that errors are told of. Raises JobError.
    """

    def __init__(self, path: Path, output: Path) -> None:
        self.path = path
        self._output = output
        self._handle: int | None = None
        self._end = 0
        self._synced = time.monotonic()
        self._dirty = False

    def recover(self, expected: Iterator[int] | None = None) -> Iterator[tuple[Written, int, int]]:
        """The whole lines with their places (offset, length in bytes); what follows the last one is cut off.

        expected: the numbers that the lines must have, in order; by default each number may come once.
        """
        self._end = 0
        seen: set[int] = set()
        with disk_errors(self._output):
            if not self.path.exists():
                return
            with self.path.open("rb") as stream:
                for data in stream:
                    written = read_written(data)
                    if written is None or written.number in seen:
                        break
                    if expected is not None and next(expected, None) != written.number:
                        break
                    if expected is None:
                        seen.add(written.number)
                    yield written, self._end, len(data)
                    self._end += len(data)
            if self.path.stat().st_size > self._end:
                os.truncate(self.path, self._end)
                sync(self.path)

    def append(self, data: bytes) -> int:
        """Write a line; its offset."""
        at = self._end
        with disk_errors(self._output):
            handle = self._open()
            try:
                written = 0
                while written < len(data):
                    written += os.write(handle, data[written:])
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, at)
                raise
            self._end += len(data)
            self._dirty = True
            if time.monotonic() - self._synced >= SYNC_S:
                self.sync()
        return at

    def read(self, at: int, length: int) -> bytes:
        """The bytes of a line that was written."""
        with disk_errors(self._output), self.path.open("rb") as stream:
            stream.seek(at)
            return stream.read(length)

    def clear(self) -> None:
        """Drop all lines."""
        with disk_errors(self._output):
            if self._end:
                os.ftruncate(self._open(), 0)
                self._end = 0

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with disk_errors(self._output):
            if self._dirty and self._handle is not None:
                os.fsync(self._handle)
            self._dirty = False
            self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close the file."""
        try:
            self.sync()
        finally:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def remove(self) -> None:
        """Close and delete the file."""
        self.close()
        with disk_errors(self._output):
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> int:
        if self._handle is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            new = not self.path.exists()
            self._handle = os.open(self.path, flags, 0o666)
            if new:
                sync(self.path.parent)
        return self._handle
