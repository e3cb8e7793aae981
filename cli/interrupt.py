"""Ctrl-C while text is being written: the round that runs is finished, and what there is counts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Cancellable(Protocol):
    """What can be told to end early."""

    def cancel(self) -> None:
        """End after the round that runs."""
        ...


class Interrupt:
    """Whether Ctrl-C came."""

    def __init__(self) -> None:
        self.came = False


@contextmanager
def cancel_on_interrupt(stream: Cancellable) -> Iterator[Interrupt]:
    """The first Ctrl-C cancels the stream; a second one raises KeyboardInterrupt at once."""
    interrupt = Interrupt()

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupt.came:
            raise KeyboardInterrupt
        interrupt.came = True
        stream.cancel()

    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may set a handler, and whoever started us with Ctrl-C ignored meant it.
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield interrupt
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
