"""A job that is killed: at every write, and at random instants with a real model."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specrun.runtime.jobs import Order

from .fake_worker import records, run_job, settings, write_prompts

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills as Unix does")

# A child dies before its n-th change of a file, or half-way through it if that is a write, for n = 1, 2, ...
AT_EVERY_WRITE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fake_worker import *
import filelock
import specrun.runtime.jobs.journal as journal
source, target, order = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
journal.SYNC_S = 0
left = 0

def counted(name):
    real = getattr(os, name)
    def wrapper(*args, **extra):
        global left
        left -= 1
        if left == 0:
            if name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **extra)
    setattr(os, name, wrapper)

for name in ("write", "fsync", "truncate", "ftruncate", "replace", "unlink", "open"):
    counted(name)

def told(path, number):
    with open(path, "a") as stream:
        stream.write(f"{number}\\n")

def numbers(path):
    return [int(number) for number in path.read_text().split()] if path.exists() else []

asked, answered = target.with_name("asked"), target.with_name("answered")
step, deaths = 1, 0
while True:
    for path in (*target.parent.glob(target.name + "*"), asked, answered):
        path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        left = step
        run_job(source, target, settings(order), FakeWorker(
            lambda number: told(asked, number), lambda number: told(answered, number)))
        left = 0
        os._exit(0)
    code = os.waitpid(child, 0)[1]
    assert code == 0 or os.WTERMSIG(code) == signal.SIGKILL, code
    done, first_asked = set(numbers(answered)), len(numbers(asked))
    run_job(source, target, settings(order), FakeWorker(lambda number: told(asked, number)))
    assert not done & set(numbers(asked)[first_asked:]), f"computed again after {step} steps"
    found = [int(record["id"][5:]) for record in records(target)]
    assert sorted(found) == list(range(1, 13)), (step, found)
    assert order == "completion" or found == sorted(found), (step, found)
    left_over = {path.name.removeprefix(target.name) for path in target.parent.glob("*out*")}
    assert left_over == {"", ".job", ".job.lock"}, (step, left_over)
    if code == 0:
        break
    deaths += 1
    step += 1
print(deaths)
"""


@pytest.mark.parametrize("order", ["input", "completion"])
def test_killed_at_every_change_of_a_file(tmp_path: Path, order: Order) -> None:
    source = write_prompts(tmp_path / "in.jsonl", 12)
    command = [sys.executable, "-c", AT_EVERY_WRITE, str(Path(__file__).parent)]
    done = subprocess.run(
        [*command, str(source), str(tmp_path / "out.jsonl"), order], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 25


def test_killed_twice_while_it_goes_on(tmp_path: Path) -> None:
    """What an earlier run left in the file of early answers serves the next ones too."""
    source, target = write_prompts(tmp_path / "in.jsonl", 12), tmp_path / "out.jsonl"
    run_job(source, target, settings())
    whole = target.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in range(len(lines)):
        target.write_bytes(b"".join(lines[:cut]))
        # Some that are in the output already, some that wait, one that is cut.
        target.with_name("out.jsonl.job.early").write_bytes(b"".join(lines[8:3:-1]) + lines[10][:-5])
        counts = run_job(source, target, settings())
        assert target.read_bytes() == whole
        assert counts.before == max(cut, 0) + len([index for index in range(4, 9) if index >= cut])


@pytest.mark.usefixtures("tiny")
def test_killed_at_twenty_random_instants(tmp_path: Path) -> None:
    """A real job, killed by SIGKILL over and over: every line once, and the answers of an undisturbed run."""
    rng = random.Random(5)
    source, target, whole = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    prompts = [f"Tell me about {rng.choice(('the sea', 'ants', 'tea', 'rain'))} {rng.randrange(9)}" for _ in range(120)]
    source.write_text(
        "".join(
            json.dumps({"id": index, "prompt": prompt, "max_tokens": rng.randrange(1, 60)} | _sampling(index)) + "\n"
            for index, prompt in enumerate(prompts)
        )
    )
    assert _start(source, whole).wait(900) == 0
    size = whole.stat().st_size
    kills = 0
    while kills < 20:
        for path in tmp_path.glob("out.jsonl*"):
            path.unlink()
        code = 1
        while code:
            process = _start(source, target)
            # At once, or when so much more is written, and then anywhere in a line.
            until = min(_size(target) + rng.randrange(size // 4), size - 1) if rng.random() < 0.8 else 0
            while process.poll() is None and _size(target) < until:
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            if kills < 20 and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                kills += 1
            code = process.wait(900)
            assert code in (0, -signal.SIGKILL)
        assert [_what(record) for record in records(target)] == [_what(record) for record in records(whole)]
        assert len(records(target)) == 120


def _start(source: Path, target: Path) -> subprocess.Popen[bytes]:
    code = "from specrun.cli.main import main; main()"
    command = [sys.executable, "-c", code, "batch", str(source), str(target), "--model", "tiny", "--threads", "1"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sampling(index: int) -> dict[str, Any]:
    return {"temperature": 0.9, "seed": index} if index % 3 == 0 else {}


def _what(record: dict[str, Any]) -> tuple[Any, ...]:
    body = record["response"]["body"]
    return record["id"], record["custom_id"], body["text"], body["token_ids"], body["finish_reason"], body["seed"]
