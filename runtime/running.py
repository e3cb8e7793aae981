"""One request as it runs: its tokens, the text as it becomes sure, and what there is of the result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specrun.models_cache.errors import ContextLengthError, UsageError
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.loop import Limits, speculate
from specrun.runtime.proposal import Proposer
from specrun.runtime.request import Request
from specrun.runtime.result import FinishReason, Memory, Result, SpeculationStats, Timings, Token, Usage
from specrun.runtime.target_run import RunAnswer, RunRequest, TargetRow, resume
from specrun.runtime.text_stream import TextStream

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine

# Room made at the start of a request for so many tokens to come; longer texts grow it.
RESERVED_TOKENS = 1024

Wrap = Callable[[Proposer | None], Proposer]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step of a stream delivers: text (perhaps none) and the tokens whose text is now sure (perhaps none)."""

    text: str
    tokens: tuple[Token, ...]


class Place(Protocol):
    """Where a request runs: an engine, or a row of a batch."""

    @property
    def target(self) -> TargetRow:
        """What runs it."""
        ...

    def proposer(self, request: Request, chooser: Chooser) -> Proposer | None:
        """What drafts for it, None for plain decoding."""
        ...

    def prepare(self, prompt: Sequence[int], length: int, *, method: str = "none") -> int:
        """Make room for `length` positions; how many tokens of the prompt are in the cache already, never all."""
        ...

    def finish_request(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """It ended with these tokens. drafted: whether a proposer was started."""
        ...


class Running:
    """What runs a request. Raises UsageError or ContextLengthError for a prompt that cannot be."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        prompt_tokens: list[int],
        wrap: Wrap | None = None,
        *,
        batched: bool = False,
    ) -> None:
        """request: its method is resolved. wrap: as for `Stream`. batched: it runs as a row among others."""
        self._batched = batched
        self.cancelled = threading.Event()
        self.done = False
        self.memory: Memory = engine.memory()
        self.request = request
        self.prompt_tokens = prompt_tokens
        self._engine = engine
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

    @property
    def length(self) -> int:
        """Positions that are made room for at the start."""
        expected = min(self._length_limit, len(self.prompt_tokens) + RESERVED_TOKENS)
        return expected + min(self._draft_length, expected - len(self.prompt_tokens)) + 1

    @property
    def _draft_length(self) -> int:
        given = self.request.options.draft_length
        return MAX_DRAFT_LENGTH if given is None else given

    @property
    def decided(self) -> int:
        """How many tokens there are, those whose text is not sure yet included."""
        return len(self._tokens) + len(self._pending)

    @property
    def sure(self) -> list[Token]:
        """The tokens that no stop text can take back any more."""
        return list(self._tokens)

    def result(self) -> Result:
        """What there is so far."""
        engine, sampling = self._engine, self.request.options.sampling
        drawn = sampling.mode == "rejection" and not sampling.greedy
        calibration = engine.calibration
        exactness = calibration.batch_exactness if self._batched else calibration.exactness
        return Result(
            text="".join(self._text),
            token_ids=tuple(token.id for token in self._tokens),
            finish_reason=self._finish,
            model=engine.bundle.manifest.name,
            method=str(self.request.method),
            exactness="distribution" if drawn else exactness,
            seed=None if sampling.greedy else sampling.seed,
            usage=Usage(len(self.prompt_tokens), len(self._tokens), self._cached_tokens),
            timings=Timings(engine.load_s, self._prefill_s, self._decode_s),
            speculation=self._stats,
            memory=self.memory,
            tokens=tuple(self._tokens),
        )

    def _check_length(self) -> int:
        """The most tokens that prompt and completion may have together."""
        context, prompt = self._engine.context, len(self.prompt_tokens)
        max_tokens = self.request.options.max_tokens
        if not prompt:
            raise UsageError("The prompt is empty: give at least one character.")
        if prompt >= context and max_tokens != 0:
            most = self._engine.bundle.manifest.sizes.context
            mend = "shorten it" if context == most else f"shorten it, or choose a context of up to {most}"
            raise ContextLengthError(f"The prompt has {prompt} tokens and the context holds {context}: {mend}.")
        return context if max_tokens is None else min(context, prompt + max_tokens)

    def steps(self, place: Place) -> Generator[Piece | RunRequest, RunAnswer | None]:
        """Run it at a place: the pieces, and between them the requests of the loop, each to be answered.

        The answer None ends it there.
        """
        if self._length_limit <= len(self.prompt_tokens):
            self._finish = "length"
        elif not self.cancelled.is_set():
            yield from self._decode(place)

    def _decode(self, place: Place) -> Generator[Piece | RunRequest, RunAnswer | None]:
        engine, request = self._engine, self.request
        options, manifest = request.options, engine.bundle.manifest
        committed = list(self.prompt_tokens)
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
        proposer = place.proposer(request, chooser)
        if self._wrap is not None:
            proposer = self._wrap(proposer)
        limits = Limits(self._length_limit, self._draft_length, frozenset(() if options.ignore_eos else eos))
        self._cached_tokens = place.prepare(committed, self.length, method=str(request.method) if proposer else "none")
        text = TextStream(engine.tokenizer, options.stop, prompt=committed)
        rounds = speculate(place.target, proposer, chooser, committed, limits, self._stats, self.cancelled.is_set)
        emitted = 0
        start = time.perf_counter()
        try:
            step = next(rounds, None)
            while step is not None:
                if isinstance(step, RunRequest):
                    given = yield step
                    if given is None:
                        break
                    step = resume(rounds, given)
                    continue
                now = time.perf_counter()
                if emitted:
                    self._decode_s = now - start
                else:
                    self._prefill_s, start = now - start, now
                for token in step:
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
                    if delta.stopped:
                        return
                if self.cancelled.is_set():
                    break
                step = next(rounds, None)
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
            place.finish_request(request, committed, drafted=proposer is not None and emitted > 0)

    def _piece(self, text: str, settled: int) -> Piece:
        """Move the tokens that are settled by now from pending to sure."""
        count = settled - len(self._tokens)
        tokens = tuple(self._pending[:count])
        del self._pending[:count]
        self._tokens += tokens
        self._text.append(text)
        return Piece(text, tokens)
