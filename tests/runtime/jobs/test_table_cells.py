"""Cells of Parquet and CSV files as other programs write them."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.jobs import Defaults, LineError, LineRequest, Table, parse_line

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def requests(path: Path, table: Any) -> list[LineRequest | LineError]:
    """What each row asks for, or what is wrong with it."""
    parquet.write_table(table, path)
    found: list[LineRequest | LineError] = []
    for line in Table(path).lines():
        try:
            found.append(parse_line(line, Defaults({})))
        except LineError as error:
            found.append(error)
    return found


def test_text_in_columns_of_bytes(tmp_path: Path) -> None:
    """Old writers keep text as bytes: UTF-8 is read, other bytes are an error of their row and never made text."""
    column = pa.array(["é\u2028".encode(), b"\xff\xfe", None], pa.binary())
    right, bytes_, none = requests(tmp_path / "in.parquet", pa.table({"prompt": column}))
    assert isinstance(right, LineRequest)
    assert right.prompt == "é\u2028"
    assert isinstance(bytes_, LineError)
    assert (bytes_.code, str(bytes_)) == ("no_prompt", "prompt must be text, not [255, 254].")
    assert isinstance(none, LineError)


def test_whole_numbers_that_became_floats(tmp_path: Path) -> None:
    """A missing id makes floats of the others in pandas: they are still 1 and 2; half a number is no id."""
    table = pa.table({"id": pa.array([1.0, None, 2.0, 2.5]), "prompt": ["a"] * 4})
    first, second, third, half = requests(tmp_path / "in.parquet", table)
    assert [found.custom_id for found in (first, second, third)] == [1, None, 2]
    assert isinstance(first.custom_id, int)
    assert isinstance(half, LineError)
    assert half.code == "invalid_id"


def test_decimal_numbers(tmp_path: Path) -> None:
    columns = {
        "prompt": ["a"],
        "temperature": pa.array([decimal.Decimal("0.50")]),
        "seed": pa.array([decimal.Decimal(7)]),
    }
    (found,) = requests(tmp_path / "in.parquet", pa.table(columns))
    assert isinstance(found, LineRequest)
    assert (found.options["temperature"], found.options["seed"]) == (0.5, 7)


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, ending: str) -> None:
    """As a key of a line is: nobody can tell which one is meant."""
    path = tmp_path / f"in{ending}"
    if ending == ".csv":
        path.write_text("prompt,prompt\na,b\n")
    else:
        parquet.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    with pytest.raises(UsageError, match="has the column 'prompt' twice: leave one out"):
        Table(path)
