"""Many requests of one engine: here one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specrun.models_cache.errors import SpecrunError
from specrun.runtime.engine import Engine, Prompt
from specrun.runtime.result import Result


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request; `index` is whatever the caller wants back with the answer, `options` are those of `RequestOptions`."""

    index: int
    prompt: Prompt
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What a request gave: its result, or the error of this request alone."""

    index: int
    result: Result | SpecrunError


class BatchEngine:
    """Runs many requests of one engine."""

    def __init__(self, engine: Engine, *, batch_size: int | None = None) -> None:
        self._engine = engine
        self._batch_size = batch_size

    def run(self, requests: Iterable[BatchRequest]) -> Iterator[BatchAnswer]:
        """The answers as they are ready; `requests` is read as it is needed."""
        for request in requests:
            result: Result | SpecrunError
            try:
                result = self._engine.generate(request.prompt, **request.options)
            except SpecrunError as error:
                result = error
            yield BatchAnswer(request.index, result)
