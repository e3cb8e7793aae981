"""A job from its lines to its answers: nothing is lost, and nothing is computed twice but what was being computed.

Whoever is killed at any instant leaves an output whose whole lines count. `open_job` cuts off what is not whole, and
`Job.run` computes the lines that have no answer yet.
"""

from __future__ import annotations

import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from specrun.models_cache.errors import JobError
from specrun.runtime.jobs.answer_line import error_line, result_line
from specrun.runtime.jobs.disk import JobPaths, disk_errors, hold_output
from specrun.runtime.jobs.job_file import JobFile, load_job_file, new_job_file, save_job_file
from specrun.runtime.jobs.journal import Journal
from specrun.runtime.jobs.line_request import Defaults, LineError, LineId, LineRequest, parse_line
from specrun.runtime.jobs.lines import Line, Source
from specrun.runtime.jobs.output import CompletionOutput, InputOutput, Order, Output, StreamOutput
from specrun.runtime.jobs.retry import drop_failed
from specrun.runtime.jobs.tables import TableOutput, WrittenTable, is_table, require_pyarrow
from specrun.runtime.jobs.worker import Answer, Worker


@dataclass(frozen=True, slots=True)
class JobSettings:
    """What decides the answers of a job.

    model: its name; digest: what its graph computes; defaults: for lines that do not say otherwise, as
    `RequestOptions`; any_model: answer lines that name another model too; others: what else may change answers, by
    name (a context, a draft).
    """

    model: str
    digest: str
    defaults: Mapping[str, Any]
    order: Order = "input"
    any_model: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """By the names that a user knows."""
        fixed = {"model": f"{self.model} {self.digest[:16]}", "order": self.order, "ignore_model": self.any_model}
        return {**self.defaults, **self.others, **fixed}


@dataclass(slots=True)
class JobCounts:
    """How far a job is. `total` is None while nobody knows; `before`: lines that an earlier run did; `retried`:
    lines that failed there and are computed again.

    tokens, evaluated, accepted, rounds and seconds are those of this run.
    """

    total: int | None
    before: int = 0
    retried: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    rounds: int = 0
    evaluated: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens of this run by the clock."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / evaluated; 0 if nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    @property
    def seconds_left(self) -> float | None:
        """By the lines of this run so far; None while there is nothing to go by."""
        now = self.done - self.before
        return None if self.total is None or now < 1 else (self.total - self.done) * self.seconds / now

    def to_json(self) -> dict[str, Any]:
        """The summary of a job."""
        return {
            "lines": self.total,
            "done": self.done,
            "right": self.done - self.failed,
            "failed": self.failed,
            "done_before": self.before,
            "retried": self.retried,
            "completion_tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "rounds": self.rounds,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
        }


class Job:
    """A job whose files are open; see `open_job`."""

    def __init__(self, source: Source, output: Output, defaults: Defaults) -> None:
        self._source = source
        self._output = output
        self._defaults = defaults
        self._ids: dict[int, LineId] = {}  # of the lines that are being computed
        self.counts = JobCounts(source.total, before=output.done, done=output.done, failed=output.failed)

    @property
    def complete(self) -> bool:
        """Whether every line has its answer."""
        return self.counts.done == self.counts.total

    def run(self, worker: Worker) -> Iterator[JobCounts]:
        """Compute what is left; gives the counts after each answer. Closing the iterator stops the work.

        Raises JobError where the output cannot be written.
        """
        start = time.perf_counter()
        with closing(worker.answers(self._requests())) as answers:  # type: ignore[type-var]
            for answer in answers:
                self._write(answer)
                self.counts.seconds = time.perf_counter() - start
                yield self.counts
        self.finish()

    def finish(self) -> None:
        """Close a job that is complete."""
        if self._ids:
            raise JobError(f"{len(self._ids)} lines got no answer: run the same command again")
        if self.counts.total is not None and self.counts.done < self.counts.total:
            raise JobError(
                f"the input has changed: it had {self.counts.total} lines when the job began, and {self.counts.done} "
                "have an answer; put it back as it was and give the same command again"
            )
        self.counts.total = self.counts.done
        self._output.finish()

    def _requests(self) -> Iterator[LineRequest | None]:
        """The requests; None while none has come and others are being computed."""
        for line in self._lines():
            if line is None:
                yield None
                continue
            if not self._output.expect(line.number):
                continue
            try:
                request = parse_line(line, self._defaults)
            except LineError as error:
                self._put(line.number, error_line(line.number, error.custom_id, error.code, str(error)), failed=True)
                continue
            self._ids[line.number] = request.custom_id
            yield request

    def _lines(self) -> Iterator[Line | None]:
        lines = self._source.lines()
        while True:
            while self._ids and not self._source.ready():
                yield None
            line = next(lines, None)
            if line is None:
                return
            yield line

    def _write(self, answer: Answer) -> None:
        custom_id = self._ids.pop(answer.number)
        if answer.body is None:
            code, message = answer.error or ("failed", "The request gave no answer.")
            self._put(answer.number, error_line(answer.number, custom_id, code, message), failed=True)
            return
        self._put(answer.number, result_line(answer.number, custom_id, answer.body), failed=False)
        speculation = answer.body["speculation"]
        self.counts.tokens += answer.body["usage"]["completion_tokens"]
        self.counts.rounds += speculation["rounds"]
        self.counts.evaluated += speculation["evaluated"]
        self.counts.accepted += speculation["accepted"]

    def _put(self, number: int, data: bytes, *, failed: bool) -> None:
        self._output.put(number, data, failed=failed)
        self.counts.done += 1
        self.counts.failed += failed


