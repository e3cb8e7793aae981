"""Writes the training text of a target: a process for each thread, as a lone thread waits for nobody."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from specrun.export.training.dialogue_form import dialogue_form
from specrun.export.training.self_text import MAX_ANSWER, MAX_DIALOGUE, Dialogue, SelfWriter, half_precision
from specrun.export.training.text_store import SHARD_TOKENS, TextStore
from specrun.models_cache.diskerrors import cache_errors, free_bytes
from specrun.models_cache.errors import CacheError, SpecrunError, UnsupportedModelError, UsageError
from specrun.models_cache.layout import Bundle, load_bundle
from specrun.models_cache.progress import Progress
from specrun.models_cache.store import hold_lock
from specrun.runtime.chat_template import ChatTemplate
from specrun.runtime.session import PREFILL_CHUNK, ModelSession, WidthRule, choose_graph, session_opener
from specrun.runtime.tokenizer import Tokenizer

ROWS = 40  # dialogues that a process writes at a time
LEAST_SHARD = 512  # tokens: a short text too has a few shards, of which one is held out
_SPACING = 4096  # numbers of dialogues between two shards: more than a shard holds
_POLL_S = 0.25
_MEMORY_SHARE = 0.6  # of this machine, that all processes together may take


def write_text(
    bundle: Bundle,
    folder: Path,
    tokens: int,
    *,
    seed: int,
    threads: int,
    prompts: Sequence[Sequence[int]] | None,
    progress: Progress,
) -> TextStore:
    """Fill the store in `folder` until it holds `tokens` tokens with their features; what an earlier call wrote counts.

    prompts: whole prompts (token ids), each to be answered once, instead of self-written ones; `fitting_prompts` makes
    them. The text is shorter where there are no more of them.
    Raises CacheError where the disk has no room for it; SpecrunError where a process fails.
    """
    store = TextStore(folder)
    width = feature_width(bundle)
    with hold_lock(folder.parent / f"{folder.name}.lock", progress), cache_errors(folder):
        store.clean()
        _check_space(store, tokens, width)
        pool = _Pool(bundle, folder, _writers(bundle, threads), seed)
        if lacking := store.lacking(width):
            total = store.tokens(lacking)
            for name in lacking:  # those that do not fit are there, and must not count
                (folder / f"{name}.npy").unlink(missing_ok=True)
            pool.run(
                {"lacking": lacking},
                lambda: total - store.tokens(store.lacking()),
                total,
                "Computing the features of the text (tokens)",
                progress,
            )
        parts = {} if prompts is None else {"prompts": _unanswered(store, prompts)}
        if store.tokens() < tokens and all(parts.values()):
            most = tokens // (4 * pool.writers)
            pool.run(
                parts,
                store.tokens,
                tokens,
                "Writing training text (tokens)",
                progress,
                shard_tokens=min(SHARD_TOKENS, max(LEAST_SHARD, most)),
            )
        store.clean()
    return store


def feature_width(bundle: Bundle) -> int:
    """Columns of the target's features. Raises UnsupportedModelError for a bundle that has none."""
    if bundle.manifest.features is None:
        raise UnsupportedModelError(
            f"{bundle.manifest.name} was exported before learned heads were known: export it again, with --force."
        )
    return len(bundle.manifest.features.taps) * bundle.manifest.sizes.hidden


