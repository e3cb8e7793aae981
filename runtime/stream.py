"""One request alone: its pieces as they come, and the result at the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from specrun.models_cache.errors import SpecrunError
from specrun.runtime.request import Request
from specrun.runtime.result import Result
from specrun.runtime.running import Piece, Running, Wrap
from specrun.runtime.target_run import alone

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine, Prompt

__all__ = ["Piece", "Stream", "Wrap"]


class Stream:
    """The pieces of one request, in order; afterwards `result`. `cancel`, or leaving the loop, ends it early.

    The engine is held from the first piece to the last; a stream that is closed half-way, or dropped, frees it.
    However a stream ends, the engine stays usable.
    """

    def __init__(self, engine: Engine, prompt: Prompt, request: Request, *, wrap: Wrap | None = None) -> None:
        """wrap: makes of the request's own proposer, None for plain decoding, the one that the loop asks."""
        method = engine.method_of(request)
        self.prompt_tokens = engine.encode(prompt, system=request.system, raw=request.raw)
        # The running part refers neither to the stream nor to its generator, so a dropped stream ends at once.
        self._running = Running(engine, replace(request, method=method), self.prompt_tokens, wrap)
        self._pieces = _pieces(engine, self._running, weakref.WeakMethod(self.close))

    def __iter__(self) -> Iterator[Piece]:
        yield from self._pieces  # leaving the loop closes them

    def __next__(self) -> Piece:
        return next(self._pieces)

    def cancel(self) -> None:
        """End the stream after the round that is running; may be called from any thread."""
        self._running.cancelled.set()

    def close(self) -> None:
        """End the stream now and free the engine; for the thread that reads it."""
        self._pieces.close()
        self._running.done = True

    @property
    def done(self) -> bool:
        """Whether the stream has ended."""
        return self._running.done

    @property
    def result(self) -> Result:
        """The whole result, or what there is of it if the stream was closed early."""
        if not self.done:
            raise SpecrunError("The stream has not ended: read it to its end, or close it, before asking its result.")
        return self._running.result()


def _pieces(engine: Engine, running: Running, end_stream: weakref.WeakMethod[Callable[[], None]]) -> Generator[Piece]:
    """The pieces of a request that the engine runs by itself; `end_stream` is what the engine calls to end it early."""
    try:
        engine.acquire(end_stream)
        try:
            with closing(alone(engine.target, running.steps(engine))) as pieces:
                for piece in pieces:
                    yield piece
                    engine.keep()
        finally:
            running.memory = engine.memory()
            engine.release()
    finally:
        running.done = True
