"""What all commands share in how they print: progress and waiting on stderr, JSON on stdout, a line of statistics."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

import click

if TYPE_CHECKING:
    from specrun.runtime.result import Result
    from specrun.runtime.stream import Piece

EXACTNESS = {
    "bitwise": "bit-equal to plain decoding",
    "rounding": "equal to plain decoding up to rounding",
    "distribution": "exact in distribution",
}
_CLEAR = "\r\x1b[K"
_CLEAR_LOSS = 0.95  # of plain decoding's speed: an estimate from measured costs is not better than a few per cent
_PATIENCE_S = 1.0  # before a wait is mentioned
_INTERVAL_S = 1.0  # between lines of progress


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody sits at a stream, which is None where the process has none."""
    return stream is not None and stream.isatty()


class ProgressLine:
    """Shows progress on stderr: one line that is redrawn on a terminal, else a line for a new label, one a second.

    Its calls are those of `specrun.models_cache.progress.Progress`; `used` says whether there was one.
    """

    def __init__(self) -> None:
        self.used = False
        self._label = ""
        self._shown = ""
        self._said = -math.inf
        self._terminal = is_terminal(sys.stderr)

    def __call__(self, label: str, done: int, total: int | None) -> None:
        self.used = True
        label = label[:1].lower() + label[1:]
        if not self._terminal:
            now = time.monotonic()
            if label != self._label and now - self._said >= _INTERVAL_S:
                click.echo(label, err=True)
                self._label, self._said = label, now
            return
        share = f" {100 * done // total}%" if total else f" {done / 1e6:.1f} MB" if done else ""
        if (text := label + share) != self._shown:
            click.echo(f"{_CLEAR}{text}", err=True, nl=False)
            self._shown = text

    def on_terminal(self, label: str, done: int, total: int | None) -> None:
        """Report to a terminal only: for work whose results are printed as they come."""
        if self._terminal:
            self(label, done, total)

    def close(self) -> None:
        """Remove the line that is being redrawn."""
        if self._shown:
            click.echo(_CLEAR, err=True, nl=False)
            self._shown = ""


@contextmanager
def progress_line() -> Iterator[ProgressLine]:
    """A progress line that is removed at the end."""
    line = ProgressLine()
    try:
        yield line
    finally:
        line.close()


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Say what is going on if it takes more than a second; on a terminal the line goes away afterwards."""
    line = ProgressLine()
    timer = threading.Timer(_PATIENCE_S, line, (label, 0, None))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        line.close()


def echo_json(value: Any) -> None:
    """Print one JSON object on a line of its own."""
    utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    click.echo(json.dumps(value, ensure_ascii=not utf8))


def note(text: str) -> None:
    """Say something on stderr."""
    click.echo(text, err=True)


def write_text(text: str) -> None:
    """Write generated text to stdout as it is, at once; `click.echo` would take escape sequences out of it."""
    sys.stdout.write(text)
    sys.stdout.flush()


def end_text(text: str) -> None:
    """End generated text with a newline unless it is empty or has one."""
    if text and not text.endswith("\n"):
        write_text("\n")


def use_colour(asked: bool) -> bool:
    """Whether to colour stdout: if asked for, on a terminal, and without NO_COLOR in the environment."""
    return asked and is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")


def coloured(piece: Piece) -> str:
    """The text of a piece, green where accepted draft tokens brought it."""
    if piece.text and piece.tokens and all(token.source == "draft" for token in piece.tokens):
        return click.style(piece.text, fg="green")
    return piece.text


def stats_line(result: Result, request: dict[str, Any], cost: Callable[[int], float]) -> str:
    """The line of `--stats`; `request` holds the options as `Engine.stream` takes them, cost(width) is a target run's.

    Where drafting clearly lost by that cost it says so.
    """
    from specrun.runtime.worth import speed_ratio

    counts, rate = result.speculation, result.to_json()["timings"]["decode_tokens_per_s"]
    exact = EXACTNESS[result.exactness]
    written = f"{result.usage.completion_tokens} tokens"
    if result.finish_reason == "length":
        full = result.usage.completion_tokens < request["max_tokens"]
        written += " (ended: the context is full)" if full else " (ended at --max-tokens)"
    memory = result.memory
    parts = [
        written,
        f"{rate:.1f} tokens/s",
        f"MAT {counts.mean_accepted_tokens:.2f}",
        f"acceptance {counts.acceptance_rate:.0%} ({counts.accepted} of {counts.evaluated})",
        f"method {result.method}",
        exact,
        f"{(memory.weights_bytes + memory.kv_target_bytes + memory.kv_draft_bytes) / 1e6:.0f} MB",
    ]
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    ratio = speed_ratio(counts, cost)
    if ratio is not None and ratio < _CLEAR_LOSS:
        parts.append(f"slower here than plain decoding (about {ratio:.2f} times its speed)")
    return ", ".join(parts)
