"""Lines that failed, tried again: only those that may pass now, and nothing is lost whenever that is stopped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrun.runtime.jobs import Answer, LineRequest, Order, Table, open_job, retry

from .fake_worker import FakeWorker, body_of, records, run_job, settings, write_prompts

ORDERS: tuple[Order, ...] = ("input", "completion")
FAILED = [number for number in range(1, 41) if number % 7 == 3 and number % 6 != 5]
BAD = [number for number in range(1, 41) if number % 6 == 5]


class Mended(FakeWorker):
    """What failed before works; `still` fails as ever."""

    def __init__(self, still: int | None = None) -> None:
        super().__init__()
        self._still = still

    def _answer(self, request: LineRequest) -> Iterator[Answer]:
        if request.number == self._still:
            yield Answer(request.number, None, ("failed", "It is no better."))
        else:
            yield Answer(request.number, body_of(request.prompt, request.options))


class TooLong(FakeWorker):
    """Says of what fails that it is too long."""

    def _answer(self, request: LineRequest) -> Iterator[Answer]:
        for answer in super()._answer(request):
            error = ("context_length_exceeded", "The prompt is too long.") if answer.error else None
            yield Answer(answer.number, answer.body, error)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", 40)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def errors(target: Path) -> list[int]:
    """The numbers of the lines that failed; every line of the input is there once."""
    found = records(target)
    assert sorted(record["id"] for record in found) == sorted(f"line-{number}" for number in range(1, 41))
    return sorted(int(record["id"][5:]) for record in found if record["error"] is not None)


@pytest.mark.parametrize("order", ORDERS)
def test_what_failed_is_computed_again(source: Path, target: Path, order: Order) -> None:
    """Only that; bad lines keep their errors, and what was right its bytes."""
    run_job(source, target, settings(order))
    before = {record["id"]: record for record in records(target)}
    assert errors(target) == sorted(FAILED + BAD)
    worker = Mended(still=FAILED[2])
    counts = run_job(source, target, settings(order), worker, retry_failed=True)
    assert sorted(worker.numbers) == FAILED
    assert (counts.retried, counts.before, counts.done) == (len(FAILED), 40 - len(FAILED), 40)
    assert errors(target) == sorted([FAILED[2], *BAD])
    assert counts.failed == 1 + len(BAD)
    for record in records(target):
        if int(record["id"][5:]) not in FAILED:
            assert record == before[record["id"]]
    if order == "input":
        assert [record["id"] for record in records(target)] == [f"line-{number}" for number in range(1, 41)]
    assert {path.name for path in target.parent.iterdir()} == {
        "in.jsonl", "out.jsonl", "out.jsonl.job", "out.jsonl.job.lock"
    }  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_failed(source: Path, target: Path, order: Order) -> None:
    """Nothing is computed, and no byte changes; nor where there is no output yet."""
    run_job(source, target, settings(order), Mended(), retry_failed=True)
    before, worker = target.read_bytes(), Mended()
    counts = run_job(source, target, settings(order), worker, retry_failed=True)
    assert worker.numbers == []
    assert (counts.retried, counts.done, counts.failed) == (0, 40, len(BAD))
    assert target.read_bytes() == before


def test_what_is_too_long_stays_so(source: Path, target: Path) -> None:
    run_job(source, target, settings(), TooLong())
    worker = Mended()
    assert run_job(source, target, settings(), worker, retry_failed=True).retried == 0
    assert worker.numbers == []


@pytest.mark.parametrize("order", ORDERS)
def test_a_job_that_was_stopped(source: Path, target: Path, order: Order) -> None:
    """Failed lines among those that wait for earlier ones are tried again, too."""

    class Stops(FakeWorker):
        def answers(self, requests: Any) -> Iterator[Answer]:
            for count, answer in enumerate(super().answers(requests)):
                if count == 22:
                    raise KeyboardInterrupt
                yield answer

    with pytest.raises(KeyboardInterrupt):
        run_job(source, target, settings(order), Stops())
    worker = Mended()
    counts = run_job(source, target, settings(order), worker, retry_failed=True)
    assert counts.retried > 0
    assert errors(target) == BAD
    whole = target.with_name("whole.jsonl")
    run_job(source, whole, settings(order), Mended())
    assert sorted(target.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    if order == "input":
        assert target.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("place", ["replace", "truncate", "fsync"])
def test_stopped_at_any_step(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, place: str, order: Order, again: bool
) -> None:
    """Before or after any change on the disk: the next run, with or without the option, ends with all lines."""
    run_job(source, target, settings(order))
    whole = target.read_bytes()
    changed = getattr(os, place)
    for failing in range(1, 12):
        for late in (False, True):
            for path in target.parent.glob(f"{target.name}.job.early"):
                path.unlink()
            target.write_bytes(whole)
            calls = 0

            def stop(*args: Any, late: bool = late, failing: int = failing) -> Any:
                nonlocal calls
                calls += 1
                if calls != failing:
                    return changed(*args)
                if late:
                    changed(*args)
                raise KeyboardInterrupt

            stopped = False
            with monkeypatch.context() as patch:
                patch.setattr(os, place, stop)
                try:
                    run_job(source, target, settings(order), Mended(), retry_failed=True)
                except KeyboardInterrupt:
                    stopped = True
            run_job(source, target, settings(order), Mended(), retry_failed=again)
            assert set(errors(target)) <= set(FAILED + BAD)
            if again or not stopped:
                assert errors(target) == BAD
            if order == "input":
                assert [record["id"] for record in records(target)] == [f"line-{number}" for number in range(1, 41)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ending", [".parquet", ".csv"])
def test_tables(tmp_path: Path, ending: str, order: Order) -> None:
    """A table that is finished becomes lines again, and then a table."""
    pa, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    rows = [{"id": f"n{number}", "prompt": "fail" if number % 4 == 1 else f"a\nb {number}"} for number in range(12)]
    source, target = tmp_path / "in.csv", tmp_path / f"out{ending}"
    csv.write_csv(pa.Table.from_pylist([*rows, {"id": "bad", "prompt": None}]), source)

    def run(worker: FakeWorker, path: Path = target, *, retry_failed: bool = False) -> Any:
        with open_job(Table(source), path, settings(order), retry_failed=retry_failed) as job:
            if job.complete:
                job.finish()
            else:
                for _ in job.run(worker):
                    continue
            return job.counts

    assert run(FakeWorker()).failed == 4
    worker = Mended()
    counts = run(worker, retry_failed=True)
    assert sorted(worker.numbers) == [2, 6, 10]
    assert (counts.retried, counts.before, counts.done, counts.failed) == (3, 10, 13, 1)
    whole = tmp_path / f"whole{ending}"
    run(Mended(), whole)
    ours, theirs = (sorted(map(str, retry.written_lines(path))) for path in (target, whole))
    assert ours == theirs
    if order == "input" and ending == ".csv":
        assert target.read_bytes() == whole.read_bytes()
    assert run(FakeWorker(), retry_failed=True).retried == 0
    assert not list(tmp_path.glob("*.job.lines"))
