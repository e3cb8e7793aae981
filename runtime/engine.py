"""The embedding API: an `Engine` holds a target, and perhaps a draft, and turns prompts into text."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.models_cache.layout import Bundle, find_bundle
from specrun.models_cache.speculator import InstalledSpeculator
from specrun.runtime.async_stream import AsyncStream, Worker
from specrun.runtime.backend import default_threads, most_threads
from specrun.runtime.best_of.calls import BestOfCalls
from specrun.runtime.calibration import Calibration, calibrate
from specrun.runtime.chat import ChatSession
from specrun.runtime.chat_template import encode_chat
from specrun.runtime.chooser import Chooser
from specrun.runtime.device import Device, find_device
from specrun.runtime.drafting import Drafting
from specrun.runtime.forks import require_own_process
from specrun.runtime.grammar import Grammars
from specrun.runtime.heads import find_draft
from specrun.runtime.kv_cache import shared_prefix
from specrun.runtime.predicted_text import PredictedText
from specrun.runtime.prompt_size import beginning, require_possible
from specrun.runtime.proposal import Proposer, TakesLogits
from specrun.runtime.proposers.within_grammar import WithinGrammar
from specrun.runtime.request import Request, RequestOptions, request_options
from specrun.runtime.result import Memory, Result
from specrun.runtime.round_costs import costs_of
from specrun.runtime.session import session_opener
from specrun.runtime.side_branches import MARGIN, tree_margin
from specrun.runtime.stream import Stream
from specrun.runtime.tokenizer import Tokenizer
from specrun.runtime.tuning import Tuning, load_tuning

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


class Engine(BestOfCalls):
    """A loaded model. Safe to share between threads: requests run one after another.

    >>> with Engine.load("smollm2-135m") as engine:                       # doctest: +SKIP
    ...     for piece in engine.stream("Write a haiku about tides.", max_tokens=64):
    ...         print(piece.text, end="")
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        draft: Bundle | InstalledSpeculator | None = None,
        threads: int | None = None,
        device: str | Device = "auto",
        draft_device: str | Device | None = None,
        context: int | None = None,
    ) -> None:
        start = time.perf_counter()
        if threads is not None and not 1 <= threads <= most_threads():
            raise UsageError(f"threads must be between 1 and {most_threads()} on this machine, not {threads}.")
        if context is not None and context < 2:
            raise UsageError(f"context must be 2 or more, not {context}.")
        self.bundle = bundle
        self.threads = threads or default_threads()
        self.context = min(context or bundle.manifest.sizes.context, bundle.manifest.sizes.context)
        self.tokenizer = Tokenizer.from_bundle(bundle)
        self.grammars = Grammars(self.tokenizer)
        if isinstance(draft, Bundle):
            self.tokenizer.require_same_vocabulary(Tokenizer.from_bundle(draft))
        self.device = find_device(device, bundle.manifest)
        self._open_session = session_opener(
            bundle, self.threads, self.device, shared_cpu=isinstance(draft, Bundle), context=self.context
        )
        self.calibration = calibrate(bundle, self.threads, self._open_session, device=self.device)
        self.target = self._open_session(1, self.calibration.rule)
        self.tuning = load_tuning(bundle, self.threads, self.device)
        self._begin_costs()
        self.drafting = Drafting(bundle, draft, self.threads, self.device, self.tuning, self.context, draft_device)
        self._target_tokens: list[int] = []  # what the KV buffers hold
        self._held_rule = self.target.width_rule  # and the widths at which it was written
        self._lock = threading.Lock()
        self._process = os.getpid()
        self.worker = Worker()
        self._owner: int | None = None
        self._end_stream: weakref.WeakMethod[Callable[[], None]] | None = None
        self._closed = False
        self.load_s = time.perf_counter() - start

    @classmethod
    def load(
        cls,
        model: str | Path,
        *,
        draft: str | Path | None = None,
        threads: int | None = None,
        device: str | Device = "auto",
        draft_device: str | Device | None = None,
        context: int | None = None,
    ) -> Engine:
        """Load a bundle by name or path.

        draft: a speculator of the bundle, by its name or folder, or a draft model with the same tokenizer. It decides
        the default method; other speculators serve requests that name their method, and are loaded by the first one.
        device: "cpu", "cuda", "cuda:1", or "auto": a GPU, where there is one, for a bundle exported for one.
        draft_device: of a draft model, by default the same, or the CPU if it was exported for that. context: use at
        most so many positions. Raises ModelNotFoundError, VocabularyMismatchError, BackendError, and ManifestError or
        IntegrityError for a damaged bundle.
        """
        bundle = find_bundle(model)
        found = find_draft(bundle, draft) if draft is not None else None
        return cls(bundle, draft=found, threads=threads, device=device, draft_device=draft_device, context=context)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """A request whose pieces come as they are made; the options are those of `RequestOptions`."""
        return Stream(self, prompt, request_options(**options))

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result:
        """Run a request to its end; the options are those of `RequestOptions`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            continue
        return stream.result

    def astream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncStream:
        """As `stream`, for `async for`: the request runs in a worker thread, after those that were begun before it."""
        require_own_process(self._process)
        return AsyncStream(self, prompt, request_options(**options))

    async def agenerate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Result:
        """As `generate`, for `await`; cancelling the task cancels the request."""
        stream = self.astream(prompt, **options)
        async for _ in stream:
            continue
        return stream.result

    def chat(self, system: str | None = None) -> ChatSession:
        """A conversation that reuses the KV of the turns before."""
        return ChatSession(self, system)

    def load_session(self, path: Path | str) -> ChatSession:
        """A conversation that `ChatSession.save` wrote, with its KV where that was made on this very machine.

        Errors: IntegrityError for a damaged file or one of another model, CacheError if it cannot be read.
        """
        return ChatSession.load(self, path)

    def encode(self, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
        """Token ids of a prompt: text in the model's chat template, or as it is with `raw` or without a template."""
        require_own_process(self._process)
        if not isinstance(prompt, str) and not (
            isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt)
        ):
            kinds = "text, or a list of messages such as {'role': 'user', 'content': 'Hi'}"
            raise UsageError(f"A prompt is {kinds}, not {prompt!r:.60}.")
        require_possible(prompt, system, self.tokenizer, self.context)
        template = self.tokenizer.chat_template
        if raw or (template is None and isinstance(prompt, str)):
            if not isinstance(prompt, str):
                raise UsageError("Messages need the chat template: pass text for a raw prompt.")
            if system is not None:
                raise UsageError("A system message needs the chat template: leave the system message or raw out.")
            return self.tokenizer.encode(prompt)
        if template is None:
            raise UsageError(f"{self.bundle.manifest.name} has no chat template: pass text instead of messages.")
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        return encode_chat(self.tokenizer, messages)

    @property
    def default_method(self) -> str:
        """The method of requests that name none: that of the draft that was named, else "auto"."""
        return self.drafting.given or "auto"

    def resolve_method(self, method: str) -> str:
        """The method itself, or the one that "auto" stands for here; round by round it still drafts only what pays."""
        return self.drafting.automatic() if method == "auto" else method

    @property
    def has_draft(self) -> bool:
        """Whether a draft model is loaded."""
        return self.drafting.draft is not None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that this engine can run, of `METHODS`, besides "auto"."""
        return self.drafting.methods

    def method_of(self, request: Request) -> str:
        """The method that a request is run with; UsageError if this engine cannot.

        A prediction is for n-grams, so where no method is named, and a draft decides, n-grams go with it.
        """
        method = self.resolve_method(request.method or self.default_method)
        if request.prediction and request.method is None and "ngram" not in method:
            method += "+ngram"
        self.require_method(method)
        return method

    def require_method(self, method: str) -> None:
        """Raise UsageError, saying what is missing, if this engine cannot run a method."""
        self.drafting.require(method)

    @property
    def margin(self) -> float | None:
        """How clearly a choice must win on a side branch of a token tree to be trusted; None: it is verified again."""
        if not self.target.trees_exact:
            return tree_margin(self.target.tree_bound)
        return MARGIN if set(self.bundle.manifest.precision.values()) == {"fp32"} else None

    def load_ngrams(self, path: Path) -> None:
        """Take the earlier texts and the pool of a saved table, so that what was written helps later requests."""
        with self._exclusive():
            self.drafting.load_ngrams(path)

    def save_ngrams(self, path: Path) -> None:
        """Save the texts of this engine's requests, and the pool of n-grams that lookahead decoding filled."""
        with self._exclusive():
            self.drafting.table.save(path)

    def reset(self, *, texts_only: bool = False) -> None:
        """Forget every earlier request: cached KV, earlier texts and, unless `texts_only`, what acceptance they had."""
        with self._exclusive():
            self._target_tokens = []
            self.drafting.forget(texts_only=texts_only)

    def recalibrate(self) -> Calibration:
        """Probe this machine's widths anew and go by what is found."""
        with self._exclusive():
            self.calibration = calibrate(self.bundle, self.threads, self._open_session, force=True, device=self.device)
            self.target.width_rule = self.calibration.rule
            self._begin_costs()
        return self.calibration

    def learnt(self) -> Tuning:
        """What requests taught so far, with no figures of methods."""
        return self.drafting.learnt(self._costs.slope)

    def begin_from(self, tuning: Tuning) -> None:
        """Forget every earlier request and begin from a tuning."""
        self.reset()
        with self._exclusive():
            self.tuning = tuning
            self._begin_costs()
            self.drafting.begin_from(tuning)

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Plain decoding's logits f32 [vocabulary] after `tokens`."""
        real = self.bundle.manifest.sizes.tokens
        if not tokens:
            raise UsageError("There are no tokens to run: give at least one.")
        unknown = [token for token in tokens if not 0 <= token < real]
        if unknown:
            raise UsageError(f"There is no token {unknown[0]}: the ids go from 0 to {real - 1}.")
        with self._exclusive():
            shared = self.prepare(tokens, len(tokens) + 1)
            row = np.array(self.target.prefill(tokens[shared:])[0])
            self._target_tokens = list(tokens)
        return row

    def copy_kv(self, tokens: Sequence[int]) -> list[NDArray[np.float32]]:
        """Keys and values f32 [kv_heads, n, head_dim] of the first n of these tokens: those that the target holds."""
        with self._exclusive():
            held = self._target_tokens[: self.target.length] if self.target.width_rule == self._held_rule else []
            return self.target.cache.copy_of(shared_prefix(held, tokens))

    def restore_kv(self, tokens: Sequence[int], parts: Sequence[NDArray[np.float32]]) -> None:
        """Let the target hold these tokens, by what `copy_kv` gave on this machine."""
        with self._exclusive():
            self.target.rewind_to(0)
            self._target_tokens, self._held_rule = [], self.target.width_rule
            self.target.reserve(len(tokens) + 1)
            self.target.cache.restore(parts, len(tokens))
            self._target_tokens = list(tokens)

    @property
    def onnx_seconds(self) -> float:
        """Seconds that all runs of target, draft and heads spent inside ONNX Runtime so far."""
        return self.target.onnx_seconds + self.drafting.onnx_seconds

    def memory(self, method: str | None = None) -> Memory:
        """Bytes of weights and KV buffers as they stand; with `method`, those that it uses."""
        weights, kv = self.drafting.memory(method)
        return Memory(self.bundle.weights_bytes + weights, self.target.cache.nbytes, kv)

    def close(self) -> None:
        """Free sessions and buffers; may be called twice. The engine cannot be used afterwards.

        A stream of this thread that is still open ends; those of other threads are waited for. In a process that was
        forked from the engine's own, nothing is freed.
        """
        if self._closed or os.getpid() != self._process:
            return
        if self._owner == threading.get_ident() and self._end_stream is not None:
            end_stream = self._end_stream()
            if end_stream is not None:
                end_stream()
        with self._exclusive():
            self._closed = True
            self.worker.close()
            self.target.close()
            self.close_prefix_graph()
            self.drafting.close()
            del self._open_session  # it holds the target's weights

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What a stream needs while it holds the engine.

    def acquire(self, end_stream: weakref.WeakMethod[Callable[[], None]] | None = None) -> None:
        """Take the engine for one request; waits for other threads, and refuses a second stream of this one.

        end_stream: what `close` calls to end the request early.
        """
        require_own_process(self._process)
        if self._owner == threading.get_ident():
            raise SpecrunError("The engine is busy with a stream of this thread: finish or close that stream first.")
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._end_stream = end_stream
        if self._closed:
            self.release()
            raise SpecrunError("The engine is closed: load the model again.")

    def keep(self) -> None:
        """The thread that reads on now holds the engine: a stream may be handed from one to another."""
        require_own_process(self._process)
        self._owner = threading.get_ident()

    def release(self) -> None:
        """Give the engine back."""
        self._owner = self._end_stream = None
        self._lock.release()

    def prepare(self, prompt: Sequence[int], length: int, *, method: str = "none") -> int:
        """Rewind the target to what its cache shares with `prompt` and make room for `length` positions.

        Returns how many prompt tokens need no prefill: never the last, nor those whose features a head has not seen.
        """
        if self.target.width_rule != self._held_rule:  # what was written at other widths may have other bits
            self._target_tokens, self._held_rule = [], self.target.width_rule
        shared = shared_prefix(self._target_tokens[: self.target.length], prompt[:-1])
        shared = min(shared, self.drafting.held(method, prompt))
        self.drafting.reserve(method, length)
        self.target.rewind_to(shared)
        del self._target_tokens[shared:]
        self.target.reserve(length)
        return shared

    def proposer(self, request: Request, chooser: Chooser) -> Proposer | None:
        """The proposer of a request, None for plain decoding; loads the speculator that it needs."""
        proposer = self.drafting.proposer(request, chooser, self._costs, self.prediction(request))
        if proposer is None or request.constraint is None or isinstance(proposer, TakesLogits):
            return proposer
        return WithinGrammar(proposer, chooser)

    def prediction(self, request: Request) -> PredictedText | None:
        """The text that a request says is likely to come, for methods that copy."""
        if not request.prediction or "ngram" not in str(request.method):
            return None
        likely = beginning(request.prediction, self.context)
        return PredictedText(self.tokenizer.encode(likely, add_bos=False)[: self.context])

    def finish_request(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """Remember what the caches hold, and the text for later n-gram proposals.

        drafted: whether a proposer began. The newest token never counts as held: after an error it may be of a draft.
        """
        self._target_tokens = list(committed[: min(self.target.length, len(committed) - 1)])
        self.drafting.finish(request, committed, drafted=drafted)

    def _begin_costs(self) -> None:
        """Costs as calibrated and tuned, and the bound of trees."""
        self.target.tree_bound = self.calibration.tree_bound
        self._costs = self.target.costs = costs_of(self.bundle, self.calibration.cost, self.tuning.beyond)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()
