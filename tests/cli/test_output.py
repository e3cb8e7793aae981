from __future__ import annotations

import time

import pytest

from specrun.cli import output
from specrun.runtime.result import Token
from specrun.runtime.stream import Piece


def test_progress_elsewhere_than_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with output.progress_line() as line:
        for label, at in [("A", 0.0), ("a", 2.0), ("short", 0.1), ("short", 0.2), ("b", 3.0), ("c", 3.1), ("c", 4.2)]:
            clock[0] = 100.0 + at
            line(label, 1, None)
    assert capsys.readouterr() == ("", "a\nb\nc\n")


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    with output.progress_line() as line:
        line("reading", 1, 4)
        line("reading", 1, 4)
        line("reading", 2_500_000, None)
        line.on_terminal("measuring", 0, None)
    # click takes the "clear to the end" out of what goes elsewhere than to a real terminal.
    assert capsys.readouterr().err == "\rreading 25%\rreading 2.5 MB\rmeasuring\r"


def test_what_is_quick_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with output.waiting("loading it"):
        pass
    assert capsys.readouterr().err == ""


def test_what_is_slow_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", 0.01)
    with output.waiting("loading it"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "loading it\n"


def test_accepted_draft_tokens_are_green() -> None:
    draft, bonus = Token(1, "draft"), Token(2, "bonus")
    assert output.coloured(Piece("a", (draft,))) == "\x1b[32ma\x1b[0m"
    assert output.coloured(Piece("a", (bonus,))) == "a"
    assert output.coloured(Piece("ab", (draft, bonus))) == "ab"
    assert output.coloured(Piece("", (draft,))) == ""


def test_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not output.use_colour(True)
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    assert output.use_colour(True)
    assert not output.use_colour(False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not output.use_colour(True)
