"""The lines of a JSONL file or stream, as bytes: only a line feed ends one."""

from __future__ import annotations

import codecs
import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Final, Protocol

from specrun.models_cache.errors import JobError
from specrun.runtime.jobs.read_ahead import ReadAhead

MOST_BYTES: Final = 64 * 2**20
"""The longest line that is read; of a longer one only its size is kept."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank.

    number: from 1, as an editor counts, blank lines included; data: its bytes without its end, of an over-long line
    the first ones only; size: all its bytes.
    """

    number: int
    data: bytes
    size: int


class Source(Protocol):
    """What a job reads: `digest` (sha256, hex) tells one input from another, `total` counts its lines."""

    name: str
    digest: str
    total: int | None

    def lines(self) -> Iterator[Line]:
        """All lines from the first one on."""
        ...

    def ready(self) -> bool:
        """Whether `lines` gives its next one, or ends, without waiting for what has not come yet."""
        ...


class _Lines(Protocol):
    """What lines are read from."""

    def readline(self, most: int, /) -> bytes: ...


class JsonLines:
    """A seekable JSONL file, measured when it is made; what is appended to it later is not read."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self._stream = stream
        self._end: int | None = None
        hashed = hashlib.sha256()
        size = 0
        stream.seek(0)
        while block := stream.read(2**20):
            hashed.update(block)
            size += len(block)
        self._end = size
        self.digest = hashed.hexdigest()
        self.total: int | None = sum(1 for _ in self.lines())

    def lines(self) -> Iterator[Line]:
        """All lines that are not blank, from the first one on."""
        self._stream.seek(0)
        return read_lines(self._stream, self._end)

    def ready(self) -> bool:
        """It is a file: always."""
        return True


class LineStream:
    """A stream that is read once, as it comes: nobody knows beforehand what it holds, and when."""

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self.name = name
        self.digest = ""
        self.total: int | None = None
        try:
            stream.fileno()
        except io.UnsupportedOperation:  # all of it is there
            self._stream: BinaryIO | ReadAhead = stream
        else:
            self._stream = ReadAhead(stream, name, MOST_BYTES)

    def lines(self) -> Iterator[Line]:
        """The lines that are not blank, as they come."""
        return read_lines(self._stream)

    def ready(self) -> bool:
        """Whether the next line, or the end, has come."""
        return not isinstance(self._stream, ReadAhead) or self._stream.ready()


def read_lines(stream: _Lines, left: int | None = None) -> Iterator[Line]:
    """The lines of a stream that are not blank; at most `left` bytes are read.

    LF and CR LF end a line, and the last line needs no end. A byte order mark at the beginning is dropped.
    """
    number = 0
    while True:
        data = stream.readline(_most(left, MOST_BYTES + 2))
        if not data:
            return
        number += 1
        size, last = len(data), data
        left = None if left is None else left - len(data)
        while not last.endswith(b"\n") and (more := stream.readline(_most(left, 2**20))):
            size += len(more)
            last = last[-1:] + more
            left = None if left is None else left - len(more)
        size -= len(last) - len(_without_end(last))
        data = _without_end(data)
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if size > MOST_BYTES or data.strip():
            yield Line(number, data, size)


def _without_end(data: bytes) -> bytes:
    return data.removesuffix(b"\n").removesuffix(b"\r")


def _most(left: int | None, most: int) -> int:
    return most if left is None else min(left, most)


@contextmanager
def kept(stream: BinaryIO) -> Iterator[BinaryIO]:
    """What a stream that can be read only once holds, in a temporary file. Raises JobError where it has no room."""
    with ExitStack() as stack:
        try:
            copy = stack.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(stream, copy, 2**20)
            copy.flush()
        except OSError as error:
            raise JobError(
                f"The input cannot be kept in the folder for temporary files ({error.strerror}): set TMPDIR to one "
                "with room, or name a file as the input"
            ) from error
        yield copy
