"""Five hundred requests of every kind, one after another: memory stays flat after the warm-up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import TinyModels

PROBE = """
import asyncio, gc, sys
from specrun.runtime import Engine
from specrun.runtime.ngram_table import NgramTable


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def cut_short(prompt):
    stream = engine.stream(prompt, max_tokens=32, raw=True)
    for _ in range(3):
        next(stream, None)
    stream.close()


def talk(prompt):
    chat = engine.chat()
    list(chat.send(prompt[:9], max_tokens=8))
    other = chat.fork()
    chat.save(sys.argv[2])
    list(engine.load_session(sys.argv[2]).send("again", max_tokens=8))
    list(other.send("else", max_tokens=8))


async def with_asyncio(prompt):
    await engine.agenerate(prompt, max_tokens=16, raw=True)
    stream = engine.astream(prompt, max_tokens=32, raw=True)
    await anext(stream)
    await stream.aclose()


methods = "ngram", "eagle+ngram", "medusa"
kinds = [
    lambda prompt, n: engine.generate(prompt, method=methods[n % 3], max_tokens=24, raw=True),
    lambda prompt, n: engine.generate(prompt, regex=f"[a-z]{{1,{5 + n % 20}}}", max_tokens=24, raw=True),
    lambda prompt, n: engine.generate(prompt, json_schema={"type": "object"}, max_tokens=24, raw=True, temperature=1.0),
    lambda prompt, n: engine.generate(prompt, prediction="abc" * (n % 30), max_tokens=24, raw=True, method="ngram"),
    lambda prompt, n: cut_short(prompt),
    lambda prompt, n: talk(prompt),
    lambda prompt, n: asyncio.run(with_asyncio(prompt)),
]
engine = Engine.load(sys.argv[1], threads=1)
# The table of earlier texts is bounded; a small bound is reached within the warm-up.
engine.drafting.table = NgramTable(eos_ids=(0, 2), earlier_tokens=400)
before = objects = 0
for index in range(640):
    if index == 140:
        before, objects = resident(), len(gc.get_objects())
    kinds[index % len(kinds)]("abcdefghij" * (1 + index * 7 % 9), index)
print(resident() - before, len(gc.get_objects()) - objects)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_five_hundred_requests(models: TinyModels, tmp_path: Path) -> None:
    """Plain ones, cut short, constrained, predicted, asynchronous, conversations in files; in a process of its own."""
    path = str(models.bundle("heads").path)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, path, str(tmp_path / "talk.npz")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, objects = map(int, done.stdout.split())
    # A KV buffer, a logits row or a matcher kept a request would be 10 MB and more.
    assert grown < 6_000_000
    assert objects < 1500
