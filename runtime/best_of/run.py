"""Best of N: the prompt is read once, N samples are decoded behind it together, and a score chooses one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime import cost_model
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.batch_row import batch_method, solo_reason
from specrun.runtime.batching.batch_size import memory_for_rows
from specrun.runtime.batching.batch_stats import BatchStats
from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.batching.scheduler import Incoming, Scheduler
from specrun.runtime.best_of.candidates import Candidate, Score, is_number
from specrun.runtime.best_of.likelihood import LogprobScore
from specrun.runtime.best_of.limits import MOST_ROWS, MOST_SAMPLES, TEMPERATURE
from specrun.runtime.best_of.prefix_graph import keeps_prefix
from specrun.runtime.best_of.prefix_pool import PrefixPool
from specrun.runtime.best_of.prefix_session import SINK, Prefix
from specrun.runtime.best_of.result import (
    BestOfMemory,
    BestOfResult,
    BestOfTimings,
    choose,
    merged,
)
from specrun.runtime.best_of.sample_row import SampleRow
from specrun.runtime.best_of.siblings import SiblingTexts, sibling_estimate
from specrun.runtime.kv_shape import KVShape
from specrun.runtime.proposers.eagle import WINDOW
from specrun.runtime.request import Request, RequestOptions, request_options
from specrun.runtime.result import Result, Usage
from specrun.runtime.running import RESERVED_TOKENS, Running
from specrun.runtime.session import PREFILL_CHUNK

if TYPE_CHECKING:
    from specrun.runtime.best_of.prefix_graph import PrefixGraph
    from specrun.runtime.engine import Engine, Prompt

_OWN: Final = ("n", "score", "prune", "budget_tokens", "budget_s", "certainties", "right", "progress")
_KEPT_KS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: samples that ended, of how many, and tokens of all."""

    done: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Read:
    """What reading a prompt gave: logits f32 [vocabulary] after it, features f32 [n, ...] of its last n tokens."""

    logits: NDArray[np.float32]
    features: NDArray[np.float32]


