"""Parquet and CSV files as inputs and outputs; a row is what a line is. Needs pyarrow (extra `arrow`)."""

from __future__ import annotations

import csv
import difflib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.errors import JobError, SpecrunError, UsageError
from specrun.models_cache.integrity import sha256_file
from specrun.runtime.jobs.disk import disk_errors, staged
from specrun.runtime.jobs.journal import Journal
from specrun.runtime.jobs.line_request import SHORT_FORM
from specrun.runtime.jobs.lines import Line
from specrun.runtime.jobs.output import Output

ENDINGS: Final = (".parquet", ".csv")
_ROWS: Final = 256  # at a time
_BLOCK: Final = 16 * 2**20  # bytes of a CSV file at a time, and so the longest row

_COLUMNS: Final = {
    "id": "string",
    "custom_id": "string",
    "text": "string",
    "finish_reason": "string",
    "method": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "seed": "uint64",
    "error_code": "string",
    "error_message": "string",
    "body": "string",
}
"""Of an output; `body` is the JSON of `generate`."""

_TEXTS: Final = ("prompt", "id", "custom_id", "system", "model", "speculation_method", "sampling", "user")
_LISTS: Final = ("messages", "stop", "lookahead")
_WHOLE: Final = (
    "id",
    "custom_id",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "top_k",
    "seed",
    "draft_length",
    "logprobs",
    "top_logprobs",
    "n",
)


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its ending."""
    return path.suffix.lower() in ENDINGS


class Table:
    """The rows of a Parquet or CSV file as lines in the short form; columns have the names of its keys.

    Empty cells are not given. In a text column, `messages`, `stop` and `lookahead` may be JSON.
    Raises UsageError without pyarrow, for a file that cannot be read, and for columns of other names.
    """

    def __init__(self, path: Path) -> None:
        require_pyarrow()
        self.name = path.name
        self._path = path
        with _readable(path):
            self._check_columns()
            self.digest = sha256_file(path)
            self.total: int | None = sum(1 for _ in self._rows())

    def lines(self) -> Iterator[Line]:
        """All rows, numbered from 1."""
        with _readable(self._path):
            for number, row in enumerate(self._rows(), 1):
                data = json.dumps({name: value for name, value in row if value is not None}, default=str).encode()
                yield Line(number, data, len(data))

    def ready(self) -> bool:
        """It is a file: always."""
        return True

    def _check_columns(self) -> None:
        names = _columns(self._path)
        for place, name in enumerate(names):
            if name in names[:place]:
                raise UsageError(f"{self.name} has the column {name!r} twice: leave one out.")
            if name not in SHORT_FORM:
                near = difflib.get_close_matches(name, SHORT_FORM, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"known ones are {', '.join(SHORT_FORM)}."
                raise UsageError(f"{self.name} has a column {name!r}: {hint}")

    def _rows(self) -> Iterator[list[tuple[str, Any]]]:
        for batch in _batches(self._path):
            for row in batch.to_pylist():
                yield [(name, _cell(name, value)) for name, value in row.items()]


def count_written(path: Path) -> tuple[int, int]:
    """How many rows an output has, and how many of them are errors. Raises UsageError if it cannot be read."""
    rows = failed = 0
    with _readable(path):
        for batch in _batches(path):
            codes = batch.column("error_code").to_pylist()
            rows += len(codes)
            failed += sum(code not in (None, "") for code in codes)
    return rows, failed


def written_lines(path: Path) -> Iterator[bytes]:
    """The lines that a table was made of. Raises UsageError if it cannot be read."""
    with _readable(path):
        for batch in _batches(path):
            for row in batch.to_pylist():
                error = None
                if row["error_code"]:
                    error = {"code": row["error_code"], "message": row["error_message"]}
                response = None
                if error is None:
                    response = {"status_code": 200, "request_id": row["id"], "body": json.loads(row["body"])}
                record = {"id": row["id"], "custom_id": row["custom_id"], "response": response, "error": error}
                yield json.dumps(record).encode() + b"\n"


class TableOutput:
    """Lines kept in a journal until all are there, and then made a table."""

    def __init__(self, path: Path, kept: Output, journal: Journal) -> None:
        self._path = path
        self._kept = kept
        self._journal = journal

    @property
    def done(self) -> int:
        return self._kept.done

    @property
    def failed(self) -> int:
        return self._kept.failed

    def expect(self, number: int) -> bool:
        return self._kept.expect(number)

    def put(self, number: int, data: bytes, *, failed: bool) -> None:
        self._kept.put(number, data, failed=failed)

    def finish(self) -> None:
        self._kept.finish()
        with self._journal.path.open("rb") as stream:
            write_table(self._path, stream)
        self._journal.remove()

    def close(self) -> None:
        self._kept.close()


class WrittenTable:
    """The table of a job that is finished. Raises JobError for one that was changed since."""

    def __init__(self, path: Path, total: int | None) -> None:
        self.done, self.failed = count_written(path)
        if self.done != total:
            raise JobError(
                f"{path} has {self.done} rows and its job {total}: name another output, or replace it with --no-resume"
            )

    def expect(self, number: int) -> bool:
        return False

    def put(self, number: int, data: bytes, *, failed: bool) -> None:
        raise JobError("the job is finished: there is nothing to write")

    def finish(self) -> None:
        return

    def close(self) -> None:
        return


def write_table(path: Path, lines: Iterable[bytes]) -> None:
    """Make a table of the lines of an output; it is there whole or not at all."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in _COLUMNS.items()])
    with disk_errors(path), staged(path) as part, part.open("wb") as stream:
        parquet = path.suffix.lower() == ".parquet"
        writer = pa.parquet.ParquetWriter(stream, schema) if parquet else pa.csv.CSVWriter(stream, schema)
        with writer:
            rows: list[dict[str, Any]] = []
            for line in lines:
                rows.append(_output_row(json.loads(line)))
                if len(rows) == _ROWS:
                    writer.write_table(pa.Table.from_pylist(rows, schema))
                    rows = []
            writer.write_table(pa.Table.from_pylist(rows, schema))


