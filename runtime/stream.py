"""One request as it runs: the pieces of text and tokens as they become sure, and the result at the end."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specrun.models_cache.errors import ContextLengthError, SpecrunError, UsageError
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.loop import Limits, speculate
from specrun.runtime.proposal import Proposer
from specrun.runtime.request import Request
from specrun.runtime.result import FinishReason, Result, SpeculationStats, Timings, Token, Usage
from specrun.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine, Prompt

# Room made at the start of a request for so many tokens to come; longer texts grow it.
RESERVED_TOKENS = 1024

Wrap = Callable[[Proposer | None], Proposer]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step of a stream delivers: text (perhaps none) and the tokens whose text is now sure (perhaps none)."""

    text: str
    tokens: tuple[Token, ...]


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
        self._running = _Running(engine, replace(request, method=method), self.prompt_tokens, wrap)
        self._pieces = self._running.pieces(weakref.WeakMethod(self.close))

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


class _Running:
    """What a stream's generator works on."""

    def __init__(self, engine: Engine, request: Request, prompt_tokens: list[int], wrap: Wrap | None) -> None:
        self.cancelled = threading.Event()
        self.done = False
        self._engine = engine
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._wrap = wrap
        self._length_limit = self._check_length()
        self._matcher = engine.grammars.matcher(request.constraint)
        self._tokens: list[Token] = []
        self._pending: list[Token] = []  # emitted, but their text is not sure yet
        self._text: list[str] = []
        self._stats = SpeculationStats()
        self._cached_tokens = 0
        self._prefill_s = self._decode_s = 0.0
        self._finish: FinishReason = "cancelled"
        self._memory = engine.memory()

    def result(self) -> Result:
        """What there is so far."""
        engine, sampling = self._engine, self._request.options.sampling
        drawn = sampling.mode == "rejection" and not sampling.greedy
        return Result(
            text="".join(self._text),
            token_ids=tuple(token.id for token in self._tokens),
            finish_reason=self._finish,
            model=engine.bundle.manifest.name,
            method=str(self._request.method),
            exactness="distribution" if drawn else engine.calibration.exactness,
            seed=None if sampling.greedy else sampling.seed,
            usage=Usage(len(self._prompt_tokens), len(self._tokens), self._cached_tokens),
            timings=Timings(engine.load_s, self._prefill_s, self._decode_s),
            speculation=self._stats,
            memory=self._memory,
            tokens=tuple(self._tokens),
        )

    def _check_length(self) -> int:
        """The most tokens that prompt and completion may have together."""
        context, prompt = self._engine.context, len(self._prompt_tokens)
        max_tokens = self._request.options.max_tokens
        if not prompt:
            raise UsageError("The prompt is empty: give at least one character.")
        if prompt >= context and max_tokens != 0:
            most = self._engine.bundle.manifest.sizes.context
            mend = "shorten it" if context == most else f"shorten it, or choose a context of up to {most}"
            raise ContextLengthError(f"The prompt has {prompt} tokens and the context holds {context}: {mend}.")
        return context if max_tokens is None else min(context, prompt + max_tokens)

    def pieces(self, end_stream: weakref.WeakMethod[Callable[[], None]]) -> Generator[Piece]:
        """The stream's pieces; `end_stream` is what the engine calls to end them early."""
        engine = self._engine
        try:
            engine.acquire(end_stream)
            try:
                if self._length_limit <= len(self._prompt_tokens):
                    self._finish = "length"
                elif not self.cancelled.is_set():
                    yield from self._decode()
            finally:
                self._memory = engine.memory()
                engine.release()
        finally:
            self.done = True

    def _decode(self) -> Generator[Piece]:
        engine, request = self._engine, self._request
        options, manifest = request.options, engine.bundle.manifest
        committed = list(self._prompt_tokens)
        eos = manifest.special_ids.eos
        chooser = Chooser(
            options,
            prompt=committed,
            tokens=manifest.sizes.tokens,
            eos=eos,
            sample_index=request.sample_index,
            margin=engine.margin,
            grammar=self._matcher,
        )
        proposer = engine.proposer(request, chooser)
        if self._wrap is not None:
            proposer = self._wrap(proposer)
        draft_length = MAX_DRAFT_LENGTH if options.draft_length is None else options.draft_length
        limits = Limits(self._length_limit, draft_length, frozenset(() if options.ignore_eos else eos))
        expected = min(self._length_limit, len(committed) + RESERVED_TOKENS)
        room = expected + min(draft_length, expected - len(committed)) + 1
        self._cached_tokens = engine.prepare(committed, room, method=str(request.method) if proposer else "none")
        text = TextStream(engine.tokenizer, options.stop, prompt=committed)
        rounds = speculate(engine.target, proposer, chooser, committed, limits, self._stats, self.cancelled.is_set)
        emitted = 0
        start = time.perf_counter()
        try:
            for block in rounds:
                now = time.perf_counter()
                if emitted:
                    self._decode_s = now - start
                else:
                    self._prefill_s, start = now - start, now
                for token in block:
                    self._pending.append(token)
                    emitted += 1
                    delta = text.push(token.id, may_stop=options.may_end(emitted))
                    piece = self._piece(delta.text, text.settled_tokens)
                    if delta.stopped:
                        self._finish = "stop"
                    if piece.text or piece.tokens:
                        left = time.perf_counter()
                        yield piece
                        start += time.perf_counter() - left  # what the reader does is not decoding
                        engine.keep()
                    if delta.stopped:
                        return
                if self.cancelled.is_set():
                    break
            else:
                if emitted:
                    self._finish = "stop" if committed[-1] in limits.eos else "length"
            piece = self._piece(text.finish(), emitted)
            if piece.text or piece.tokens:
                yield piece
        finally:
            rounds.close()
            if emitted:
                self._stats.discarded = self._stats.decided - len(self._tokens)
            engine.finish_request(request, committed, drafted=proposer is not None and emitted > 0)

    def _piece(self, text: str, settled: int) -> Piece:
        """Move the tokens that are settled by now from pending to sure."""
        count = settled - len(self._tokens)
        tokens = tuple(self._pending[:count])
        del self._pending[:count]
        self._tokens += tokens
        self._text.append(text)
        return Piece(text, tokens)
