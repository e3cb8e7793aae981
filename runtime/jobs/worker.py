"""What computes the requests of a job: here one engine of this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specrun.models_cache.errors import SpecrunError
from specrun.runtime.jobs.answer_line import error_code
from specrun.runtime.jobs.line_request import LineRequest

if TYPE_CHECKING:
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
        """The answers in order of completion; closing the iterator stops the work."""
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