def _output_row(record: dict[str, Any]) -> dict[str, Any]:
    custom_id, error = record["custom_id"], record["error"]
    body = record["response"]["body"] if record["response"] else {}
    usage = body.get("usage", {})
    return {
        "id": record["id"],
        "custom_id": None if custom_id is None else str(custom_id),
        "text": body.get("text"),
        "finish_reason": body.get("finish_reason"),
        "method": body.get("method"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "seed": body.get("seed"),
        "error_code": error["code"] if error else None,
        "error_message": error["message"] if error else None,
        "body": json.dumps(body) if body else None,
    }


def _cell(name: str, value: Any) -> Any:
    """The value of a cell as a line would hold it; what cannot be is left for the line to be told of."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return [*value]
    if isinstance(value, Decimal):
        value = float(value)
    if isinstance(value, str) and name not in _TEXTS:
        if name in _LISTS and not value.lstrip().startswith("["):
            return value
        try:
            value = json.loads(value.lower() if value in ("True", "False") else value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, float) and math.isnan(value):
        return None  # how a missing number is often written
    if name in _WHOLE and isinstance(value, float) and value.is_integer():
        return int(value)  # and what that makes of the others in its column
    return value


def _columns(path: Path) -> list[str]:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_schema(path).names)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        return next(csv.reader(stream), [])


def _batches(path: Path) -> Iterator[Any]:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(_ROWS)
        return
    import pyarrow as pa
    import pyarrow.csv

    reading = pa.csv.ReadOptions(block_size=_BLOCK, use_threads=False)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    types = dict.fromkeys(_columns(path), pa.string())
    converting = pa.csv.ConvertOptions(column_types=types, strings_can_be_null=True, null_values=[""])
    with pa.csv.open_csv(path, reading, parsing, converting) as reader:
        yield from reader


def require_pyarrow() -> None:
    """Raise UsageError, which says what to install, without pyarrow."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "Parquet and CSV files need pyarrow: install it with `pip install 'specrun[arrow]'`, or give JSONL files."
        ) from error


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what pyarrow says about a file into UsageError."""
    import pyarrow as pa

    try:
        yield
    except SpecrunError:
        raise
    except (pa.ArrowException, UnicodeDecodeError, csv.Error, KeyError) as error:
        kind = path.suffix[1:].lower()
        what = str(error).splitlines()[0].rstrip(".")
        raise UsageError(f"{path} cannot be read as {kind} ({what}): mend it, or give a JSONL file.") from error