@contextmanager
def stream_job(source: Source, stream: BinaryIO, settings: JobSettings) -> Iterator[Job]:
    """A job whose answers go to a stream: it cannot be gone on with."""
    yield Job(source, StreamOutput(stream, settings.order), _defaults(settings, secrets.randbelow(2**32)))


@contextmanager
def open_job(
    source: Source, path: Path, settings: JobSettings, *, resume: bool = True, retry_failed: bool = False
) -> Iterator[Job]:
    """The job of an input and an output file: a new one, or the one that was stopped.

    resume: go on where an earlier run stopped; otherwise what it wrote is replaced. retry_failed: lines that failed
    there are computed again, unless they are no requests or too long. Raises JobError where the output is
    another job's or no job's, is being written by another process, or cannot be written.
    """
    paths = JobPaths(path)
    if is_table(path):
        require_pyarrow()
    with ExitStack() as stack:
        stack.enter_context(hold_output(paths))
        job_file = _claim(source, paths, settings, resume=resume)
        defaults = _defaults(settings, job_file.seed)
        retried = drop_failed(source, paths, settings.order, defaults) if retry_failed else 0
        output = _output(source, paths, settings.order)
        stack.callback(output.close)
        job = Job(source, output, defaults)
        job.counts.retried = retried
        yield job


def _output(source: Source, paths: JobPaths, order: Order) -> Output:
    """The output with what an earlier run left in it."""
    path, table = paths.output, is_table(paths.output)
    if table and path.exists() and path.stat().st_size and not paths.journal.exists():
        return WrittenTable(path, source.total)
    main = Journal(paths.journal if table else path, path)
    output: Output
    if order == "completion":
        output = CompletionOutput(main)
    else:
        output = InputOutput(main, Journal(paths.early, path), lambda: (line.number for line in source.lines()))
    return TableOutput(path, output, main) if table else output


def is_plain(path: Path) -> bool:
    """Whether a path is, or could become, a regular file; a device or a pipe can only be written through."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return True


def _claim(source: Source, paths: JobPaths, settings: JobSettings, *, resume: bool) -> JobFile:
    """The job file of this job, there before the first answer. Raises JobError where the output is another's."""
    output = paths.output
    new = new_job_file(source.name, source.digest, source.total or 0, settings.to_json(), secrets.randbelow(2**32))
    found = load_job_file(paths.job)
    with disk_errors(output):
        written = [path for path in (output, paths.early, paths.journal) if path.exists() and path.stat().st_size]
        if found is None and output in written:
            raise JobError(f"{output} is there and was not written by a batch job: name another output, or remove it")
        if found is not None and written and resume:
            difference = found.difference(new)
            if difference is None:
                return found
            raise JobError(f"{output} was begun with {difference}: name another output, or replace it with --no-resume")
        for path in written:
            path.unlink()
    save_job_file(paths.job, new, output)
    return new


def _defaults(settings: JobSettings, seed: int) -> Defaults:
    return Defaults(settings.defaults, seed, None if settings.any_model else frozenset({settings.model}))
