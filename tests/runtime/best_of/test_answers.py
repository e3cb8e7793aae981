"""Answers: found by the last match, written in one way, and never at the cost of an endless search."""

from __future__ import annotations

import time

import pytest

from specrun.models_cache.errors import ScoreError, UsageError
from specrun.runtime.best_of.answers import AnswerPattern, normalise


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("1,000", "1000"),
        ("1000.0", "1000"),
        ("$1,000.00", "1000"),
        ("-$5", "-5"),
        ("$-5.50", "-5.5"),
        ("+7", "7"),
        ("7.", "7"),
        ("0.0", "0"),
        ("-0", "0"),
        (".5", "0.5"),
        ("007", "7"),
        ("1,2", "1,2"),
        ("12,34,567", "12,34,567"),
        ("**42**", "42"),
        ("  Yes. ", "yes"),
        ("New   York", "new york"),
        ("1e999999", "1e999999"),
        ("−3", "-3"),
    ],
)
def test_one_way_of_writing(text: str, answer: str) -> None:
    assert normalise(text) == answer
    assert normalise(normalise(text)) == answer


def test_numbers_beyond_every_limit_stay_text() -> None:
    assert normalise("9" * 5000) == "9" * 5000
    assert normalise("٣") == "٣"  # a digit of another script is no number here


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("first 3, then 4, so 1,234 dollars.", "1234"),
        ("She pays $14.00 a week", "14"),
        ("The answer is 5.", "5"),
        ("no number", None),
        ("", None),
        ("from 10-20", "-20"),
        ("It is 1,000, which is much", "1000"),
        ("5, or so", "5"),
        ("it is \u22125", "-5"),
    ],
)
def test_the_last_number_by_default(text: str, answer: str | None) -> None:
    assert AnswerPattern().find([text]) == [answer]


def test_group_1_or_the_whole_match_and_the_last_one() -> None:
    texts = ["Answer: a\nAnswer: B ", "none", "Answer:  "]
    assert AnswerPattern(r"Answer: *(.*)").find(texts) == ["b", None, None]
    assert AnswerPattern(r"x+").find(["x xx xxx y"]) == ["xxx"]
    assert AnswerPattern(r"(a)|b").find(["a b"]) == [None]  # the last match has no group 1
    assert AnswerPattern(r"\\boxed\{([^}]*)\}").find([r"so \boxed{1,000}"]) == ["1000"]


def test_a_pattern_that_is_none() -> None:
    with pytest.raises(UsageError, match="no regular expression"):
        AnswerPattern("(")


def test_a_catastrophic_pattern_is_stopped() -> None:
    started = time.monotonic()
    with pytest.raises(ScoreError, match=r"takes more than 0\.5 seconds"):
        AnswerPattern("(a+)+$", seconds=0.5).find(["a" * 40 + "b"])
    assert time.monotonic() - started < 30


def test_the_default_takes_linear_time() -> None:
    started = time.monotonic()
    assert AnswerPattern().find(["1," * 200_000 + "x" + "9" * 200_000])[0] is not None
    assert time.monotonic() - started < 5


def test_texts_that_are_no_unicode_are_read_all_the_same() -> None:
    assert AnswerPattern("=(.)").find(["\ud800 =3"]) == ["3"]
