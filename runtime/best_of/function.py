"""A score that a Python function gives."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence

from specrun.models_cache.errors import ScoreError
from specrun.runtime.best_of.candidates import Candidate


class FunctionScore:
    """What `function(prompt, text)` returns, a number; higher is better.

    >>> FunctionScore(lambda prompt, text: -len(text)).scores("", [])
    []
    """

    def __init__(self, function: Callable[[str, str], float], name: str = "python") -> None:
        self.name = name
        self._function = function

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`. Raises ScoreError where the function raises or returns no number."""
        found = []
        for candidate in candidates:
            try:
                value = self._function(prompt, candidate.text)
            except (Exception, SystemExit) as error:
                raise ScoreError(
                    f"The score {self.name} fails on candidate {candidate.index} with {type(error).__name__}: {error}"
                ) from error
            found.append(checked_number(value, f"The score {self.name} returned", candidate.index))
        return found


def checked_number(value: object, what: str, index: int) -> float:
    """`value` as a float. Raises ScoreError unless it is a number below infinity; -inf is one."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:  # a whole number beyond any float
        number = math.nan
    if math.isnan(number) or number == math.inf:
        raise ScoreError(f"{what} {value!r:.80} for candidate {index}: it must be a number.")
    return number
