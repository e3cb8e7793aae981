"""Where answers go: as they come, or in the order of the input, where those that come early wait."""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO, Final, Literal, Protocol

from specrun.models_cache.errors import JobError
from specrun.runtime.jobs.journal import Journal

Order = Literal["input", "completion"]
ORDERS: Final[tuple[Order, ...]] = ("input", "completion")


class Output(Protocol):
    """What a job writes to. `done` counts the lines that are kept, waiting ones included, `failed` those with errors.

    expect: told of each line of the input in turn; whether its answer is still wanted. put: takes an answer.
    """

    @property
    def done(self) -> int: ...

    @property
    def failed(self) -> int: ...

    def expect(self, number: int) -> bool: ...

    def put(self, number: int, data: bytes, *, failed: bool) -> None: ...

    def finish(self) -> None:
        """All answers are there."""

    def close(self) -> None:
        """Have on the disk what there is."""


class CompletionOutput:
    """Lines in the order in which they are ready."""

    def __init__(self, main: Journal) -> None:
        self._main = main
        self._kept: set[int] = set()
        self.failed = 0
        for written, _, _ in main.recover():
            self._kept.add(written.number)
            self.failed += written.failed
        self.done = len(self._kept)

    def expect(self, number: int) -> bool:
        return number not in self._kept

    def put(self, number: int, data: bytes, *, failed: bool) -> None:
        self._main.append(data)
        self.done += 1
        self.failed += failed

    def finish(self) -> None:
        self._main.append(b"")  # an output without lines is a file too

    def close(self) -> None:
        self._main.close()


class InputOutput:
    """Lines in the order of the input: `main` is always its beginning, what came early waits in `early`.

    numbers: gives the numbers of the input's lines in order.
    """

    def __init__(self, main: Journal, early: Journal, numbers: Callable[[], Iterator[int]]) -> None:
        self._main = main
        self._early = early
        self._places: dict[int, tuple[int, int]] = {}  # of waiting answers in `early`
        self._wanted: deque[int] = deque()  # lines that were read and are not in `main`
        self._last = 0  # the last number in `main`
        self.done = self.failed = 0
        for written, _, _ in main.recover(numbers()):
            self._last = written.number
            self.done += 1
            self.failed += written.failed
        for written, at, length in early.recover():
            if written.number > self._last:
                self._places[written.number] = at, length
                self.done += 1
                self.failed += written.failed
        for number in numbers() if self._places else ():
            if number > self._last and self.expect(number):
                self._wanted.clear()
                break

    def expect(self, number: int) -> bool:
        if number <= self._last:
            return False
        self._wanted.append(number)
        waits = number in self._places
        self._move()
        return not waits

    def put(self, number: int, data: bytes, *, failed: bool) -> None:
        if self._wanted[0] == number:
            self._main.append(data)
            self._wanted.popleft()
            self._last = number
            self._move()
        else:
            self._places[number] = self._early.append(data), len(data)
        self.done += 1
        self.failed += failed

    def finish(self) -> None:
        self._main.append(b"")
        self._main.sync()
        self._early.remove()

    def close(self) -> None:
        self._main.close()
        self._early.close()

    def _move(self) -> None:
        """Take over what waited for its turn."""
        moved = False
        while self._wanted and self._wanted[0] in self._places:
            self._last = self._wanted.popleft()
            self._main.append(self._early.read(*self._places.pop(self._last)))
            moved = True
        if moved and not self._places:
            self._main.sync()  # before the only other copy goes
            self._early.clear()


class StreamOutput:
    """Lines to a stream that nobody can go on with; of an order, early ones wait in memory."""

    def __init__(self, stream: BinaryIO, order: Order) -> None:
        self._stream = stream
        self._name = getattr(stream, "name", "the output")
        self._wanted: deque[int] = deque()
        self._waiting: dict[int, bytes] = {}
        self._in_order = order == "input"
        self.done = self.failed = 0

    def expect(self, number: int) -> bool:
        if self._in_order:
            self._wanted.append(number)
        return True

    def put(self, number: int, data: bytes, *, failed: bool) -> None:
        self.done += 1
        self.failed += failed
        if not self._in_order:
            self._write(data)
            return
        self._waiting[number] = data
        while self._wanted and self._wanted[0] in self._waiting:
            self._write(self._waiting.pop(self._wanted.popleft()))

    def finish(self) -> None:
        return

    def close(self) -> None:
        return

    def _write(self, data: bytes) -> None:
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader has gone
                raise
            raise JobError(f"{self._name} takes no more ({error.strerror}): mend that and start again") from error
