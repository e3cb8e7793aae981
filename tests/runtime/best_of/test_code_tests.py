"""Code taken from answers, put together with what a task gives, and scored by the share of tests that it passes."""

from __future__ import annotations

import sys
import warnings

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.best_of.code_tests import CodeTestsScore, assemble, extract_code

from .candidate_rows import candidates

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the sandbox needs fork")

PROMPT = 'from typing import List\n\n\ndef twice(x: int) -> int:\n    """ Twice x.\n    >>> twice(2)\n    4\n    """\n'
CHECK = "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
        ("~~~python\nx = '```'\n~~~", "x = '```'\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```bash\npip install a-long-name-of-a-package\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx\n```\n\n```python\nlonger = 1\n```", "longer = 1\n"),
        ("1. So:\n   ```python\n   x = 1\n   ```", "   x = 1\n"),
    ],
)
def test_code_in_fences(text: str, code: str) -> None:
    assert extract_code(text) == code


def test_of_several_blocks_the_last_that_defines_the_function() -> None:
    text = "```python\ndef f():\n    return 1\n```\nBetter:\n```python\ndef f(): return 2\n```\n"
    text += "```python\nprint(f(), 'and more')\n```"
    assert extract_code(text, "f") == "def f(): return 2\n"
    assert extract_code(text, "g") == "print(f(), 'and more')\n"


def test_a_whole_function_stands_behind_the_preamble_and_a_body_goes_on_from_it() -> None:
    whole = "```python\ndef twice(x: List[int]):\n    return 2 * x\n```"
    assert assemble(whole, PROMPT, "twice").startswith(PROMPT + "\ndef twice")
    assert assemble("    return 2 * x\n", PROMPT, "twice") == PROMPT + "    return 2 * x\n"
    assert assemble("x = 1", "", None) == "x = 1"
    assert assemble("x = 1", "import re", None) == "import re\nx = 1"


def test_right_wrong_and_broken_answers_of_a_task() -> None:
    score = CodeTestsScore(CHECK, entry_point="twice", preamble=PROMPT)
    rows = candidates(
        "```python\ndef twice(x: int) -> List:\n    return x + x\n```",
        "    return 2 * x\n",
        "def twice(x):\n    return x + 1\n",
        "I cannot help with that.",
        "",
        "twice = lambda x: 2 * x",
    )
    assert score.scores("", rows) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert [outcome.passed for outcome in score.outcomes] == [1, 1, 0, 0, 0, 1]
    assert "AssertionError" in (score.outcomes[2].reason or "")
    assert "SyntaxError" in (score.outcomes[3].reason or "")


def test_shares() -> None:
    score = CodeTestsScore("assert f(1) == 1\nassert f(2) == 4\nassert f(3) == 9\nassert f(4) == 16\n")
    rows = candidates("def f(x): return x * x", "def f(x): return x", "def f(x): return 4 if x == 2 else x")
    assert score.scores("", rows) == [1.0, 0.25, 0.5]


def test_a_file_without_tests_names_it() -> None:
    with pytest.raises(UsageError, match=r"mine\.py hold no test"):
        CodeTestsScore("x = 1", file="mine.py")


def test_doubtful_backslashes_in_an_answer_warn_nobody() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = "```python\nimport re\ndef f(x):\n    return re.sub('\\d', '', x)\n```"
        assert "re.sub('\\d'" in text
        assert assemble(text, "import re\n", "f").startswith("import re\n\nimport re\ndef f")
    assert told == []


def test_why_no_sample_passes_is_said() -> None:
    score = CodeTestsScore("from solution2 import twice\n\n\ndef test_it():\n    assert twice(2) == 4\n")
    assert score.notes == ()
    assert score.scores("", candidates("def twice(x):\n    return 2 * x")) == [0.0]
    assert len(score.notes) == 1
    assert score.notes[0].startswith("no sample passes a test; the first one: ModuleNotFoundError: No module named")
    assert score.notes[0].endswith("behind the answer's own code: they import nothing of it")
    score = CodeTestsScore("def test_it():\n    assert twice(2) == 4\n")
    score.scores("", candidates("def twice(x):\n    raise OSError('\\x1b[31m')"))
    assert score.notes == ("no sample passes a test; the first one: OSError: \\x1b[31m",)
    score.scores("", candidates("no code", "def twice(x):\n    return 2 * x"))
    assert score.notes == ()
    for answer in ("import absent\n\ndef twice(x):\n    return 4", "def twice(x):\n    import absent\n    return 4"):
        score.scores("", candidates(answer))  # it is not the tests that import it
        assert score.notes == ("no sample passes a test; the first one: ModuleNotFoundError: No module named 'absent'",)
    score.scores("", candidates("def twice(x):\n    return 5"))
    assert score.notes == ("no sample passes a test; the first one: AssertionError",)
