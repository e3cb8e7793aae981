"""`specrun batch`: a file of requests becomes a file of answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.main import INTERRUPTED
from specrun.cli.opening import ensure_model, ensure_speculators, open_engine
from specrun.cli.options import engine_values, job_options, request_values
from specrun.cli.output import echo_json, is_terminal, note, waiting

if TYPE_CHECKING:
    from specrun.models_cache import Bundle
    from specrun.runtime.jobs import Job, JobCounts, Source, Worker

_REDRAWN_S = 0.2  # between changes of the line of progress on a terminal
_SAID_S = 30.0  # and between lines where there is none


@click.command()
@click.argument("source", metavar="IN|-")
@click.argument("target", metavar="OUT|-")
@click.option(
    "--batch-size", type=click.IntRange(1, 256), metavar="N", help="Requests at a time; by default as many as pay."
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on where an earlier run of the same job stopped; --no-resume replaces what it wrote.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Try lines again that failed in an earlier run of the same job, but for those that can only fail.",
)
@click.option(
    "--order",
    type=click.Choice(["input", "completion"]),
    default="input",
    show_default=True,
    help="Answers in the order of the input, or as they are ready.",
)
@click.option(
    "--engine",
    "runner",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="Compute in this process, or by workers on Ray (pip install 'specrun[ray]'; RAY_ADDRESS names a cluster).",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --engine ray: how many, each with the model loaded; by default one for each machine.",
)
@click.option("--ignore-model", is_flag=True, help="Answer lines that name another model too.")
@job_options
@click.option("--raw", is_flag=True, help="Continue prompts as they are, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as one JSON object when all is written.")
def batch(
    source: str,
    target: str,
    batch_size: int | None,
    resume: bool,
    retry_failed: bool,
    order: str,
    runner: str,
    workers: int | None,
    ignore_model: bool,
    system: str | None,
    raw: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Answer all requests of a file.

    Every line of IN gets one line in OUT. A line is a JSON object: {"prompt": "..."} or {"messages": [...]}, with an
    "id" if you like, or the form of the OpenAI batch API with custom_id, method, url and body. Beside the prompt it may
    hold max_tokens, temperature, top_p, top_k, min_p, stop, seed, presence_penalty, frequency_penalty,
    repetition_penalty, draft_length, speculation_method, logprobs, response_format, json_schema, regex, grammar,
    prediction, system, raw and so on; the options below hold for lines that do not say otherwise. A body for
    /v1/completions is continued as it is. A sampled line without a seed gets one of its own, which its answer tells.

    Requests that run together draft by any method but lookahead, which takes a batch size of 1. Heads and draft models
    draft for all of them in one run, as far as that pays.

    Answers are lines of the OpenAI batch form: "id" is "line-17" for line 17, "response" has the JSON of `generate` as
    its body, and "error" says what was wrong with a line that failed; the others go on.

    Files that end in .parquet or .csv are tables instead (this takes pyarrow: pip install 'specrun[arrow]'): their
    columns have the names that a line's parameters have.

    Nothing is lost: stopped in any way, the same command goes on where it was (OUT.job tells one job from another; keep
    it beside the output). Exit codes: 0 all lines are right, 1 some failed or the job had to stop, 2
    wrong usage, 130 interrupted.

    \b
    Examples:
      specrun batch questions.jsonl answers.jsonl --max-tokens 200
      specrun batch requests.jsonl answers.jsonl --order completion --temperature 0.8
      specrun batch questions.csv answers.parquet
      cat questions.jsonl | specrun batch - - | jq -r .response.body.text
    """
    from specrun.models_cache.errors import UsageError
    from specrun.runtime.batching.batch_row import rows_for
    from specrun.runtime.device import made_for
    from specrun.runtime.jobs import JobSettings
    from specrun.runtime.request import request_options
    from specrun.runtime.session import choose_graph

    defaults = {**request_values(values), "system": system, "raw": raw}
    request_options(**defaults)
    rows_for(values["method"], batch_size)
    if as_json and target == "-":
        raise UsageError("The answers go to stdout: name an output file to have the summary of --json there.")
    if retry_failed and not resume:
        raise UsageError("--retry-failed goes on with an output that --no-resume replaces: give one of them.")
    if retry_failed and not _is_file(target):
        raise UsageError("--retry-failed goes on with an output that is kept: name a file.")
    if workers is not None and runner != "ray":
        raise UsageError("--workers is for Ray: add --engine ray.")
    _check_places(source, target)
    bundle = ensure_model(values["model"], yes=values["yes"])
    # Without ragged runs models for the CPU have one row at a time whatever was asked for, so every method does.
    ragged = choose_graph(bundle).max_batch is None or made_for(bundle.manifest) == "cpu"
    batch_size = rows_for(values["method"], batch_size, ragged=ragged)
    settings = JobSettings(
        bundle.manifest.name,
        bundle.target_digest,
        defaults,
        order=order,  # type: ignore[arg-type]
        any_model=ignore_model,
        others={"draft": values["draft"], "context": values["context"]},
    )
    with ExitStack() as stack:
        lines = stack.enter_context(_opened(source, streamed=not _is_file(target)))
        job = stack.enter_context(_job(lines, target, settings, resume=resume, retry_failed=retry_failed))
        if job.counts.retried:
            note(f"{job.counts.retried} lines that failed are tried again")
        if job.counts.before and not job.complete:
            note(f"{job.counts.before} of {job.counts.total} lines are done already: going on")
        try:
            if job.complete:
                job.finish()
            else:
                opened = (
                    _ray_workers(bundle, values, workers, batch_size) if runner == "ray" else _local(values, batch_size)
                )
                _run(job, stack.enter_context(opened))
        except KeyboardInterrupt:
            _say_interrupted(job.counts, target)
            raise click.exceptions.Exit(INTERRUPTED) from None
        counts = job.counts
    note(_summary(counts, target))
    if as_json:
        echo_json({"model": bundle.manifest.name, "output": target, **counts.to_json()})
    if counts.failed:
        raise click.exceptions.Exit(1)


