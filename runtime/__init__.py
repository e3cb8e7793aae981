"""A bundle becomes tokens: sessions, KV caches, proposers, acceptance, the loop.

The path of a request: `engine` -> `stream` -> `loop`, which asks `proposers` for draft tokens, runs them in `session`
(over `kv_cache`) and has `chooser` judge them by `acceptance` and `sampling`; `text_stream` makes text of what stands.
Of many requests: `jobs` reads and writes files, `batch` -> `batching` runs the same loop for each row of a pool.
Of many samples of one prompt: `best_of` runs them so behind a prompt that is stored once, and a score chooses.

>>> from specrun.runtime import Engine
>>> with Engine.load("smollm2-135m") as engine:                           # doctest: +SKIP
...     print(engine.generate("Write a haiku about tides.", max_tokens=64).text)
"""

from specrun.runtime.async_stream import AsyncStream
from specrun.runtime.backend import share_threads
from specrun.runtime.batch import BatchAnswer, BatchEngine, BatchRequest, BatchStats
from specrun.runtime.best_of import BestOfResult, Candidate, Score
from specrun.runtime.chat import ChatSession
from specrun.runtime.engine import Engine
from specrun.runtime.grammar import response_format_options
from specrun.runtime.request import METHODS, RequestOptions
from specrun.runtime.result import Memory, Result, SpeculationStats, Timings, Token, Usage
from specrun.runtime.running import Piece
from specrun.runtime.stream import Stream

__all__ = [
    "METHODS",
    "AsyncStream",
    "BatchAnswer",
    "BatchEngine",
    "BatchRequest",
    "BatchStats",
    "BestOfResult",
    "Candidate",
    "ChatSession",
    "Engine",
    "Memory",
    "Piece",
    "RequestOptions",
    "Result",
    "Score",
    "SpeculationStats",
    "Stream",
    "Timings",
    "Token",
    "Usage",
    "response_format_options",
    "share_threads",
]
