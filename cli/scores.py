"""`--score`: from its text to what rates the candidates."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from specrun.models_cache.errors import UsageError

if TYPE_CHECKING:
    from specrun.runtime.best_of.candidates import Score

SCORES_HELP: Final = (
    "logprob: mean log-probability. certainty: self-certainty. vote, vote:REGEX: the answer that most give, by default "
    "the last number. reward:NAME: a reward model. command:CMD: gets a JSON object, prints a number. tests:FILE.py: "
    "the share of unit tests that the code passes (FILE.py::NAME for a check(candidate)). python:MODULE:FUNCTION: of "
    "prompt and text."
)
KINDS: Final = ("logprob", "certainty", "vote", "reward", "command", "tests", "python")
_MOST_TESTS: Final = 1 << 22


def parse_score(text: str, *, seconds: float | None = None, threads: int | None = None) -> Score:
    """The score that a `--score` names.

    seconds: how long a command, or the tests of one candidate, may take; threads: of a reward model. One with `close`
    is to be closed by who asked for it. Raises UsageError: an unknown score, something missing or too much behind the
    colon, a file or function that is not there; ModelNotFoundError and what else loading a reward model raises.
    """
    kind, colon, rest = text.partition(":")
    if kind not in KINDS:
        raise UsageError(f"There is no score {kind!r}: choose from {', '.join(KINDS)}.")
    if kind in ("logprob", "certainty"):
        if colon:
            raise UsageError(f"The score {kind} takes nothing behind it: write --score {kind}.")
    elif not rest and (colon or kind != "vote"):
        raise UsageError(f"The score {kind} lacks what follows its colon: write {_EXAMPLES[kind]}.")
    return _MAKERS[kind](rest, seconds, threads)


_EXAMPLES: Final = {
    "vote": "--score vote or --score 'vote:Answer: (.+)'",
    "reward": "--score reward:NAME",
    "command": "--score 'command:./rate.py --fast'",
    "tests": "--score tests:test_it.py",
    "python": "--score python:module:function",
}


def _logprob(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.likelihood import LogprobScore

    return LogprobScore()


def _certainty(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.likelihood import CertaintyScore

    return CertaintyScore()


def _vote(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.answers import AnswerPattern
    from specrun.runtime.best_of.vote import VoteScore

    return VoteScore(AnswerPattern(rest or None))


def _reward(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.reward import RewardScore

    return RewardScore.load(rest, threads=threads)


def _command(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.command import SECONDS, CommandScore

    return CommandScore(rest, seconds=seconds or SECONDS)


def _tests(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.code_tests import CodeTestsScore
    from specrun.runtime.best_of.sandbox import Limits

    name, _, entry_point = rest.partition("::")
    path = Path(os.path.expanduser(name))
    try:
        with path.open("rb") as file:
            source = file.read(_MOST_TESTS + 1)
        if len(source) > _MOST_TESTS:
            raise UsageError(f"{path} has more than {_MOST_TESTS} bytes: give a file of unit tests.")
        tests = source.decode("utf-8")
    except OSError as error:
        raise UsageError(f"The tests {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: give a file of unit tests in Python.") from None
    limits = Limits() if seconds is None else Limits(seconds=seconds, cpu_seconds=max(1, round(seconds)))
    return CodeTestsScore(tests, entry_point=entry_point or None, limits=limits, file=str(path))


def _python(rest: str, seconds: float | None, threads: int | None) -> Score:
    from specrun.runtime.best_of.function import FunctionScore

    module, colon, name = rest.partition(":")
    if not (module and colon and name):
        raise UsageError(f"{rest!r} names no function: write {_EXAMPLES['python']}.")
    with _current_folder_first():
        try:
            found: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:  # whatever the module does when it is imported
            raise UsageError(f"The module {module!r} cannot be imported: {type(error).__name__}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"The module {module!r} has no function {name!r}: name one that takes prompt and text.")
    return FunctionScore(found, f"python:{rest}")


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """A module beside the user is found, as `python -m` would find it."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the module may have changed it
            sys.path.remove(folder)


_MAKERS: Final[dict[str, Callable[[str, float | None, int | None], Score]]] = {
    "logprob": _logprob,
    "certainty": _certainty,
    "vote": _vote,
    "reward": _reward,
    "command": _command,
    "tests": _tests,
    "python": _python,
}
