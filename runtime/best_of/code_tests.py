"""Unit tests as a score for code: the share of them that the answer's code passes."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Final

from specrun.runtime.best_of.candidates import Candidate
from specrun.runtime.best_of.sandbox import Limits, Outcome, read_tests, run_in_sandbox

# A fence may be indented, and the last one may lack its end where the text was cut.
_FENCE: Final = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*\1[`~]*[ \t]*$|\Z)", re.M | re.S)
_QUOTED: Final = re.compile(r"'([\w.]+)'")
_LANGUAGES: Final = frozenset({"", "python", "py", "python3"})


class CodeTestsScore:
    """The share of unit tests that the code in an answer passes, run in a sandbox (`sandbox.py` says what it holds).

    tests: Python source (`read_tests`). entry_point: the function that a `check(candidate)` in the tests gets.
    preamble: source that stands before the answer's code, such as the imports and the head of a function that a task
    gives. Raises UsageError for tests that hold none.
    """

    name = "tests"

    def __init__(
        self,
        tests: str,
        *,
        entry_point: str | None = None,
        preamble: str = "",
        limits: Limits | None = None,
        walls: bool = True,
        file: str = "The tests",
    ) -> None:
        self._tests = read_tests(tests, entry_point, name=file)
        self._preamble = preamble
        self._limits = limits
        self._walls = walls
        self.outcomes: list[Outcome] = []
        """What the last call of `scores` found, one for each candidate."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Why none of the last candidates passes a test; nothing if one does."""
        if not self.outcomes or any(outcome.passed for outcome in self.outcomes):
            return ()
        reason = (self.outcomes[0].reason or "").rstrip(": ")
        lost = reason.startswith(("ModuleNotFoundError", "ImportError")) and self._imports(_QUOTED.findall(reason))
        mend = "; the tests run behind the answer's own code: they import nothing of it" if lost else ""
        return (f"no sample passes a test; the first one: {ascii(reason)[1:-1]:.200}{mend}",)

    def _imports(self, modules: Sequence[str]) -> bool:
        """Whether the tests, and not the answer alone, import one of these."""
        source = "\n".join(self._tests.steps)
        return any(re.search(rf"^\s*(?:from|import) +{re.escape(name)}\b", source, re.M) for name in modules)

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`: passed / all. Raises UsageError on Windows, ScoreError where the sandbox does not start."""
        known: dict[str, Outcome] = {}
        self.outcomes = []
        for candidate in candidates:
            code = assemble(candidate.text, self._preamble, self._tests.entry_point)
            if code not in known:
                known[code] = run_in_sandbox(code, self._tests, self._limits, walls=self._walls)
            self.outcomes.append(known[code])
        return [outcome.share for outcome in self.outcomes]


def extract_code(text: str, entry_point: str | None = None) -> str:
    """The Python code of an answer: its last fenced block that defines `entry_point`, else its longest; without a
    fence the whole text.
    """
    blocks = [match[3] for match in _FENCE.finditer(text) if match[2].lower() in _LANGUAGES]
    if not blocks:
        return text
    if entry_point is not None:
        defining = [block for block in blocks if _defines(block, entry_point)]
        if defining:
            return defining[-1]
    return max(blocks, key=len)


def assemble(text: str, preamble: str = "", entry_point: str | None = None) -> str:
    """The source to test: the answer's code behind the preamble, or going on from it where it defines nothing anew."""
    code = extract_code(text, entry_point)
    if not preamble or entry_point is None or _defines(code, entry_point):
        return f"{preamble}\n{code}" if preamble else code
    return preamble + code


def _defines(code: str, name: str) -> bool:
    try:
        with warnings.catch_warnings():  # of doubtful backslashes, say
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return re.search(rf"^(?:async +)?(?:def|class) +{re.escape(name)}\b", code, re.M) is not None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
    return False