def _check_places(source: str, target: str) -> None:
    from specrun.models_cache.errors import UsageError

    if source != "-" and (not Path(source).exists() or Path(source).is_dir()):
        raise UsageError(f"There is no file {source}: give a JSONL file, or - for stdin.")
    if target == "-":
        return
    if Path(target).is_dir() or not Path(target).parent.is_dir():
        raise UsageError(f"{target} cannot be a file: name one in a folder that exists, or - for stdout.")
    if source != "-" and Path(target).exists() and Path(source).samefile(target):
        raise UsageError(f"{target} is the input itself: name another output.")


def _is_file(target: str) -> bool:
    from specrun.runtime.jobs import is_plain

    return target != "-" and is_plain(Path(target))


@contextmanager
def _opened(source: str, *, streamed: bool) -> Iterator[Source]:
    """The input. What can be read only once is read as it comes where the output is `streamed`, else kept first."""
    from specrun.runtime.jobs import JsonLines, LineStream, Table, is_table
    from specrun.runtime.jobs.lines import kept

    if _is_file(source) and is_table(Path(source)):
        yield Table(Path(source))
        return
    if _is_file(source):
        with Path(source).open("rb") as stream:
            yield JsonLines(stream, Path(source).name)
        return
    with ExitStack() as stack:
        once = sys.stdin.buffer if source == "-" else stack.enter_context(Path(source).open("rb"))
        name = "stdin" if source == "-" else Path(source).name
        yield LineStream(once, name) if streamed else JsonLines(stack.enter_context(kept(once)), name)


@contextmanager
def _job(lines: Source, target: str, settings: Any, *, resume: bool, retry_failed: bool) -> Iterator[Job]:
    from specrun.runtime.jobs import open_job, stream_job

    if _is_file(target):
        with open_job(lines, Path(target), settings, resume=resume, retry_failed=retry_failed) as job:
            yield job
    elif target == "-":
        with stream_job(lines, sys.stdout.buffer, settings) as job:
            yield job
    else:
        with Path(target).open("wb", buffering=0) as stream, stream_job(lines, stream, settings) as job:
            yield job


@contextmanager
def _local(values: dict[str, Any], batch_size: int | None) -> Iterator[Worker]:
    from specrun.runtime.jobs import EngineWorker

    with open_engine(**engine_values(values), methods=(values["method"],)) as engine:
        if values["method"] is not None:
            engine.require_method(engine.resolve_method(values["method"]))
        yield EngineWorker(engine, batch_size)


@contextmanager
def _ray_workers(
    bundle: Bundle, values: dict[str, Any], workers: int | None, batch_size: int | None
) -> Iterator[Worker]:
    from specrun.runtime.jobs.ray_workers import RayWorkers

    ensure_speculators(bundle, values["draft"], (values["method"],))
    engine = {name: value for name, value in engine_values(values).items() if name != "yes"}
    with redirect_stdout(sys.stderr):  # Ray prints there what it says of workers that die
        with waiting("starting Ray"):
            found = RayWorkers(engine, workers=workers, batch_size=batch_size)
        with closing(found):
            yield found


def _run(job: Job, worker: Worker) -> None:
    terminal = is_terminal(sys.stderr)
    said = time.monotonic() - (_SAID_S if terminal else 0)
    with closing(job.run(worker)) as steps:  # type: ignore[type-var]
        for counts in steps:
            now = time.monotonic()
            if now - said >= (_REDRAWN_S if terminal else _SAID_S):
                click.echo(f"\r\x1b[K{_progress(counts)}" if terminal else _progress(counts), err=True, nl=not terminal)
                said = now
    if terminal:
        click.echo("\r\x1b[K", err=True, nl=False)


def _progress(counts: JobCounts) -> str:
    total = "" if counts.total is None else f" of {counts.total}"
    parts = [f"{counts.done}{total} lines", f"{counts.tokens_per_s:.1f} tokens/s"]
    if counts.failed:
        parts.insert(1, f"{counts.failed} failed")
    if counts.evaluated:
        parts.append(f"acceptance {counts.acceptance_rate:.0%}")
    if counts.seconds_left is not None:
        parts.append(f"{_duration(counts.seconds_left)} left")
    return ", ".join(parts)


def _summary(counts: JobCounts, target: str) -> str:
    parts = [f"{counts.done} lines: {counts.done - counts.failed} right, {counts.failed} failed"]
    if counts.before:
        parts.append(f"{'all' if counts.before == counts.done else counts.before} of them done before")
    if counts.tokens:
        parts.append(f"{counts.tokens} tokens in {_duration(counts.seconds)} ({counts.tokens_per_s:.1f} tokens/s)")
    if counts.evaluated:
        parts.append(f"acceptance {counts.acceptance_rate:.0%}")
    return f"{', '.join(parts)}; {'stdout' if target == '-' else target}"


def _say_interrupted(counts: JobCounts, target: str) -> None:
    total = "" if counts.total is None else f" of {counts.total}"
    hint = ": the same command goes on from there" if _is_file(target) else ""
    line_end = "\n" if is_terminal(sys.stderr) else ""
    note(f"{line_end}Interrupted, {counts.done}{total} lines are done{hint}.")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
