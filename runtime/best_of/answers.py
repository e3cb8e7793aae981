"""Answers in texts: found by a regular expression, and written in one way so that equal ones are equal."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from typing import Final

from specrun.models_cache.errors import ScoreError, UsageError

NUMBER: Final = r"[-+\u2212]?[$€£]?\d+(?:,\d+)*(?:\.\d+)?|[-+\u2212]?[$€£]?\.\d+"
"""A number, with a currency's sign and separators of thousands if it has them; matching takes linear time."""

SECONDS: Final = 5.0
_MOST_TEXT: Final = 1 << 20
_THOUSANDS: Final = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_PLAIN: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_MOST_DIGITS: Final = 400

# A pattern of the user's may take exponential time, and the `re` module cannot be stopped from within: so it runs in
# another process, which can.
_PROGRAM: Final = """
import json, re, sys
given = json.load(sys.stdin)
pattern = re.compile(given["pattern"])
found = []
for text in given["texts"]:
    last = None
    for last in pattern.finditer(text):
        pass
    found.append(None if last is None else last[1] if pattern.groups else last[0])
json.dump(found, sys.stdout)
"""


class AnswerPattern:
    """A regular expression that finds the answer of a text: the last match's group 1, or the whole match without one.

    pattern: by default the last number. seconds: for all texts of one call together. Raises UsageError for a pattern
    that is no regular expression.
    """

    def __init__(self, pattern: str | None = None, *, seconds: float = SECONDS) -> None:
        self.pattern = NUMBER if pattern is None else pattern
        self.seconds = seconds
        try:
            self._compiled = re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"{self.pattern!r} is no regular expression ({error}): mend it.") from None

    def find(self, texts: Sequence[str]) -> list[str | None]:
        """The answer of each text as `normalise` writes it, None where nothing, or nothing but spaces, matches.

        Raises ScoreError where the pattern takes longer than `seconds`.
        """
        texts = [text[-_MOST_TEXT:] for text in texts]
        linear = self.pattern == NUMBER
        found = [_last(self._compiled, text) for text in texts] if linear else self._elsewhere(texts)
        return [normalise(answer) or None if answer is not None else None for answer in found]

    def _elsewhere(self, texts: Sequence[str]) -> list[str | None]:
        task = json.dumps({"pattern": self.pattern, "texts": texts})
        try:
            done = subprocess.run(
                [python_program(), "-I", "-S", "-c", _PROGRAM],
                input=task.encode("ascii"),
                capture_output=True,
                timeout=self.seconds,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise ScoreError(
                f"The pattern {self.pattern!r} takes more than {self.seconds:g} seconds: it tries too many ways to "
                "match, so write it without repetitions inside repetitions."
            ) from None
        except (OSError, subprocess.CalledProcessError) as error:
            raise ScoreError(f"The pattern {self.pattern!r} could not be tried ({error}).") from error
        found: list[str | None] = json.loads(done.stdout)
        return found


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    last = None
    for match in pattern.finditer(text):
        last = match[0]
    return last


@functools.cache
def python_program() -> str:
    """The Python that runs this, to start another with. Raises UsageError inside a frozen application."""
    if getattr(sys, "frozen", False) or not sys.executable:
        raise UsageError("This application has no Python of its own to start: give a Python function as the score.")
    return sys.executable


def normalise(answer: str) -> str:
    """One way of writing an answer: "$1,000.00", "1000." and "+1000" are "1000"; other texts lose case and spaces."""
    text = " ".join(answer.split()).strip("*_` ")
    number = re.sub(r"^([-+]?)\s*[$€£]\s*([-+]?)", r"\1\2", text).rstrip(".").strip()
    number = number.replace("−", "-")
    if _THOUSANDS.fullmatch(number):
        number = number.replace(",", "")
    elif number.endswith(","):
        number = number.rstrip(",")
    if len(number) <= _MOST_DIGITS and number.isascii() and _PLAIN.fullmatch(number):
        return _plain(Decimal(number))
    return text.rstrip(".").casefold()


def _plain(value: Decimal) -> str:
    text = f"{value:f}"
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text.lstrip("+")
