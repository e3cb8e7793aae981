"""A text that a request says is likely to come: where in it does the output stand, and what follows there?

Before the first token it stands at the beginning. Later the longest end of the output that stands in the prediction
decides, so after a difference the two find together again; of several places the next one after the place before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from specrun.runtime.ngram_table import LONGEST_MATCH, Agreement, Match

LENGTHS: Final = (4, 2, 1)  # of the n-grams that lead to places
AHEAD: Final = 6  # places compared from the one expected on, and
BEHIND: Final = 2  # before it


class PredictedText:
    """The n-grams of a predicted output; for one request.

    >>> text = PredictedText([5, 6, 7, 8, 9]); text.lookup([1, 5, 6], 1, 2).tokens
    (7, 8)
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)
        self._places: dict[tuple[int, ...], list[int]] = {}  # n-gram -> where it was followed, ascending
        for place in range(1, len(self._tokens)):
            for length in LENGTHS:
                if length <= place:
                    self._places.setdefault(tuple(self._tokens[place - length : place]), []).append(place)
        self._expected = self._seen = 0  # the place that the output had come to, when the text had so many tokens

    def lookup(self, text: Sequence[int], start: int, max_tokens: int) -> Match | None:
        """What may follow `text`, whose output begins at `start`: up to `max_tokens` tokens, or None.

        `Match.length` counts the tokens of the output that match, up to 32; 32 where all of it does.
        """
        if max_tokens < 1:
            return None
        for token in text[self._seen :]:  # as far as it came as predicted
            if self._tokens[self._expected : self._expected + 1] != [token]:
                break
            self._expected += 1
        self._seen = len(text)
        found = self._place(text, start)
        if found is None:
            return None
        length, self._expected = found
        tokens = tuple(self._tokens[self._expected : self._expected + max_tokens])
        predicted: list[Agreement] = ["predicted"] * len(tokens)
        return Match(length, tokens, tuple(predicted)) if tokens else None

    def _place(self, text: Sequence[int], start: int) -> tuple[int, int] | None:
        """(tokens that match, place after them)."""
        if start >= len(text):
            return LONGEST_MATCH, 0
        for length in LENGTHS:
            if len(text) - start < length:
                continue
            places = self._places.get(tuple(text[len(text) - length :]))
            if places:
                middle = bisect_left(places, self._expected)
                near = [*places[middle : middle + AHEAD], *reversed(places[max(0, middle - BEHIND) : middle])]
                return max(((self._length(text, start, place), place) for place in near), key=lambda found: found[0])
        return None

    def _length(self, text: Sequence[int], start: int, place: int) -> int:
        """How many tokens before a place are the end of the output."""
        output, most = len(text) - start, min(LONGEST_MATCH, len(text) - start, place)
        count = 0
        while count < most and self._tokens[place - 1 - count] == text[-1 - count]:
            count += 1
        return LONGEST_MATCH if count == output == place else count
