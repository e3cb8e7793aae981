"""An input that somebody changes while the job runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specrun.models_cache.errors import JobError
from specrun.runtime.jobs import JsonLines, Order, open_job

from .fake_worker import FakeWorker, records, run_job, settings


@pytest.mark.parametrize("order", ["input", "completion"])
@pytest.mark.parametrize("lines", [0, 13])
def test_a_file_that_gets_shorter(tmp_path: Path, order: Order, lines: int) -> None:
    """The job does not say that all is done; with the file as it was it goes on."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = "".join(json.dumps({"id": number, "prompt": f"{number} " * 20_000}) + "\n" for number in range(40))
    whole = text.encode()  # more than is read at once
    source.write_bytes(whole)
    with source.open("rb") as stream, open_job(JsonLines(stream, "in.jsonl"), target, settings(order)) as job:
        steps = job.run(FakeWorker(asked=_cut(source, whole, lines)))
        with pytest.raises(JobError, match=r"the input has changed: it had 40 lines .* put it back"):
            list(steps)
    source.write_bytes(whole)
    counts = run_job(source, target, settings(order))
    assert counts.before >= 10
    assert sorted(int(record["id"][5:]) for record in records(target)) == list(range(1, 41))


def _cut(source: Path, whole: bytes, lines: int) -> Callable[[int], object]:
    def asked(number: int) -> None:
        if number == 12:
            source.write_bytes(b"".join(whole.splitlines(keepends=True)[:lines]))

    return asked
