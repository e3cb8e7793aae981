"""Jobs without a model: a worker whose answers are known, and which is out of order on purpose."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specrun.runtime.jobs import Answer, JobCounts, JobSettings, JsonLines, LineRequest, Order, open_job

IN_FLIGHT = 4


class FakeWorker:
    """Has up to `IN_FLIGHT` requests at a time and answers them in an order of its own.

    asked, answered: told of each number when it is taken, and when its answer is written.
    """

    def __init__(
        self, asked: Callable[[int], object] | None = None, answered: Callable[[int], object] | None = None
    ) -> None:
        self.numbers: list[int] = []
        self._asked = asked or self.numbers.append
        self._answered = answered or (lambda number: None)

    def answers(self, requests: Iterable[LineRequest]) -> Iterator[Answer]:
        held: list[LineRequest] = []
        turns = itertools.cycle((3, 1, 2, 0, 2))
        for request in requests:
            self._asked(request.number)
            held.append(request)
            if len(held) == IN_FLIGHT:
                yield from self._answer(held.pop(next(turns)))
        while held:
            yield from self._answer(held.pop(next(turns) % len(held)))

    def _answer(self, request: LineRequest) -> Iterator[Answer]:
        if request.prompt == "fail":
            yield Answer(request.number, None, ("failed", "It was told to fail."))
        else:
            yield Answer(request.number, body_of(request.prompt, request.options))
        self._answered(request.number)


def body_of(prompt: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the fake worker answers."""
    return {
        "text": f"{prompt}!",
        "seed": options.get("seed"),
        "usage": {"completion_tokens": 3},
        "speculation": {"rounds": 2, "evaluated": 2, "accepted": 1},
    }


def settings(order: Order = "input", **defaults: Any) -> JobSettings:
    return JobSettings("fake", "0" * 64, {"max_tokens": 8, **defaults}, order=order)


def run_job(
    source: Path,
    target: Path,
    of: JobSettings,
    worker: FakeWorker | None = None,
    *,
    resume: bool = True,
    retry_failed: bool = False,
) -> JobCounts:
    """Run a job to its end."""
    with (
        source.open("rb") as stream,
        open_job(JsonLines(stream, source.name), target, of, resume=resume, retry_failed=retry_failed) as job,
    ):
        if job.complete:
            job.finish()
        else:
            for _ in job.run(worker or FakeWorker()):
                continue
        return job.counts


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of an output."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def write_prompts(path: Path, count: int) -> Path:
    """An input of prompts of which some are the same, some fail, and some lines are no requests."""
    lines = []
    for number in range(1, count + 1):
        prompt = "fail" if number % 7 == 3 else f"prompt {number % 5}"
        lines.append("[1, 2]" if number % 6 == 5 else json.dumps({"id": number, "prompt": prompt}))
    path.write_text("\n".join(lines) + "\n")
    return path
