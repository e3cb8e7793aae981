"""`specrun batch --engine ray` as a process: what it prints, and where, when a worker dies or the user stops it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ...conftest import INTERRUPTIBLE

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills as Unix does")

# The worker dies with its first requests, once.
DIES_ONCE = """
import os, sys
from specrun.runtime.jobs import ray_workers
class Dies(ray_workers._Actor):
    def answers(self, requests):
        try:
            os.close(os.open(MARK, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            yield from super().answers(requests)
        else:
            os._exit(1)
ray_workers._Actor = Dies
from specrun.cli.main import run
run()
"""


@pytest.mark.usefixtures("tiny")
def test_only_answers_go_to_stdout(tmp_path: Path) -> None:
    """Ray prints to stdout that a worker died; here that is where the answers are."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"id": n, "prompt": f"Hello {n}"}) + "\n" for n in range(60)))
    code = f"MARK = {str(tmp_path / 'mark')!r}\n{DIES_ONCE}"
    command = [sys.executable, "-c", code, "batch", str(source), "-", "--model", "tiny", "--engine", "ray"]
    done = subprocess.run([*command, "--max-tokens", "100"], capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mark").exists()
    assert [json.loads(line)["custom_id"] for line in done.stdout.splitlines()] == list(range(60))
    assert "60 lines: 60 right, 0 failed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("tiny")
def test_ctrl_c(tmp_path: Path) -> None:
    """The workers end with the job, and the same command, on Ray or not, goes on."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": n, "prompt": f"Hello {n}"}) + "\n" for n in range(300)))
    code = f"{INTERRUPTIBLE}from specrun.cli.main import run; run()"
    command = [sys.executable, "-c", code, "batch", str(source), str(target), "--model", "tiny", "--max-tokens", "60"]
    process = subprocess.Popen([*command, "--engine", "ray"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not (target.exists() and target.stat().st_size) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=170)
    assert process.returncode == 130, said
    assert "of 300 lines are done: the same command goes on from there." in said
    assert "Traceback" not in said
    assert 0 < len(target.read_bytes().splitlines()) < 300
    end = time.monotonic() + 30
    while _running(process.pid):
        assert time.monotonic() < end
        time.sleep(0.1)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["custom_id"] for line in target.read_text().splitlines()] == list(range(300))


@pytest.mark.usefixtures("tiny")
def test_lines_that_come_one_by_one() -> None:
    """While a worker is at a long answer, another one takes the line that comes later."""
    code = "from specrun.cli.main import run; run()"
    options = ["--model", "tiny", "--engine", "ray", "--workers", "2", "--order", "completion"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "batch", "-", "-", *options],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    ids = []
    for line in (
        b'{"id": "first", "prompt": "a", "max_tokens": 2}\n',  # when it is answered the workers are there
        b'{"id": "long", "prompt": "a", "max_tokens": 12000, "ignore_eos": true}\n',
        b'{"id": "short", "prompt": "b", "max_tokens": 2}\n',
    ):
        process.stdin.write(line)
        process.stdin.flush()
        if b"long" in line:
            time.sleep(1.0)
        else:
            ids.append(json.loads(process.stdout.readline())["custom_id"])
    try:
        rest = process.communicate(timeout=170)[0]
    finally:
        process.kill()
    assert process.returncode == 0
    assert [*ids, json.loads(rest)["custom_id"]] == ["first", "short", "long"]


def _running(session: int) -> bool:
    """Whether a process of this session is left."""
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True
