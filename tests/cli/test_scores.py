"""What --score takes, and the one sentence for what it does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specrun.cli.scores import KINDS, SCORES_HELP, parse_score
from specrun.models_cache.errors import ModelNotFoundError, SpecrunError, UsageError
from specrun.runtime.best_of import Candidate
from specrun.runtime.best_of.code_tests import CodeTestsScore
from specrun.runtime.best_of.command import CommandScore
from specrun.runtime.best_of.likelihood import CertaintyScore, LogprobScore
from specrun.runtime.best_of.vote import VoteScore

ROWS = [Candidate(0, "so 3", (1,), "stop", (-1.0,), (2.0,)), Candidate(1, "is 4.0 = 4", (1,), "stop", (-2.0,), (1.0,))]


def test_those_of_the_model() -> None:
    assert isinstance(parse_score("logprob"), LogprobScore)
    assert isinstance(parse_score("certainty"), CertaintyScore)
    assert parse_score("logprob").scores("", ROWS) == [-1.0, -2.0]


def test_vote_with_and_without_a_pattern() -> None:
    assert isinstance(parse_score("vote"), VoteScore)
    score = parse_score(r"vote:is (\d+):?.*")
    assert isinstance(score, VoteScore)
    assert score.answer.pattern == r"is (\d+):?.*"
    assert score.scores("", ROWS)[1] > 1 > score.scores("", ROWS)[0]


def test_a_command() -> None:
    score = parse_score(f"command:{sys.executable} -c 'print(2)'")
    assert isinstance(score, CommandScore)
    assert score.scores("", ROWS) == [2.0, 2.0]


def test_unit_tests(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("assert f(1) == 2\nassert f(2) == 0\n")
    row = Candidate(0, "def f(x): return 2", (1,), "stop", (-1.0,), ())
    score = parse_score(f"tests:{path}")
    assert isinstance(score, CodeTestsScore)
    assert score.scores("", [row]) == [0.5]
    path.write_text("def check(candidate):\n    assert candidate(1) == 2\n")
    assert parse_score(f"tests:{path}::f").scores("", [row]) == [1.0]
    with pytest.raises(UsageError, match="hold no test"):
        parse_score(f"tests:{path}")


def test_a_function_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rating_module.py").write_text(
        "class Rate:\n    @staticmethod\n    def length(prompt, text):\n        return len(text)\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    score = parse_score("python:my_rating_module:Rate.length")
    assert score.scores("", ROWS) == [4.0, 10.0]
    assert score.name == "python:my_rating_module:Rate.length"
    assert sys.path == before


def test_a_module_that_ends_the_program_or_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ending_module.py").write_text("import sys\nsys.exit()\n")
    (tmp_path / "my_moving_module.py").write_text(
        "import os\nos.chdir('/')\ndef rate(prompt, text): return len(text)\n"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(UsageError, match="cannot be imported: SystemExit"):
        parse_score("python:my_ending_module:rate")
    assert parse_score("python:my_moving_module:rate").scores("", ROWS) == [4.0, 10.0]
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no score ''"),
        ("best", "no score 'best': choose from logprob, certainty, vote, reward, command, tests, python"),
        ("logprob:x", "takes nothing behind it"),
        ("vote:", "lacks what follows its colon"),
        ("vote:(", "no regular expression"),
        ("reward", "write --score reward:NAME"),
        ("command:", "lacks what follows"),
        ("command:'", "mend its quotes"),
        ("tests:/no/such/file.py", "cannot be read: No such file"),
        ("tests:.", "cannot be read"),
        ("python:json", "names no function"),
        ("python:no_such_module_here:f", "cannot be imported: ModuleNotFoundError"),
        ("python:json:nothing", "has no function 'nothing'"),
        ("python:json:__name__", "has no function"),
    ],
)
def test_what_cannot_be(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_score(text)
    assert "\n" not in str(caught.value)


def test_a_reward_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError, match="no model 'judge'"):
        parse_score("reward:judge")


def test_a_language_model_is_no_reward_model(tiny: str) -> None:
    with pytest.raises(SpecrunError, match="it is no reward model; make one with `specrun export --task reward"):
        parse_score(f"reward:{tiny}")


def test_the_help_names_each() -> None:
    for kind in KINDS:
        assert f"{kind}:" in SCORES_HELP
