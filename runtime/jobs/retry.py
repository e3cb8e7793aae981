"""Lines that failed are taken out of an output, so that the job computes them again.

At every instant what is on the disk is an output that a job can go on with: it still has the failed lines, or it has no
answer for them yet.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from specrun.runtime.jobs.answer_line import Written, read_written
from specrun.runtime.jobs.disk import JobPaths, disk_errors, staged, sync
from specrun.runtime.jobs.journal import Journal
from specrun.runtime.jobs.line_request import Defaults, LineError, parse_line
from specrun.runtime.jobs.lines import Line, Source
from specrun.runtime.jobs.output import Order
from specrun.runtime.jobs.tables import is_table, written_lines

_BY_FORM: Final = frozenset({"context_length_exceeded"})
"""Codes of errors that the line itself brings about, though it can be read as a request."""

_Place = tuple[Written, int, int]


def drop_failed(source: Source, paths: JobPaths, order: Order, defaults: Defaults) -> int:
    """Take out what failed and might not fail again; how many lines that are.

    A line that is no request, or is too long for the model, keeps its error. Raises JobError.
    """
    output = paths.output
    main = paths.journal if is_table(output) else output
    if is_table(output) and output.exists() and output.stat().st_size and not main.exists():
        if not any(written and _may_pass(written) for written in map(read_written, written_lines(output))):
            return 0
        with disk_errors(output), staged(main) as part, part.open("wb") as stream:
            stream.writelines(written_lines(output))
    kept = [*Journal(main, output).recover()]
    last = kept[-1][0].number if kept else 0
    early = [place for place in Journal(paths.early, output).recover() if order == "input" and place[0].number > last]
    failed = {written.number for written, _, _ in (*kept, *early) if _may_pass(written)}
    failed = {line.number for line in source.lines() if line.number in failed and _is_request(line, defaults)}
    if failed:
        with disk_errors(output):
            if order == "completion":
                _rewrite(main, [(main, kept)], failed)
            else:
                _cut(main, paths.early, kept, early, failed)
    return len(failed)


def _cut(main: Path, early: Path, kept: list[_Place], waiting: list[_Place], failed: Collection[int]) -> None:
    """In the order of the input: the answers behind the first line to retry wait for it."""
    first = min(failed)
    behind = [place for place in kept if place[0].number > first]
    _rewrite(early, [(main, behind), (early, waiting)], failed)
    end = next((at for written, at, _ in kept if written.number == first), None)
    if end is not None:
        os.truncate(main, end)
        sync(main)


def _rewrite(path: Path, parts: list[tuple[Path, list[_Place]]], failed: Collection[int]) -> None:
    """Let a file hold these lines, without those that failed."""
    with staged(path) as part, part.open("wb") as stream:
        for source, places in parts:
            stream.writelines(_lines(source, places, failed))


def _lines(path: Path, places: list[_Place], failed: Collection[int]) -> Iterator[bytes]:
    if places:
        with path.open("rb") as stream:
            for written, at, length in places:
                if written.number not in failed:
                    stream.seek(at)
                    yield stream.read(length)


def _may_pass(written: Written) -> bool:
    return written.failed and written.code not in _BY_FORM


def _is_request(line: Line, defaults: Defaults) -> bool:
    try:
        parse_line(line, defaults)
    except LineError:
        return False
    return True