class BestOf:
    """One call of `Engine.best_of`, which says what it takes; `cancel` ends it early."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        options: RequestOptions,
        *,
        n: int = 16,
        score: Score | None = None,
        prune: bool = False,
        budget_tokens: int | None = None,
        budget_s: float | None = None,
        certainties: bool = False,
        right: Callable[[Candidate], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.score: Score = LogprobScore() if score is None else score
        if not callable(getattr(self.score, "scores", None)):
            raise UsageError(f"A score is an object such as VoteScore(), not {score!r:.60}.")
        self._request = _checked(engine, options, n, certainties or self.score.name == "certainty")
        self._bound: Callable[[Sequence[float], int], float | None] | None = None
        if prune:
            self._bound = getattr(self.score, "bound", None)
            if self._bound is None:
                raise UsageError(f"Score '{self.score.name}' cannot tell early who cannot win: leave prune out.")
        if budget_tokens is not None and not (is_number(budget_tokens) and budget_tokens >= 1):
            raise UsageError(f"budget_tokens must be 1 or more, not {budget_tokens!r}.")
        if budget_s is not None and not (is_number(budget_s) and budget_s > 0):
            raise UsageError(f"budget_s must be above 0, not {budget_s!r}.")
        self._budget_tokens, self._budget_s = budget_tokens, budget_s
        self._engine, self._right, self._progress = engine, right, progress
        self._prompt = engine.encode(prompt, system=self._request.system, raw=self._request.raw)
        self._said = _said(prompt)
        self._runnings = [
            Running(engine, replace(self._request, sample_index=index), self._prompt) for index in range(n)
        ]
        context, limit = engine.context, self._request.options.max_tokens
        room = context - len(self._prompt)
        self._most_tokens = room if limit is None else min(limit, room)
        if self._most_tokens < 1:
            raise UsageError("There is nothing to choose from without tokens: give max_tokens of 1 or more.")
        self._cancelled = threading.Event()
        self._results: dict[int, Result] = {}
        self._best = float("-inf")  # of the samples that ended, where `prune` asks
        self._pruned: list[int] = []
        self._cut: list[int] = []
        self._over = False  # a budget is spent
        self.scoring = False
        """Decoding is over, and `cancel` changes nothing more."""
        self._start = 0.0

    def cancel(self) -> None:
        """End all samples after the run that is under way; from any thread. The result has what there is."""
        self._cancelled.set()
        for running in self._runnings:
            if not running.decided:  # its prompt may be being read, and no round comes before that ends
                running.cancelled.set()

    def run(self) -> BestOfResult:
        """Decode and choose. The engine is held while decoding, and not while scoring."""
        engine = self._engine
        engine.acquire()
        try:
            self._start = time.perf_counter()
            stats = BatchStats(0)
            behind = self._behind_prefix if keeps_prefix(engine.bundle, engine.device) else self._behind_copies
            exact, cached, memory = behind(stats)
        finally:
            engine.release()
        sampling = self._request.options.sampling
        drawn = sampling.mode == "rejection" and not sampling.greedy
        candidates = self._candidates()
        self.scoring = True
        began = time.perf_counter()
        scores = self.score.scores(self._said, candidates) if candidates else []
        if len(scores) != len(candidates):
            raise SpecrunError(
                f"Score '{self.score.name}' gave {len(scores)} numbers for {len(candidates)} candidates."
            )
        results = [self._results[candidate.index] for candidate in candidates]
        return BestOfResult(
            winner=choose(candidates, scores),
            candidates=tuple(candidates),
            scores=tuple(scores),
            score=self.score.name,
            model=engine.bundle.manifest.name,
            method=str(self._request.method),
            exactness="distribution" if drawn else "bitwise" if exact else "rounding",
            seed=None if sampling.greedy else sampling.seed,
            usage=Usage(len(self._prompt), sum(len(candidate.token_ids) for candidate in candidates), cached),
            timings=BestOfTimings(engine.load_s, stats.prefill_s, stats.decode_s, time.perf_counter() - began),
            rounds=stats.rounds,
            speculation=merged([result.speculation for result in results]),
            memory=memory,
            pruned=tuple(sorted(self._pruned)),
            cut=tuple(sorted(self._cut)),
            pass_at_k=self._pass_at_k(candidates),
        )

    def _behind_prefix(self, stats: BatchStats) -> tuple[bool, int, BestOfMemory]:
        """Decode behind a prompt that is stored once: (whether texts are exact, tokens read before, memory)."""
        engine = self._engine
        graph = engine.prefix_graph()
        exact = graph.rule.exact and engine.calibration.rule.exact
        memory = BestOfMemory(engine.bundle.weights_bytes, 0, 0, 0)
        began = time.perf_counter()
        try:
            read, cached = self._read_prompt()
            stats.prefill_s = time.perf_counter() - began
            if read is not None:
                engine.target.fit(len(self._prompt))
                memory = self._decode(graph, Prefix.of_cache(engine.target.cache), read, stats)
        finally:
            engine.finish_request(replace(self._request, method="none"), [*self._prompt, 0], drafted=False)
        return exact, cached, memory

    def _behind_copies(self, stats: BatchStats) -> tuple[bool, int, BestOfMemory]:
        """The same in rows of a batch, which read the prompt once and copy its keys and values.

        For models without the graph of a prefix that is stored once; texts are those of `Engine.generate`.
        """
        engine = self._engine
        rows, free = min(len(self._runnings), MOST_ROWS), memory_for_rows(engine.device)
        if free is not None:
            target, wanted = engine.target, len(self._prompt) + self._most_tokens + engine.target.spare
            positions = target.cache.buffers.capacity(wanted, target.positions, rows)
            rows = max(1, min(rows, free // KVShape.of_bundle(engine.bundle).kv_bytes(positions)))
        rows = rows if engine.target.rows_together else 1
        pool = RowPool(engine.target, rows)
        position_bytes = pool.position_bytes  # while there are buffers
        taken = rows * position_bytes * self._schedule(pool, stats)
        memory = BestOfMemory(engine.bundle.weights_bytes, 0, taken, taken)
        return engine.calibration.batch_exactness == "bitwise", 0, memory

    def _read_prompt(self) -> tuple[_Read | None, int]:
        """(what reading the prompt gave, None if it was cancelled; tokens that were read before)."""
        engine, prompt = self._engine, self._prompt
        cached = engine.prepare(prompt, len(prompt))
        if str(self._request.method).startswith("eagle"):  # its slots of the prompt's end are written anew
            cached = min(cached, max(0, len(prompt) - 1 - WINDOW))
            engine.target.rewind_to(cached)
        read: _Read | None = None
        for start in range(cached, len(prompt), PREFILL_CHUNK):
            if self._cancelled.is_set():
                return None, cached
            logits = engine.target.prefill(prompt[start : start + PREFILL_CHUNK])[0].copy()
            new = engine.target.features
            features = new.copy() if read is None else np.concatenate([read.features, new])
            read = _Read(logits, features[-1 - WINDOW :])
        return read, cached

    def _decode(self, graph: PrefixGraph, prefix: Prefix, read: _Read, stats: BatchStats) -> BestOfMemory:
        """Decode all samples; what the buffers took."""
        engine, sizes = self._engine, self._engine.bundle.manifest.sizes
        slot_bytes = prefix.nbytes // prefix.length
        rows = min(len(self._runnings), MOST_ROWS)
        free = memory_for_rows()
        if free is not None:
            rows = max(1, min(rows, free // (slot_bytes * (SINK + self._most_tokens))))
        session = graph.session(prefix, rows, self._most_tokens, now=min(self._most_tokens, RESERVED_TOKENS))
        pool = PrefixPool(session, rows, read.logits, read.features)
        largest = max(self._schedule(pool, stats), SINK)
        shape = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * np.dtype(np.float32).itemsize
        return BestOfMemory(
            engine.bundle.weights_bytes,
            prefix.nbytes,
            rows * largest * shape,
            rows * (prefix.length + largest - SINK) * shape,
        )

    def _schedule(self, pool: RowPool, stats: BatchStats) -> int:
        """Decode all samples in the rows of a pool; the most positions that a row had room for."""
        engine, rows = self._engine, pool.cache.batch
        stats.batch_size = rows
        texts = SiblingTexts(self._prompt, engine.drafting.table.max_n, engine.bundle.manifest.special_ids.eos)
        make_row = partial(SampleRow, texts=texts, estimate=sibling_estimate())
        largest = 0

        def before_round() -> None:
            nonlocal largest
            largest = max(largest, pool.cache.capacity)
            self._look()

        costs = BatchCosts(engine.calibration, ragged=engine.target.ragged)
        scheduler = Scheduler(engine, rows, costs, stats, pool=pool, make_row=make_row, before_round=before_round)
        with closing(scheduler.run(self._incoming())) as answers:
            for index, result in answers:
                if isinstance(result, SpecrunError):
                    raise result
                largest = max(largest, pool.cache.capacity)
                if result.token_ids or result.finish_reason != "cancelled":
                    self._ended(index, result)
        return largest

    def _incoming(self) -> Iterator[Incoming]:
        for index, running in enumerate(self._runnings):
            if self._over or self._cancelled.is_set():
                return
            yield index, running

    def _look(self) -> None:
        """Before each round: end the samples that need not, or may not, go on."""
        tokens = sum(running.decided for running in self._runnings)
        if self._progress is not None:
            self._progress(Progress(len(self._results), len(self._runnings), tokens))
        spent = self._budget_tokens is not None and tokens >= self._budget_tokens
        late = self._budget_s is not None and time.perf_counter() - self._start >= self._budget_s
        self._over = self._over or spent or late
        for index, running in enumerate(self._runnings):
            if index in self._results or not running.decided:
                continue
            if self._cancelled.is_set():
                running.cancelled.set()
            elif self._over:
                self._cut.append(index)
                running.cancelled.set()
            elif self._bound is not None and self._hopeless(running):
                self._pruned.append(index)
                running.cancelled.set()

    def _hopeless(self, running: Running) -> bool:
        assert self._bound is not None
        bound = self._bound([token.logprob or 0.0 for token in running.sure], self._most_tokens)
        return bound is not None and bound < self._best

    def _ended(self, index: int, result: Result) -> None:
        self._results[index] = result
        if self._bound is not None and result.finish_reason != "cancelled":
            self._best = max(self._best, self.score.scores(self._said, [self._candidate(index)])[0])

    def _candidates(self) -> list[Candidate]:
        return [self._candidate(index) for index in sorted(self._results)]

    def _candidate(self, index: int) -> Candidate:
        result = self._results[index]
        return Candidate(
            index,
            result.text,
            result.token_ids,
            "length" if index in self._cut else result.finish_reason,
            tuple(token.logprob or 0.0 for token in result.tokens),
            tuple(token.certainty for token in result.tokens if token.certainty is not None),
        )

    def _pass_at_k(self, candidates: Sequence[Candidate]) -> dict[int, float] | None:
        if self._right is None or not candidates:
            return None
        right, count = sum(bool(self._right(candidate)) for candidate in candidates), len(candidates)
        return {k: cost_model.pass_at_k(count, right, k) for k in sorted({*_KEPT_KS, count}) if k <= count}


def _checked(engine: Engine, options: RequestOptions, n: int, certainties: bool) -> Request:
    """The request of a sample; each has its own `sample_index`."""
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_SAMPLES:
        raise UsageError(f"n must be a whole number from 1 to {MOST_SAMPLES}, not {n!r}.")
    if "sample_index" in options:
        raise UsageError("best-of numbers its samples itself: leave sample_index out.")
    given: RequestOptions = {"temperature": TEMPERATURE, **options}
    request = request_options(**given)
    if request.options.sampling.greedy and n > 1:
        raise UsageError(f"Without sampling all {n} samples are the same: give a temperature of 0.8, say, or n of 1.")
    reason = solo_reason(request.method, ragged=engine.target.ragged)
    if reason is not None:
        raise UsageError(f"{reason}, and best-of runs several: choose another.")
    generation = replace(request.options, logprobs=request.options.logprobs or 0, certainties=certainties)
    return replace(request, options=generation, method=batch_method(engine, request.method))


def split_arguments(arguments: dict[str, Any]) -> tuple[RequestOptions, dict[str, Any]]:
    """(request options, what `BestOf` takes besides) of the arguments of `Engine.best_of`."""
    own: dict[str, Any] = {name: arguments[name] for name in _OWN if name in arguments}
    options: Any = {name: value for name, value in arguments.items() if name not in _OWN}
    return options, own


def _said(prompt: Prompt) -> str:
    """What scores see of a prompt: the text, or the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
