"""A stream that a thread reads, so that nobody who has something to compute must wait for lines that have not come."""

from __future__ import annotations

import os
from collections import deque
from queue import Empty, Queue
from threading import Thread
from typing import BinaryIO, Final

from specrun.models_cache.errors import JobError

_BLOCK: Final = 2**16
_BLOCKS: Final = 16  # that wait to be taken, at most


class ReadAhead:
    """`readline` of a stream that has a descriptor, and whether it would have to wait.

    name, most: what the stream is called, and how many bytes are kept of a line whose end has not come.
    """

    def __init__(self, stream: BinaryIO, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._blocks: Queue[bytes | OSError] = Queue(_BLOCKS)
        self._pieces: deque[bytes] = deque()  # of lines; only the last one may have no line feed, or parts of one line
        self._size = 0
        self._lines = 0  # whole ones in `_pieces` that are not blank
        self._came = self._read = False  # whether there was text in the line that comes, and in the one that is read
        self._ended = False
        # A descriptor of its own: closing the stream must not give its number to another file that we read then.
        arguments = os.dup(stream.fileno()), self._blocks
        Thread(target=_fill, args=arguments, name="specrun-input", daemon=True).start()

    def ready(self) -> bool:
        """Whether a line that is not blank is there, or the end, or more of a line than is kept."""
        while not (self._lines or self._ended or self._size > self._most):
            try:
                self._take(self._blocks.get_nowait())
            except Empty:
                return False
        return True

    def readline(self, most: int) -> bytes:
        """At most so many bytes of a line, its line feed included; b"" at the end. Raises JobError."""
        found: list[bytes] = []
        while most and not (found and found[-1].endswith(b"\n")):
            if not self._pieces:
                if self._ended:
                    break
                self._take(self._blocks.get())
                continue
            piece = self._pieces.popleft()
            if len(piece) > most:
                self._pieces.appendleft(piece[most:])
                piece = piece[:most]
            found.append(piece)
            most -= len(piece)
            self._size -= len(piece)
            self._read = self._read or bool(piece.strip())
            if piece.endswith(b"\n"):
                self._lines -= self._read
                self._read = False
        return b"".join(found)

    def _take(self, block: bytes | OSError) -> None:
        if isinstance(block, OSError):
            self._ended = True
            raise JobError(f"{self._name} cannot be read ({block.strerror}): mend that and start again") from block
        self._ended = not block
        self._size += len(block)
        *whole, rest = block.split(b"\n")
        for piece in whole:
            self._pieces.append(piece + b"\n")
            self._lines += self._came or bool(piece.strip())
            self._came = False
        if rest:
            self._pieces.append(rest)
            self._came = self._came or bool(rest.strip())


def _fill(descriptor: int, blocks: Queue[bytes | OSError]) -> None:
    """Read to the end, as fast as blocks are taken."""
    try:
        while block := os.read(descriptor, _BLOCK):
            blocks.put(block)
        blocks.put(b"")
    except OSError as error:
        blocks.put(error)
    finally:
        os.close(descriptor)