def fitting_prompts(bundle: Bundle, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    """Token ids of prompts (texts or conversations) in the chat template, each once; too long ones are left out.

    Raises UsageError where none is left.
    """
    tokenizer = Tokenizer.from_bundle(bundle)
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
    limit = min(MAX_DIALOGUE, bundle.manifest.sizes.context - 1)
    room = limit - min(MAX_ANSWER, limit // 2)
    fitting: dict[tuple[int, ...], None] = {}
    for prompt in prompts:
        if template is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = template.encode_chat(messages)
        else:
            ids = tokenizer.encode(prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")))
        if 0 < len(ids) <= room:
            fitting[tuple(ids)] = None
    if not fitting:
        raise UsageError(f"No prompt has at most {room} tokens: give shorter ones.")
    return [list(ids) for ids in fitting]


def _check_space(store: TextStore, tokens: int, width: int) -> None:
    """Raise CacheError where the features that are still to be written do not fit the disk."""
    names = store.names()
    there = store.tokens(names) - store.tokens(store.lacking(width))
    needed = (max(tokens, store.tokens(names)) - there) * width * np.dtype(np.float16).itemsize
    free = free_bytes(store.folder)
    if free is not None and needed > free:
        raise CacheError(
            f"The features of the training text need {needed / 1e9:.2f} GB below {store.folder}, and {free / 1e9:.2f} "
            "GB are free: free some space, train on fewer tokens (--tokens), or set SPECRUN_HOME to a folder on a "
            "larger disk."
        )


def _writers(bundle: Bundle, threads: int) -> int:
    """One for each thread, as far as they fit the memory."""
    sizes = bundle.manifest.sizes
    positions = min(MAX_DIALOGUE, sizes.context)
    cache = 2 * sizes.layers * ROWS * sizes.kv_heads * sizes.head_dim * positions * np.dtype(np.float32).itemsize
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not told on every system
        return threads
    return max(1, min(threads, int(_MEMORY_SHARE * memory / (cache + 1.5 * bundle.weights_bytes))))


def _unanswered(store: TextStore, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The prompts that no dialogue of the store begins with."""
    answered = set()
    for shard in map(store.load, store.names()):
        for start, end in itertools.pairwise(shard.starts.tolist()):
            length = int(shard.answer[start:end].argmax()) or end - start
            answered.add(tuple(shard.tokens[start : start + length].tolist()))
    return [list(prompt) for prompt in prompts if tuple(prompt) not in answered]


@dataclass(frozen=True, slots=True)
class _Job:
    """What one process does: compute the features of the shards `lacking`, else answer `prompts`, else write text."""

    path: Path
    folder: Path
    seed: int
    writer: int
    shard_tokens: int
    lacking: tuple[str, ...] | None = None
    prompts: tuple[Sequence[int], ...] | None = None


class _Pool:
    """Processes that write into one store."""

    def __init__(self, bundle: Bundle, folder: Path, writers: int, seed: int) -> None:
        self.writers = writers
        self._bundle = bundle
        self._folder = folder
        self._seed = seed

    def run(
        self,
        parts: Mapping[str, Sequence[Any]],
        done: Callable[[], int],
        total: int,
        label: str,
        progress: Progress,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        """Run until `done` says `total`, or until all processes have ended by themselves.

        parts: of the job, what is shared out among them. Raises SpecrunError where one fails; none is left behind.
        """
        context = multiprocessing.get_context("spawn")
        workers: dict[BaseProcess, Connection] = {}
        try:
            with _interrupts_ignored():  # which the processes inherit: only this one is to end them
                for writer in range(self.writers):
                    shares = {name: tuple(items[writer :: self.writers]) for name, items in parts.items()}
                    job = _Job(self._bundle.path, self._folder, self._seed, writer, shard_tokens, **shares)
                    receiver, sender = context.Pipe(duplex=False)
                    process = context.Process(target=_work, args=(job, sender), daemon=True)
                    process.start()
                    sender.close()
                    workers[process] = receiver
            while (have := done()) < total:
                progress(label, have, total)
                running = [worker for worker in workers if _is_running(worker, workers[worker])]
                if not running:
                    break
                wait([worker.sentinel for worker in running], timeout=_POLL_S)
            progress(label, total, total)
        finally:
            for worker in workers:
                worker.terminate()
            for worker, receiver in workers.items():
                worker.join()
                receiver.close()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_running(worker: BaseProcess, receiver: Connection) -> bool:
    """Whether a process still works; False where it has done all. Raises SpecrunError where it failed."""
    if worker.exitcode is None:
        return True
    if worker.exitcode == 0:
        return False
    try:
        why = receiver.recv() if receiver.poll() else ""
    except EOFError:
        why = ""
    if not why and worker.exitcode < 0:
        why = f"it was ended by signal {-worker.exitcode}; if memory is short, use fewer --threads"
    raise SpecrunError(f"a process that writes training text failed: {why or f'exit code {worker.exitcode}'}")


def _work(job: _Job, sender: Connection) -> None:
    """What runs in a process; it ends with exit code 1, and says why, where it fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    try:
        with cache_errors(job.folder):
            _write(job)
    except Exception as error:
        if os.environ.get("SPECRUN_DEBUG"):
            traceback.print_exc()
        sender.send(str(error) if isinstance(error, SpecrunError) else f"{type(error).__name__}: {error}")
        sys.exit(1)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, killed for example."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write(job: _Job) -> None:
    bundle = load_bundle(job.path)
    store = TextStore(job.folder)
    # The bits need not be those of plain decoding: the fastest widths will do.
    fastest = WidthRule(padded=False)
    open_session = session_opener(bundle, 1)
    if job.lacking is not None:
        session = open_session(1, fastest)
        for name in job.lacking:
            _compute_features(store, name, session)
        return
    session = open_session(choose_graph(bundle).max_batch or ROWS, fastest)
    tokenizer = Tokenizer.from_bundle(bundle)
    start = _SPACING * len(store.names(job.writer)) if job.prompts is None else 0
    seed = [job.seed, job.writer]
    writer = SelfWriter(session, tokenizer, dialogue_form(tokenizer), seed=seed, start=start, prompts=job.prompts)
    pending: list[Dialogue] = []
    for dialogue in writer.dialogues():
        pending.append(dialogue)
        if sum(len(other.tokens) for other in pending) >= job.shard_tokens:
            store.add(pending, job.writer)
            pending = []
    if pending:
        store.add(pending, job.writer)


def _compute_features(store: TextStore, name: str, session: ModelSession) -> None:
    """Write the features of a shard whose text is there: each dialogue is run as a prompt is."""
    shard = store.load(name)
    parts = []
    for start, end in itertools.pairwise(shard.starts.tolist()):
        session.rewind_to(0)
        for at in range(start, end, PREFILL_CHUNK):
            session.run(shard.tokens[at : min(at + PREFILL_CHUNK, end)].tolist(), rows=1)
            parts.append(half_precision(session.features))
    store.add_features(name, np.concatenate(parts))
