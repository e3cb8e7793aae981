"""What a score is asked about: the samples of one prompt, and what scoring them means."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sample of a prompt.

    logprobs: of each token, in nats, under the target's unfiltered distribution at temperature 1.
    certainties: of each token, KL(uniform || p): the mean over the vocabulary of V tokens of -log(V p), in nats.
    Both are as long as token_ids, or empty where nobody asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...]
    certainties: tuple[float, ...]


class Score(Protocol):
    """How good candidates are, by whatever measure.

    A score may also have `bound(logprobs, most_tokens) -> float | None` (`Bounded`).
    """

    @property
    def name(self) -> str:
        """What --score calls it."""
        ...

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """One number for each candidate, in order; higher is better, -inf means that it cannot be chosen.

        Raises SpecrunError where a score cannot be had.
        """
        ...


class Bounded(Score, Protocol):
    """A score that says of an unfinished candidate what it could still reach."""

    def bound(self, logprobs: Sequence[float], most_tokens: int) -> float | None:
        """The highest score of a candidate that begins with tokens of these log-probabilities and ends after at most
        `most_tokens` in all; None where nothing can be said.
        """
        ...


def mean_logprob(candidate: Candidate) -> float:
    """The mean log-probability of its tokens, in nats; -inf where it has none."""
    return mean(candidate.logprobs)


def mean(values: Sequence[float]) -> float:
    """The mean of these numbers, -inf of none."""
    return sum(values) / len(values) if values else float("-inf")


def is_number(value: object) -> bool:
    """Whether it is a real number; truth values and NaN are none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:  # a whole number beyond any float
        return True
