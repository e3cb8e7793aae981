from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .processes import Worker
from .runs import Run

SCRIPTED = """
import os
import sys
import time

sys.path.insert(0, {workers!r})
from protocol import generation, serve_peer

asked = []


def about():
    return {{"version": "1"}}


def run(method, prompt_ids, max_tokens, draft_length, prompt=None):
    print("library chatter")
    asked.append(method)
    if method == "exit" and len(asked) > {survives}:
        print("it broke", file=sys.stderr, flush=True)
        os._exit(3)
    if method == "refuse":
        raise ValueError("no such method here")
    if method == "mute":
        return generation([1], 0.0)
    return generation([sum(prompt_ids) + number for number in range(max_tokens)], 0.001 * max_tokens)


serve_peer(about, run)
"""


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Start a worker whose text counts up from the sum of the prompt; `survives`: so many runs before "exit" works."""
    import sys

    started: list[Worker] = []

    def start(name: str = "scripted", survives: int = 0) -> Worker:
        script = tmp_path / f"{name}.py"
        workers = str(Path(__file__).parent / "workers")
        script.write_text(SCRIPTED.format(workers=workers, survives=survives), encoding="utf-8")
        worker = Worker(name, Path(sys.executable), script, [], tmp_path / f"{name}.log")
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.close()


def make_run(mode: str, prompt: str, repeat: int, ms_per_token: float, text: list[int], first: int = 1) -> Run:
    """A run whose speed is given."""
    return Run(prompt, mode, repeat, first, ms_per_token / 1e3 * (len(text) - first), text)
