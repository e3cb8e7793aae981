"""Requests for asyncio: each runs in the engine's one worker thread, in the order in which they were begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from specrun.models_cache.errors import SpecrunError
from specrun.runtime.request import Request
from specrun.runtime.result import Result
from specrun.runtime.stream import Piece, Stream

if TYPE_CHECKING:  # the first two take as long to import as much of the runtime, and few programs need them
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    from specrun.runtime.engine import Engine, Prompt


class Worker:
    """The thread that an engine's asynchronous requests run in, one after another; it begins with the first of them."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> None:
        """Do this after all that was submitted before; SpecrunError after `close`."""
        with self._lock:
            if self._closed:
                raise SpecrunError("The engine is closed: load the model again.")
            if self._executor is None:
                from concurrent.futures import ThreadPoolExecutor

                self._executor = ThreadPoolExecutor(1, thread_name_prefix="specrun")
            self._executor.submit(work)

    def close(self) -> None:
        """Take nothing more; what was submitted is still done. May be called twice."""
        with self._lock:
            self._closed = True
            if self._executor is not None:
                self._executor.shutdown(wait=False)


class AsyncStream:
    """The pieces of one request for `async for`; afterwards `result`. The event loop is never blocked.

    It begins when the first piece is asked for, and waits for its turn then. When the task that reads it is cancelled,
    when it is dropped half-read, or closed, the request ends after the round that runs, and the engine stays usable.
    """

    def __init__(self, engine: Engine, prompt: Prompt, request: Request) -> None:
        self._job: _Job | None = None
        self._make = lambda: Stream(engine, prompt, request)
        self._worker = engine.worker
        self._done = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        from asyncio import CancelledError

        if self._done:
            raise StopAsyncIteration
        job = self._started()
        try:
            item = await job.items.get()
        except CancelledError:
            job.cancel()
            raise
        if isinstance(item, Piece):
            return item
        self._done = True
        if item is None:
            raise StopAsyncIteration
        raise item

    @property
    def done(self) -> bool:
        """Whether the stream has ended."""
        return self._done

    @property
    def result(self) -> Result:
        """The whole result, or what there is of it if the stream was closed early."""
        if not self._done or self._job is None or self._job.stream is None:
            raise SpecrunError("The stream has not ended: read it to its end, or close it, before asking its result.")
        return self._job.stream.result

    async def aclose(self) -> None:
        """End the request, and wait until the engine is free of it; what came so far stays in `result`."""
        if self._job is not None and not self._done:
            self._job.cancel()
            while isinstance(await self._job.items.get(), Piece):
                continue
        self._done = True

    def __del__(self) -> None:
        if self._job is not None:
            self._job.cancel()

    def _started(self) -> _Job:
        if self._job is None:
            from asyncio import get_running_loop

            self._job = _Job(self._make, get_running_loop())
            self._worker.submit(self._job.run)
        return self._job


class _Job:
    """What the worker thread does of a request. It does not refer to the `AsyncStream`, so a dropped one ends it."""

    def __init__(self, make: Callable[[], Stream], loop: asyncio.AbstractEventLoop) -> None:
        from asyncio import Queue

        self.items: Queue[Piece | BaseException | None] = Queue()
        self.stream: Stream | None = None
        self._make = make
        self._loop = loop
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the request after the round that runs; any thread."""
        self._cancelled.set()
        if self.stream is not None:
            self.stream.cancel()

    def run(self) -> None:
        """Make the stream and read it to its end."""
        end: BaseException | None = None
        try:
            if not self._cancelled.is_set():
                stream = self.stream = self._make()
                if self._cancelled.is_set():
                    stream.cancel()
                for piece in stream:
                    if not self._deliver(piece):
                        stream.cancel()
        except BaseException as error:
            end = error
        self._deliver(end)

    def _deliver(self, item: Piece | BaseException | None) -> bool:
        """Hand something to the reader; False if its event loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self.items.put_nowait, item)
        except RuntimeError:
            return False
        return True
