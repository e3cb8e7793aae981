"""Writes the training text of a target: a process for each thread, as a lone thread waits for nobody."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from specrun.export.training.dialogue_form import dialogue_form
from specrun.export.training.self_text import MAX_ANSWER, MAX_DIALOGUE, Dialogue, SelfWriter
from specrun.export.training.text_store import SHARD_TOKENS, TextStore
from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.models_cache.layout import Bundle, load_bundle
from specrun.models_cache.progress import Progress
from specrun.runtime.chat_template import ChatTemplate
from specrun.runtime.session import WidthRule, session_opener
from specrun.runtime.tokenizer import Tokenizer

ROWS = 40  # dialogues that a process writes at a time
_SPACING = 4096  # numbers of dialogues between two shards: more than a shard holds
_POLL_S = 1.0


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
    """Fill the store in `folder` until it holds `tokens` tokens; what an earlier call wrote counts.

    prompts: whole prompts (token ids) to answer, instead of self-written ones; `fitting_prompts` makes them.
    Raises SpecrunError where a process fails.
    """
    store = TextStore(folder)
    have = store.tokens()
    label = "Writing training text (tokens)"
    if have >= tokens:
        return store
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=_work, args=(bundle.path, folder, seed, writer, prompts), daemon=True)
        for writer in range(threads)
    ]
    for worker in workers:
        worker.start()
    try:
        while have < tokens:
            progress(label, have, tokens)
            time.sleep(_POLL_S)
            _check(workers)
            have = store.tokens()
        progress(label, tokens, tokens)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.join()
    return store


def fitting_prompts(bundle: Bundle, prompts: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[list[int]]:
    """Token ids of prompts (texts or conversations) in the model's chat template; those too long are left out.

    Raises UsageError where none is left.
    """
    tokenizer = Tokenizer.from_bundle(bundle)
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
    room = min(MAX_DIALOGUE, bundle.manifest.sizes.context) - MAX_ANSWER
    fitting = []
    for prompt in prompts:
        if template is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            ids = template.encode_chat(messages)
        else:
            ids = tokenizer.encode(prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")))
        if 0 < len(ids) <= room:
            fitting.append(ids)
    if not fitting:
        raise UsageError(f"No prompt has at most {room} tokens: give shorter ones.")
    return fitting


def _check(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        if worker.exitcode is not None:
            raise SpecrunError(f"writing training text failed (exit code {worker.exitcode}); its error stands above")


def _work(path: Path, folder: Path, seed: int, writer: int, prompts: Sequence[Sequence[int]] | None) -> None:
    """Write shards until the parent ends this process."""
    bundle = load_bundle(path)
    # The bits need not be those of plain decoding: the fastest widths will do.
    session = session_opener(bundle, 1)(ROWS, WidthRule(padded=False))
    tokenizer = Tokenizer.from_bundle(bundle)
    store = TextStore(folder)
    start = _SPACING * len(store.names(writer))
    text = SelfWriter(session, tokenizer, dialogue_form(tokenizer), seed=[seed, writer], start=start, prompts=prompts)
    pending: list[Dialogue] = []
    for dialogue in text.dialogues():
        pending.append(dialogue)
        if sum(len(other.tokens) for other in pending) >= SHARD_TOKENS:
            store.add(pending, writer)
            pending = []
