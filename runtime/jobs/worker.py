"""What computes the requests of a job: here one engine of this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specrun.models_cache.errors import BackendError, SpecrunError
from specrun.runtime.jobs.answer_line import error_code
from specrun.runtime.jobs.line_request import LineRequest

if TYPE_CHECKING:
    from specrun.runtime.best_of import BestOfResult
    from specrun.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Answer:
    """What the request of a line gave: the JSON of `generate`, or the code and the message of an error."""

    number: int
    body: dict[str, Any] | None
    error: tuple[str, str] | None = None


class Worker(Protocol):
    """Computes requests. `answers` reads them as it needs them and gives answers as they are ready.

    None among them: nothing has come yet, go on with what there is. It comes only while answers are waited for.
    """

    def answers(self, requests: Iterable[LineRequest | None]) -> Iterator[Answer]: ...


class EngineWorker:
    """Requests batched in one engine; batch_size: how many at a time, None for as many as pay."""

    def __init__(self, engine: Engine, batch_size: int | None = None) -> None:
        from specrun.runtime.batch import BatchEngine

        self._engine = engine
        self._batch = BatchEngine(engine, batch_size=batch_size)

    def answers(self, requests: Iterable[LineRequest | None]) -> Iterator[Answer]:
        """The answers in order of completion; closing the iterator stops the work.

        A line that wants several samples has the engine for itself, after those that were begun before it.
        """
        left = iter(requests)
        sampled: list[LineRequest] = []

        def others() -> Iterator[LineRequest | None]:
            for request in left:
                if request is not None and request.samples > 1:
                    sampled.append(request)
                    return
                yield request

        while True:
            yield from self._together(others())
            if not sampled:
                return
            yield self._best_of(sampled.pop())

    def _together(self, requests: Iterator[LineRequest | None]) -> Iterator[Answer]:
        from specrun.runtime.batch import BatchRequest

        listed: dict[int, bool] = {}

        def batch() -> Iterator[BatchRequest | None]:
            for request in requests:
                if request is None:
                    yield None
                    continue
                listed[request.number] = request.listed
                yield BatchRequest(request.number, request.prompt, request.options)

        with closing(self._batch.run(batch())) as found:  # type: ignore[type-var]
            for answer in found:
                result, wanted = answer.result, listed.pop(answer.index)
                if isinstance(result, SpecrunError):
                    yield Answer(answer.index, None, (error_code(result), str(result)))
                    continue
                texts = None
                if wanted:
                    texts = [self._engine.tokenizer.token_text(token.id) for token in result.tokens]
                yield Answer(answer.index, result.to_json(texts))

    def _best_of(self, request: LineRequest) -> Answer:
        try:
            result = self._engine.best_of(request.prompt, n=request.samples, **request.options)
        except BackendError:
            raise
        except SpecrunError as error:
            return Answer(request.number, None, (error_code(error), str(error)))
        return Answer(request.number, result.to_json() | {"choices": choices(result, request)})


def choices(result: BestOfResult, request: LineRequest) -> list[dict[str, Any]]:
    """The answers that a line wants, as the OpenAI format lists them: the samples in order, or the best of more."""
    kept = result.candidates if request.samples == request.choices else result.ranked()[: request.choices]
    found = []
    for place, candidate in enumerate(kept):
        choice: dict[str, Any] = {"index": place, "finish_reason": candidate.finish_reason}
        if isinstance(request.prompt, str):
            choice["text"] = candidate.text
        else:
            choice["message"] = {"role": "assistant", "content": candidate.text}
        if request.listed:
            choice["token_ids"], choice["token_logprobs"] = list(candidate.token_ids), list(candidate.logprobs)
        found.append(choice)
    return found
