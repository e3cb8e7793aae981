"""Many requests of one engine, continuously batched: each answer is bit for bit what it would be alone."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from specrun.models_cache.errors import BackendError, SpecrunError, UsageError
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.batch_row import batch_method
from specrun.runtime.batching.batch_size import choose_batch_size, memory_for_rows
from specrun.runtime.batching.batch_stats import BatchStats
from specrun.runtime.batching.scheduler import Finished, Incoming, Scheduler
from specrun.runtime.engine import Engine, Prompt
from specrun.runtime.kv_shape import KVShape
from specrun.runtime.request import request_options
from specrun.runtime.result import Result
from specrun.runtime.running import RESERVED_TOKENS, Running
from specrun.runtime.stream import Stream

__all__ = ["BatchAnswer", "BatchEngine", "BatchRequest", "BatchStats"]

MOST_ROWS = 256
USUAL_PROMPT = 512  # tokens, for which a batch of unknown requests keeps room besides the answer's


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A prompt, as `Engine.generate` takes it, with its options (`RequestOptions`).

    index: whatever the caller wants back with the answer.
    """

    index: int
    prompt: Prompt
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The result of a request, or the error of this request alone: an over-long prompt, an option that cannot be."""

    index: int
    result: Result | SpecrunError


class BatchEngine:
    """Runs many requests of one engine together.

    >>> requests = [BatchRequest(0, "Name a colour.", {"max_tokens": 8})]    # doctest: +SKIP
    >>> for answer in BatchEngine(engine).run(requests):                    # doctest: +SKIP
    ...     print(answer.index, answer.result)

    batch_size: rows that run at a time; by default as many as the measured costs and the free memory suggest. Where
    the ONNX Runtime build runs one row only it is 1. Rows draft by every method of the engine but lookahead, in chains;
    heads and draft models draft for all rows in one run, where that pays. Builds before 1.32 run rows together on a GPU
    only, in rounds in which none drafts; only n-grams draft there. Greedy and coupled sampling give the text that
    `Engine.generate` gives; under the rejection rule a text depends on the method, and so on the batch.
    """

    def __init__(self, engine: Engine, *, batch_size: int | None = None) -> None:
        if batch_size is not None and (isinstance(batch_size, bool) or not 1 <= batch_size <= MOST_ROWS):
            raise UsageError(f"The batch size must be between 1 and {MOST_ROWS}, not {batch_size}.")
        self._engine = engine
        self._costs = BatchCosts(engine.calibration, ragged=engine.target.ragged)
        self._memory = None if batch_size is not None else memory_for_rows(engine.device)
        if not engine.target.rows_together:
            batch_size = 1
        elif batch_size is None:
            positions = min(engine.context, USUAL_PROMPT + RESERVED_TOKENS)
            row_bytes = KVShape.of_bundle(engine.bundle).kv_bytes(positions)
            batch_size = choose_batch_size(self._costs, row_bytes, self._memory)
        self._stats = BatchStats(batch_size)
        self._answers: Generator[Finished] | None = None

    @property
    def batch_size(self) -> int:
        """Rows that run at a time, at most."""
        return self._stats.batch_size

    @property
    def stats(self) -> BatchStats:
        """A copy of the counters as they stand."""
        return copy.deepcopy(self._stats)

    def run(self, requests: Iterable[BatchRequest | None]) -> Iterator[BatchAnswer]:
        """The answers, in order of completion.

        Requests are read one at a time, each when a row is free for it. Where others run and the next one has not come,
        None may be given instead: the rows go on, and it is asked for again. The engine is held from the first answer
        to the last; closing the iterator ends the requests that run and frees it. Raises BackendError if ONNX Runtime
        fails.
        """
        answers = self._alone(requests) if self.batch_size == 1 else self._together(requests)
        if self._answers is None:
            self._answers = answers
        try:
            with closing(answers):
                for index, result in answers:
                    yield BatchAnswer(index, result)
        finally:
            if self._answers is answers:
                self._answers = None

    def _together(self, requests: Iterable[BatchRequest | None]) -> Generator[Finished]:
        engine = self._engine
        engine.acquire(weakref.WeakMethod(self._end))
        try:
            scheduler = Scheduler(engine, self.batch_size, self._costs, self._stats, memory=self._memory)
            with closing(scheduler.run(self._incoming(requests))) as answers:
                for answer in answers:
                    yield answer
                    engine.keep()
        finally:
            engine.release()

    def _end(self) -> None:
        """What the engine calls when it is closed while answers are being read."""
        if self._answers is not None:
            self._answers.close()

    def _incoming(self, requests: Iterable[BatchRequest | None]) -> Iterator[Incoming | None]:
        for request in requests:
            if request is None:
                yield None
                continue
            try:
                options = request_options(**request.options)
                options = replace(options, method=batch_method(self._engine, options.method))
                prompt = self._engine.encode(request.prompt, system=options.system, raw=options.raw)
                yield request.index, Running(self._engine, options, prompt, batched=True)
            except SpecrunError as error:
                yield request.index, error

    def _alone(self, requests: Iterable[BatchRequest | None]) -> Generator[Finished]:
        for request in requests:
            if request is None:
                continue
            try:
                with closing(Stream(self._engine, request.prompt, request_options(**request.options))) as stream:
                    for _ in stream:
                        continue
                result = stream.result
            except BackendError:
                raise
            except SpecrunError as error:
                self._stats.done += 1
                self._stats.failed += 1
                yield request.index, error
                continue
            self._stats.count_alone(result)
            yield request.index, result
