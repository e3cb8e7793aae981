"""How an input is cut into lines."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from specrun.runtime.jobs import JsonLines, lines, read_lines

TWO = [(1, b'{"prompt": "a"}'), (2, b'{"prompt": "b"}')]


def cut(data: bytes) -> list[tuple[int, bytes]]:
    return [(line.number, line.data) for line in read_lines(io.BytesIO(data))]


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": "a"}\n{"prompt": "b"}\n',
        b'{"prompt": "a"}\n{"prompt": "b"}',
        b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
        b'{"prompt": "a"}\r\n{"prompt": "b"}',
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n\n\n',
    ],
    ids=["LF", "no last LF", "CR LF", "no last CR LF", "byte order mark"],
)
def test_line_ends(data: bytes) -> None:
    assert cut(data) == TWO


def test_blank_lines_are_no_lines_but_count() -> None:
    assert cut(b"\n  \t\r\n{1}\n\n{2}\n \n") == [(3, b"{1}"), (5, b"{2}")]


def test_only_a_line_feed_ends_a_line() -> None:
    text = '{"prompt": "a\u2028b\u2029c\u0085d\x0be\x0cf\rg"}'
    assert cut(text.encode() + b"\n") == [(1, text.encode())]


@pytest.mark.parametrize("data", [b"", b"\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_nothing(data: bytes) -> None:
    assert cut(data) == []
    assert JsonLines(io.BytesIO(data), "in").total == 0


def test_a_mark_inside_is_text() -> None:
    assert cut(b"a\n\xef\xbb\xbfb\n") == [(1, b"a"), (2, b"\xef\xbb\xbfb")]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_an_over_long_line_is_told_by_its_size_alone(monkeypatch: pytest.MonkeyPatch, end: bytes) -> None:
    monkeypatch.setattr(lines, "MOST_BYTES", 10)
    for size in range(8, 40):
        found = list(read_lines(io.BytesIO(b"x" * size + b"\nnext" + end)))
        assert [(line.number, line.size) for line in found] == [(1, size), (2, 4)]
        assert len(found[0].data) <= 12
        assert found[1].data == b"next"


def test_what_is_appended_while_a_job_runs_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{1}\n{2")
    with path.open("rb") as stream:
        source = JsonLines(stream, "in.jsonl")
        with path.open("ab") as more:
            more.write(b"}\n{3}\n")
        assert [line.data for line in source.lines()] == [b"{1}", b"{2"]
        assert source.total == 2
