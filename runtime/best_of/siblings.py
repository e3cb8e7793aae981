"""N-grams of all samples of one prompt: what one wrote is what another may well write."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

from specrun.runtime.draft_length import AcceptanceEstimate
from specrun.runtime.ngram_table import CANDIDATES, LONGEST_MATCH, Agreement, Match, NgramTable, ngram_keys
from specrun.runtime.proposers.ngram import LENGTHS, PRIORS, Cell

# Chance that a token copied from another sample stands, by how many tokens before it match. "sibling" was counted on
# SmolLM2-135M, 8 samples (temperature 0.8) of 11 Spec-Bench prompts each; from 8 tokens on, and of "siblings", which
# takes 5, there were few. What a request shows then moves the estimates.
_CHANCES: Final[dict[Agreement, tuple[float, ...]]] = {
    "sibling": (0.18, 0.35, 0.46, 0.55, 0.55, 0.52, 0.52, 0.55, 0.60),
    "siblings": (0.35, 0.55, 0.65, 0.70, 0.75, 0.75, 0.80, 0.85, 0.90),
}
SIBLING_PRIORS: Final[dict[Cell, float]] = {
    (length, agreement): chance
    for agreement, chances in _CHANCES.items()
    for length, chance in zip(LENGTHS, chances, strict=True)
}


def sibling_estimate() -> AcceptanceEstimate[Cell]:
    """What the rows of one prompt learn together."""
    return AcceptanceEstimate({**PRIORS, **SIBLING_PRIORS})


class SiblingTexts:
    """The completions of one prompt as they are written, each behind the prompt's last tokens."""

    def __init__(self, prompt: Sequence[int], max_n: int, eos_ids: Collection[int]) -> None:
        self._max_n, self._eos_ids = max_n, frozenset(eos_ids)
        self._prompt = list(prompt[-LONGEST_MATCH:])
        self._prompt_length = len(prompt)
        self._texts: dict[int, list[int]] = {}
        self._before: dict[int, list[tuple[int, int] | None]] = {}  # where the longest n-gram was followed before
        self._followers: dict[int, tuple[int, int]] = {}  # n-gram -> (sample, place) of its newest follower

    def extend(self, sample: int, tokens: Iterable[int], length: int) -> None:
        """A sample wrote these tokens behind `length` of prompt and text; what is known already is not taken twice."""
        if sample not in self._texts:
            self._texts[sample], self._before[sample] = [*self._prompt], [None] * len(self._prompt)
        text, before = self._texts[sample], self._before[sample]
        known = self._prompt_length - len(self._prompt) + len(text)
        for token in itertools.islice(tokens, max(0, known - length), None):
            place: tuple[int, int] | None = None
            if token not in self._eos_ids:
                keys = ngram_keys(text, len(text), self._max_n)
                if len(keys) == self._max_n:
                    place = self._followers.get(keys[-1])
                for key in keys:
                    self._followers[key] = sample, len(text)
            text.append(token)
            before.append(place)

    def lookup(self, text: Sequence[int], max_tokens: int) -> Match | None:
        """What may follow `text`: the longest match in any sample; of equally long ones the newest."""
        keys = ngram_keys(text, len(text), self._max_n)
        for length in range(len(keys), 0, -1):
            found = [
                (self._whole_length(length, text, body, place), -rank, body, place)
                for rank, (body, place) in enumerate(
                    itertools.islice(self._places(keys[length - 1], length), CANDIDATES)
                )
            ]
            if found:
                found.sort(key=lambda match: match[:2], reverse=True)
                whole, _, body, place = found[0]
                tokens = self._before_eos(body[place : place + max_tokens])
                other = found[1][2][found[1][3] : found[1][3] + len(tokens)] if len(found) > 1 else []
                return Match(whole, tokens, _agreement(tokens, other))
        return None

    def _places(self, key: int, length: int) -> Iterator[tuple[list[int], int]]:
        """(text, place after the n-gram) in the samples, the newest first; of shorter n-grams only the newest."""
        at = self._followers.get(key)
        while at is not None:
            sample, place = at
            yield self._texts[sample], place
            at = self._before[sample][place] if length == self._max_n else None

    def _whole_length(self, length: int, text: Sequence[int], body: Sequence[int], place: int) -> int:
        if length == self._max_n:
            most = min(LONGEST_MATCH, place, len(text))
            while length < most and body[place - 1 - length] == text[-1 - length]:
                length += 1
        return length

    def _before_eos(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(itertools.takewhile(lambda token: token not in self._eos_ids, tokens))


def _agreement(tokens: Sequence[int], other: Sequence[int]) -> tuple[Agreement, ...]:
    """Which of the tokens another match has too, so far as they go together."""
    same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False))))
    agreement: list[Agreement] = ["sibling"] * len(tokens)
    agreement[:same] = ["siblings"] * same
    return tuple(agreement)


class SiblingTable(NgramTable):
    """The table of one sample: its own text first, then those of all samples, then earlier texts."""

    def __init__(self, earlier: NgramTable, texts: SiblingTexts, sample: int) -> None:
        super().__init__(earlier.max_n, eos_ids=earlier.eos_ids, earlier_tokens=earlier.earlier_tokens)
        self.share(earlier)
        self._siblings, self._sample = texts, sample

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens to the text; the other samples see them from now on."""
        new, length = list(tokens), len(self)
        super().extend(new)
        if length:  # the first is the prompt, which all have
            self._siblings.extend(self._sample, new, length)

    def lookup(self, max_tokens: int) -> Match | None:
        """What may follow the text: the longest match; of equally long ones that in the own text."""
        own = super().lookup(max_tokens)
        theirs = self._siblings.lookup(self._text[-LONGEST_MATCH:], max_tokens) if max_tokens > 0 else None
        if theirs is None or not theirs.tokens:
            return own
        if own is None or theirs.length > own.length:
            return theirs
        return theirs if own.agreement[:1] == ("earlier",) and theirs.length == own.length else own
