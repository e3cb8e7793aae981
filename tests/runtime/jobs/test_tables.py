"""Parquet and CSV files as inputs and outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache.errors import JobError, UsageError
from specrun.runtime.jobs import (
    Answer,
    Defaults,
    JobCounts,
    JobSettings,
    LineError,
    LineRequest,
    Order,
    Table,
    open_job,
    parse_line,
)

from .fake_worker import FakeWorker, settings

pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "One", "max_tokens": 3, "temperature": None},
    {"id": "b", "prompt": 'Two, "quoted"\nand more', "max_tokens": None, "temperature": 0.5},
    {"id": "c", "prompt": "fail", "max_tokens": 5, "temperature": None},
    {"id": "d", "prompt": None, "max_tokens": 5, "temperature": None},
    {"id": "e", "prompt": "a\u2028b", "max_tokens": 6, "temperature": 1.0},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    csv.write_csv(table, path) if path.suffix == ".csv" else parquet.write_table(table, path)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return list(parquet.read_table(path).to_pylist())
    parsing = csv.ParseOptions(newlines_in_values=True)
    names = csv.read_csv(path, parse_options=parsing).column_names
    converting = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True)
    return list(csv.read_csv(path, parse_options=parsing, convert_options=converting).to_pylist())


def run_table(source: Path, target: Path, of: JobSettings, worker: FakeWorker | None = None) -> JobCounts:
    with open_job(Table(source), target, of) as job:
        if job.complete:
            job.finish()
        else:
            for _ in job.run(worker or FakeWorker()):
                continue
        return job.counts


def requests(path: Path) -> list[LineRequest]:
    return [parse_line(line, Defaults({})) for line in Table(path).lines()]


@pytest.fixture(params=[".parquet", ".csv"])
def ending(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("order", ["input", "completion"])
@pytest.mark.parametrize("out", [".parquet", ".csv"])
def test_there_and_back(tmp_path: Path, ending: str, out: str, order: Order) -> None:
    source, target = write(tmp_path / f"in{ending}", ROWS), tmp_path / f"out{out}"
    counts = run_table(source, target, settings(order))
    assert (counts.total, counts.done, counts.failed) == (5, 5, 2)
    rows = {row["id"]: row for row in read(target)}
    assert len(rows) == 5
    if order == "input":
        assert list(rows) == [f"line-{number}" for number in range(1, 6)]
    for number, row in enumerate(ROWS, 1):
        found = rows[f"line-{number}"]
        assert found["custom_id"] == row["id"]
        if row["prompt"] in (None, "fail"):
            assert found["error_code"] == ("failed" if row["prompt"] else "no_prompt")
            assert found["error_message"]
            assert not found["text"]
        else:
            assert found["text"] == f"{row['prompt']}!"
            assert int(found["completion_tokens"]) == 3
            assert json.loads(found["body"])["text"] == found["text"]
            assert not found["error_code"]
    assert {path.name for path in tmp_path.iterdir()} == {
        source.name, target.name, f"{target.name}.job", f"{target.name}.job.lock"
    }  # fmt: skip


def test_parameters(tmp_path: Path, ending: str) -> None:
    source = write(
        tmp_path / f"in{ending}",
        [
            {"prompt": "123", "max_tokens": 4.0, "seed": 7, "raw": True, "stop": '["a", "b"]', "temperature": 0.5},
            {"prompt": "[x]", "max_tokens": None, "seed": None, "raw": None, "stop": "END", "temperature": 1.0},
        ],
    )
    first, second = requests(source)
    assert first.prompt == "123"
    wanted = {"max_tokens": 4, "seed": 7, "raw": True, "stop": ["a", "b"], "temperature": 0.5}
    assert {name: first.options[name] for name in wanted} == wanted
    assert second.prompt == "[x]"
    assert "max_tokens" not in second.options
    assert second.options["stop"] == "END"


def test_missing_numbers_of_other_programs(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "max_tokens": float("nan"), "temperature": float("nan")}]
    assert "max_tokens" not in requests(write(tmp_path / "in.parquet", rows))[0].options


def test_messages(tmp_path: Path, ending: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    given: Any = messages if ending == ".parquet" else json.dumps(messages)
    assert requests(write(tmp_path / f"in{ending}", [{"messages": given}]))[0].prompt == messages


def test_a_bad_cell_is_the_error_of_its_row(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text("prompt,temperature\na,hot\nb,0.5\n")
    hot, fine = Table(source).lines()
    with pytest.raises(LineError, match="temperature must be"):
        parse_line(hot, Defaults({}))
    assert parse_line(fine, Defaults({})).options["temperature"] == 0.5


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("in.csv", b"prompt,temprature\na,1\n", "did you mean 'temperature'"),
        ("in.csv", b"prompt,id\na\n", "cannot be read as csv"),
        ("in.csv", b"prompt\na\xff\n", "cannot be read as csv"),
        ("in.csv", b"", "cannot be read as csv"),
        ("in.parquet", b"PAR1 no", "cannot be read as parquet"),
        ("in.parquet", b"", "cannot be read as parquet"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        Table(tmp_path / name)
    assert "\n" not in str(caught.value)


class Stops(FakeWorker):
    def answers(self, requests: Iterable[LineRequest]) -> Iterator[Answer]:
        for count, answer in enumerate(super().answers(requests)):
            if count == 2:
                raise KeyboardInterrupt
            yield answer


@pytest.mark.parametrize("order", ["input", "completion"])
def test_resuming(tmp_path: Path, ending: str, order: Order) -> None:
    source, target = write(tmp_path / f"in{ending}", ROWS), tmp_path / f"out{ending}"
    with pytest.raises(KeyboardInterrupt):
        run_table(source, target, settings(order), Stops())
    assert not target.exists()
    assert run_table(source, target, settings(order)).before >= 2
    whole = read(target)
    worker = FakeWorker()
    counts = run_table(source, target, settings(order), worker)
    assert (counts.before, counts.done, counts.failed, worker.numbers) == (5, 5, 2, [])
    assert read(target) == whole
    with pytest.raises(JobError, match="other settings"):
        run_table(source, target, settings(order, max_tokens=1))


def test_killed_before_the_table_is_in_place(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = write(tmp_path / f"in{ending}", ROWS), tmp_path / f"out{ending}"
    with monkeypatch.context() as patch:
        patch.setattr("specrun.runtime.jobs.disk.os.replace", _refuse_tables)
        with pytest.raises(JobError, match="cannot grow"):
            run_table(source, target, settings())
    assert not target.exists()
    worker = FakeWorker()
    assert run_table(source, target, settings(), worker).before == 5
    assert worker.numbers == []
    assert len(read(target)) == 5


def _refuse_tables(part: Path, path: Path) -> None:
    if path.suffix != ".job":
        raise OSError(28, "No space left on device")
    part.rename(path)


def test_a_table_that_was_changed_is_refused(tmp_path: Path, ending: str) -> None:
    source, target = write(tmp_path / f"in{ending}", ROWS), tmp_path / f"out{ending}"
    run_table(source, target, settings())
    write(target, [row for row in read(target) if row["id"] != "line-2"])
    with pytest.raises(JobError, match="has 4 rows and its job 5"):
        run_table(source, target, settings())


def test_without_pyarrow(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['pyarrow'] = None\nfrom pathlib import Path\n"
        "from specrun.runtime.jobs import Table\nfrom specrun.models_cache.errors import UsageError\n"
        "try: Table(Path('in.csv'))\nexcept UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'specrun[arrow]'" in done.stdout
