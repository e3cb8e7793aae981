"""Scores from outside: a Python function, and a command that prints a number."""

from __future__ import annotations

import math
import shlex
import sys
import time
from pathlib import Path

import pytest

from specrun.models_cache.errors import ScoreError, UsageError
from specrun.runtime.best_of.command import CommandScore
from specrun.runtime.best_of.function import FunctionScore

from .candidate_rows import candidates

ROWS = candidates("short", "much longer", "mid size")


def command(code: str, seconds: float = 30.0) -> CommandScore:
    return CommandScore([sys.executable, "-I", "-S", "-c", code], seconds=seconds)


def test_a_function_gets_prompt_and_text() -> None:
    seen = []

    def rate(prompt: str, text: str) -> float:
        seen.append((prompt, text))
        return -math.inf if text == "short" else len(text)

    assert FunctionScore(rate).scores("why?", ROWS) == [-math.inf, 11.0, 8.0]
    assert seen == [("why?", row.text) for row in ROWS]


@pytest.mark.parametrize("value", [None, "3", True, math.nan, math.inf, [1]])
def test_a_function_that_returns_no_number(value: object) -> None:
    with pytest.raises(ScoreError, match="for candidate 0: it must be a number"):
        FunctionScore(lambda prompt, text: value).scores("", ROWS)  # type: ignore[arg-type,return-value]


def test_a_function_that_raises() -> None:
    def rate(prompt: str, text: str) -> float:
        raise KeyError("gone")

    with pytest.raises(ScoreError, match=r"python fails on candidate 0 with KeyError: 'gone'"):
        FunctionScore(rate).scores("", ROWS)


def test_a_command_gets_one_object_and_prints_a_number() -> None:
    code = (
        "import json, sys\ngiven = json.load(sys.stdin)\n"
        "assert set(given) == {'prompt', 'text', 'index'} and given['prompt'] == 'wie?\\n\\u00fc'\n"
        "print(len(given['text']) + 100 * given['index'])"
    )
    assert command(code).scores("wie?\nü", ROWS) == [5.0, 111.0, 208.0]


def test_the_words_of_a_command_are_split_as_a_shell_does(tmp_path: Path) -> None:
    script = tmp_path / "a rate.py"
    script.write_text("import sys\nprint(len(sys.argv[1:]))")
    text = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))} 'one word; $HOME' two"
    assert CommandScore(text).scores("", ROWS[:1]) == [2.0]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('good')", "printed 'good' for candidate 0: it must print one number"),
        ("", "printed '' for candidate 0"),
        ("print(1, 2)", "printed '1 2'"),
        ("print('nan')", "printed nan for candidate 0"),
        ("print('inf')", "printed inf"),
        ("import sys; print(1); print('no weights', file=sys.stderr); sys.exit(3)", "exit code 3 .*: no weights"),
        ("import sys; sys.stdout.write('9' * 10**6)", "printed inf|must print one number"),
    ],
)
def test_a_command_that_fails(code: str, message: str) -> None:
    with pytest.raises(ScoreError, match=message):
        command(code).scores("", ROWS)


def test_minus_infinity_is_a_score() -> None:
    assert command("print('-inf')").scores("", ROWS[:1]) == [-math.inf]


def test_a_command_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    started = time.monotonic()
    sign = tmp_path / "sign"
    child = tmp_path / "child.py"
    child.write_text(f"import time\ntime.sleep(4)\nopen({str(sign)!r}, 'w')")
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, {str(child)!r}])\ntime.sleep(60)"
    with pytest.raises(ScoreError, match="takes more than 1 seconds for candidate 0"):
        command(code, seconds=1.0).scores("", ROWS)
    assert time.monotonic() - started < 30
    time.sleep(max(0.0, 5.0 - (time.monotonic() - started)))
    assert not sign.exists()


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ScoreError, match=r"'\./no-such-thing' cannot be started"):
        CommandScore("./no-such-thing --now").scores("", ROWS)
    for text, message in [("", "is empty"), ("'a", "mend its quotes")]:
        with pytest.raises(UsageError, match=message):
            CommandScore(text)


def test_a_command_that_does_not_read() -> None:
    big = candidates("x" * 3_000_000)
    assert command("print(1)").scores("", big) == [1.0]


def test_a_command_that_would_fill_the_disk_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(ScoreError, match="prints more than 64 MB for candidate 0"):
        command("import os\nwhile True: os.write(1, b'1' * 65536)", seconds=60.0).scores("", ROWS)
    assert time.monotonic() - started < 50


def test_numbers_beyond_any_and_an_end_of_the_program() -> None:
    with pytest.raises(ScoreError, match="for candidate 0: it must be a number"):
        FunctionScore(lambda prompt, text: 10**400).scores("", ROWS)
    with pytest.raises(ScoreError, match="fails on candidate 0 with SystemExit: 0"):
        FunctionScore(lambda prompt, text: sys.exit(0)).scores("", ROWS)
