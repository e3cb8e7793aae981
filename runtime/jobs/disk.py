"""The files of a job: where they lie, their lock, and the one boundary where errors of the disk become JobError."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specrun.models_cache.errors import JobError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The output and what stands beside it.

    output: what the user named; job: whose it is; early: answers that wait for those of earlier lines;
    journal: the lines of an output that is no JSONL; lock: held while a process works on the output.
    """

    output: Path

    @property
    def job(self) -> Path:
        return self._beside("job")

    @property
    def early(self) -> Path:
        return self._beside("job.early")

    @property
    def journal(self) -> Path:
        return self._beside("job.lines")

    @property
    def lock(self) -> Path:
        return self._beside("job.lock")

    def _beside(self, ending: str) -> Path:
        return self.output.with_name(f"{self.output.name}.{ending}")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into JobError; `path` is the output that it is told of."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise JobError(
                f"{path} cannot grow ({error.strerror}): make room and give the same command again; nothing is lost"
            ) from error
        if error.errno == errno.EPIPE:
            raise
        place = error.filename if isinstance(error.filename, str) else path
        raise JobError(f"{place} cannot be written or read ({error.strerror}): mend that and try again") from error


@contextmanager
def hold_output(paths: JobPaths) -> Iterator[None]:
    """Hold the lock of an output; it dies with its process. Raises JobError where another process holds it."""
    import filelock

    with disk_errors(paths.output):
        lock = filelock.FileLock(paths.lock)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise JobError(
                f"{paths.output} is being written by another specrun: wait for it to end, or name another output"
            ) from None
    try:
        yield
    finally:
        lock.release()


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file so that after a crash the old or the new one is there."""
    with staged(path) as part, part.open("wb") as stream:
        stream.write(data)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """The name of a file to write, which takes the place of `path` when all of it is on the disk."""
    part = path.with_name(f".{path.name}.part")  # of whoever holds the lock; one that a crash left is written over
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
