"""Jobs on Ray: two workers of this machine on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specrun.runtime import Engine

from .fake_worker import records

pytest.importorskip("ray")

# One of two workers is killed after some answers; prints how many processes there were, and priorities, with its own.
ONE_DIES = """
import json, os, signal, sys
from pathlib import Path
from specrun.models_cache import find_bundle
from specrun.runtime.jobs import JobSettings, JsonLines, open_job
from specrun.runtime.jobs.ray_workers import RayWorkers
source, target = Path(sys.argv[1]), Path(sys.argv[2])
workers = RayWorkers({"model": "tiny", "threads": 1}, workers=2, batch_size=2)
settings = JobSettings("tiny", find_bundle("tiny").target_digest, {"max_tokens": 8})
with source.open("rb") as stream, open_job(JsonLines(stream, "in"), target, settings) as job:
    seen, killed = set(), None
    for count, _ in enumerate(job.run(workers)):
        seen.update(workers.processes)
        if count == 0:
            priorities = {os.getpriority(os.PRIO_PROCESS, process) for process in (0, *workers.processes)}
        if count == 20:
            killed = workers.processes[0]
            os.kill(killed, signal.SIGKILL)
    counts = {"done": job.counts.done, "failed": job.counts.failed, "processes": len(seen)}
    print(json.dumps({**counts, "priorities": len(priorities)}))
workers.close()
"""


# All workers die at once, over and over; prints what is said.
ALL_DIE = """
import os, sys
from pathlib import Path
from specrun.models_cache.errors import JobError
from specrun.runtime.jobs import JobSettings, JsonLines, open_job, ray_workers
class Dies(ray_workers._Actor):
    def answers(self, requests):
        os._exit(1)
        yield
ray_workers._Actor = Dies
workers = ray_workers.RayWorkers({"model": "tiny"}, workers=2)
settings = JobSettings("tiny", "", {})
with open(sys.argv[1], "rb") as stream, open_job(JsonLines(stream, "in"), Path(sys.argv[2]), settings) as job:
    try:
        list(job.run(workers))
    except JobError as error:
        print(error)
workers.close()
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"id": n, "prompt": f"Hello {n % 20}", **_sampling(n)}) for n in range(100)]
    lines[50] = "[]"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.usefixtures("tiny")
@pytest.mark.skipif(os.name == "nt", reason="kills as Unix does")
def test_a_worker_that_dies_loses_nothing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", ONE_DIES, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"done": 100, "failed": 1, "processes": 3, "priorities": 1}
    found = records(target)
    assert [record["id"] for record in found] == [f"line-{number}" for number in range(1, 101)]
    assert found.pop(50)["error"]["code"] == "not_an_object"
    with Engine.load("tiny", threads=1) as engine:
        for record in found:
            number = record["custom_id"]
            wanted = engine.generate(f"Hello {number % 20}", max_tokens=8, **_sampling(number))
            assert record["response"]["body"]["text"] == wanted.text


def test_workers_that_keep_dying_end_the_job(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALL_DIE, str(source), str(tmp_path / "out.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "workers die one after another" in done.stdout
    assert "give the same command again" in done.stdout


@pytest.mark.usefixtures("tiny")
def test_the_command_and_an_error_of_a_worker(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    code = "from specrun.cli.main import run; run()"
    command = [sys.executable, "-c", code, "batch", str(source), str(target), "--model", "tiny", "--engine", "ray"]
    failed = subprocess.run([*command, "--method", "medusa"], capture_output=True, text=True, check=False, timeout=900)
    assert failed.returncode == 1, failed.stderr
    assert len(records(target)) == 100
    assert "medusa" in records(target)[0]["error"]["message"]
    target.unlink()
    done = subprocess.run([*command, "--workers", "2"], capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 1, done.stderr
    assert "100 lines: 99 right, 1 failed" in done.stderr
    assert "Traceback" not in done.stderr


def _sampling(number: int) -> dict[str, Any]:
    return {"temperature": 1.0, "seed": number} if number % 2 else {}
