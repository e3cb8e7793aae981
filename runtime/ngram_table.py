"""Suffix lookup: where did the last tokens stand before, and what followed them?

Used for prompt-lookup and n-gram proposals (Saxena 2023; Yang et al. 2023), and over earlier requests (the idea of
SuffixDecoding, Oliaro et al. 2024). Every n-gram of length 1 .. max_n that has a follower is in one dict, keyed by the
n-gram packed into one integer, with the place of its newest follower; what an entry held before stands in an undo log,
so that `rewind_to` restores the exact state. For the longest n-grams that leads on from place to place, and the one
before which most tokens match is taken: that finds what a suffix tree finds, by a table. Beside the texts stands the
pool of lookahead decoding (`ngram_pool`).
"""

from __future__ import annotations

import io
import itertools
import zipfile
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt

from specrun.models_cache.errors import CacheError, IntegrityError, UsageError
from specrun.runtime.ngram_pool import KEYS, NgramPool
from specrun.runtime.npz_file import DAMAGED, read_array, write_arrays
from specrun.runtime.proposal import MAX_NODES

__all__ = ["Agreement", "Match", "NgramTable"]

_FORMAT: Final = 2  # 1 had no pool
_TOKEN_BITS: Final = 32
_TOKEN_END: Final = 2**_TOKEN_BITS - 1  # token + 1 must fit into the bits
_NONE: Final = -1
_FILE_END: Final = 16 << 20

LONGEST_MATCH: Final = 32
CANDIDATES: Final = 8
"""Places of a longest n-gram that are compared, in the current text and in earlier texts each, the newest first."""

Agreement = Literal["alone", "agree", "differ", "earlier", "predicted", "sibling", "siblings"]


@dataclass(frozen=True, slots=True)
class Match:
    """A proposal of the table.

    length     tokens of the suffix that matched, counted up to 32: the longer, the likelier is the continuation
    tokens     what followed it, at least one token
    agreement  for each token: whether the occurrence before that one went on in the same way ("agree", "differ"), or
               there is none that had gone along until then ("alone"); "earlier" for a match in an earlier text,
               "predicted" for one in a `PredictedText`; "sibling" for one in another sample of the same prompt,
               "siblings" where two go on in the same way
    """

    length: int
    tokens: tuple[int, ...]
    agreement: tuple[Agreement, ...] = field(default=(), compare=False)


def ngram_keys(text: Sequence[int], end: int, max_n: int) -> list[int]:
    """The packed suffixes of text[:end], lengths 1 .. min(end, max_n). No two n-grams of any length share a key."""
    keys = []
    key = shift = 0
    for token in reversed(text[max(0, end - max_n) : end]):
        key |= (token + 1) << shift
        shift += _TOKEN_BITS
        keys.append(key)
    return keys


def _checked(token: int) -> int:
    token = int(token)
    if not 0 <= token < _TOKEN_END:
        raise UsageError(f"{token} is not a token id: ids are 0 or more and below 2**32 - 1.")
    return token


def _read(file: BinaryIO, vocabulary: int) -> tuple[_Lists, _Lists]:
    """The texts and the pool of a file that `NgramTable.save` wrote.

    ValueError and the errors of zipfile if it is anything else.
    """
    data = file.read(_FILE_END)
    if len(data) == _FILE_END:
        raise ValueError("too large")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        version = int(read_array(archive, "format", np.int64, ()))
        if version not in (1, _FORMAT):
            raise ValueError(f"format {version}, not {_FORMAT}")
        texts = _lists(archive, "tokens", "lengths", vocabulary)
        empty = _Lists(np.zeros(0, np.uint32), np.zeros(0, np.int64))
        grams = _lists(archive, "pool", "pool_lengths", vocabulary) if version == _FORMAT else empty
    sizes = grams.lengths
    if sizes.size > KEYS * MAX_NODES or (sizes.size and not 2 <= int(sizes.min()) <= int(sizes.max()) <= MAX_NODES):
        raise ValueError("the pool has other n-grams than are kept")
    return texts, grams


@dataclass(frozen=True, slots=True)
class _Lists:
    """Lists of tokens that were written one behind the other, with their lengths; made into lists one by one."""

    tokens: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.int64]

    def newest(self, most: int) -> Iterator[list[int]]:
        """The last ones of up to `most` tokens together, the oldest first; of a longer last one its end."""
        ends = np.cumsum(self.lengths)
        total = int(self.tokens.size)
        first = int(np.searchsorted(ends, max(0, total - most)))  # ends there, or holds the first token that is taken
        for length, end in zip(self.lengths[first:].tolist(), ends[first:].tolist(), strict=True):
            start = end - length
            if start >= total - most:
                yield self.tokens[start:end].tolist()
            elif end == total:
                yield self.tokens[total - most : end].tolist()


def _lists(archive: zipfile.ZipFile, tokens_name: str, lengths_name: str, vocabulary: int) -> _Lists:
    tokens = read_array(archive, tokens_name, np.uint32, (None,))
    lengths = read_array(archive, lengths_name, np.int64, (None,))
    if lengths.size and not 1 <= int(lengths.min()) <= int(lengths.max()) <= tokens.size:
        raise ValueError("there are lists without tokens, or with more than there are")
    if int(lengths.sum()) != tokens.size:
        raise ValueError("the lengths do not add up")
    if tokens.size and int(tokens.max()) >= vocabulary:
        raise ValueError(f"token {int(tokens.max())} is outside a vocabulary of {vocabulary}")
    return _Lists(tokens, lengths)


class NgramTable:
    """The n-grams of the current text and, after them, of earlier texts.

    Which match wins: the longest suffix, counted up to 32 tokens and found among the 8 newest occurrences of its last
    `max_n`; among equally long ones the current text before earlier texts; among these the most recent occurrence. If
    nothing matches nothing is proposed. A proposal never holds an end-of-sequence id: it is
    cut before one, and an occurrence followed by one is no match. Where a continuation runs into the end of the
    current text (a repeat of a period) it goes on copying from itself.

    max_n           longest n-gram in the table; longer suffixes are compared where it leads
    eos_ids         ids that are never proposed
    earlier_tokens  room for earlier texts, in tokens; the oldest text is dropped first (about 0.4 kB a token)
    pool            what lookahead decoding adds; `lookup` does not look there

    >>> table = NgramTable(); table.extend([5, 6, 7, 5, 6]); table.lookup(3)
    Match(length=2, tokens=(7, 5, 6))
    """

    def __init__(self, max_n: int = 5, *, eos_ids: Collection[int] = (), earlier_tokens: int = 16_384) -> None:
        if max_n < 1 or earlier_tokens < 0:
            raise UsageError(f"max_n must be 1 or more and earlier_tokens 0 or more, not {max_n} and {earlier_tokens}.")
        self.max_n = max_n
        self.eos_ids = frozenset(int(token) for token in eos_ids)
        self.earlier_tokens = earlier_tokens
        self._text: list[int] = []
        self._followers: dict[int, int] = {}  # n-gram -> place in the text of its newest follower
        self._undo = array("q")  # what each entry held before, in the order of writing
        self._undo_starts = array("q")  # for each place, where its entries stand in the undo log
        self._earlier: list[list[int]] = []  # oldest first
        self._earlier_before: list[array[int]] = []  # of each place, where its longest n-gram was followed before
        self._bases: list[int] = []  # where each stands in a numbering of all texts ever added
        self._next_base = 0
        self._earlier_followers: dict[int, int] = {}
        self.pool = NgramPool(eos_ids=self.eos_ids)

    def beside(self) -> NgramTable:
        """Another table with a current text of its own and these earlier texts, now and later; add them here."""
        other = NgramTable(self.max_n, eos_ids=self.eos_ids, earlier_tokens=self.earlier_tokens)
        other.share(self)
        return other

    def share(self, other: NgramTable) -> None:
        """Have the earlier texts and the pool of another table, now and later, for one's own."""
        self._earlier, self._earlier_before, self._bases = other._earlier, other._earlier_before, other._bases
        self._earlier_followers, self.pool = other._earlier_followers, other.pool

    def __len__(self) -> int:
        """Tokens of the current text."""
        return len(self._text)

    @property
    def earlier_size(self) -> int:
        """Tokens of the earlier texts held."""
        return sum(map(len, self._earlier))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens to the current text; UsageError for ids that are negative or above 32 bits."""
        text, followers, undo, eos_ids = self._text, self._followers, self._undo, self.eos_ids
        starts = self._undo_starts
        for token in tokens:
            token = _checked(token)
            starts.append(len(undo))
            if token not in eos_ids:
                place = len(text)
                for key in ngram_keys(text, place, self.max_n):
                    undo.append(followers.get(key, _NONE))
                    followers[key] = place
            text.append(token)

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` tokens of the current text, exactly as if no more had come; ValueError if fewer."""
        text, followers, undo = self._text, self._followers, self._undo
        if not 0 <= length <= len(text):
            raise ValueError(f"cannot rewind to {length}: the text has {len(text)} tokens")
        if length == 0:
            text.clear()
            followers.clear()
            del undo[:], self._undo_starts[:]
        del self._undo_starts[length:]
        while len(text) > length:
            if text.pop() not in self.eos_ids:
                for key in reversed(ngram_keys(text, len(text), self.max_n)):
                    before = undo.pop()
                    if before == _NONE:
                        del followers[key]
                    else:
                        followers[key] = before

    def add_text(self, tokens: Iterable[int]) -> None:
        """Add the tokens of an earlier request; of more than `earlier_tokens` the last ones are kept."""
        text = [_checked(token) for token in tokens]
        text = text[max(0, len(text) - self.earlier_tokens) :]
        if not text:
            return
        room = self.earlier_tokens - len(text)
        while self.earlier_size > room:
            self._drop_oldest()
        base = self._next_base
        before = array("q", [_NONE]) * len(text)
        self._earlier.append(text)
        self._earlier_before.append(before)
        self._bases.append(base)
        self._next_base += len(text)
        for place, token in enumerate(text):
            if token not in self.eos_ids:
                keys = ngram_keys(text, place, self.max_n)
                if len(keys) == self.max_n:
                    before[place] = self._earlier_followers.get(keys[-1], _NONE)
                for key in keys:
                    self._earlier_followers[key] = base + place

    def _drop_oldest(self) -> None:
        text, base = self._earlier.pop(0), self._bases.pop(0)
        del self._earlier_before[0]
        for place in range(len(text)):
            for key in ngram_keys(text, place, self.max_n):
                if self._earlier_followers.get(key) == base + place:  # no newer text has it
                    del self._earlier_followers[key]

    def lookup(self, max_tokens: int) -> Match | None:
        """What may follow the current text: up to `max_tokens` tokens, or None where no suffix stood before."""
        if max_tokens < 1:
            return None
        text = self._text
        keys = ngram_keys(text, len(text), self.max_n)
        for length in range(len(keys), 0, -1):
            places = itertools.islice(self._own_places(keys[length - 1], length), CANDIDATES)
            older = itertools.islice(self._earlier_places(keys[length - 1], length), CANDIDATES)
            found = max(itertools.chain(places, older), key=lambda match: match[0], default=None)
            if found is None:
                continue
            whole, body, place = found
            tokens = body[place : place + max_tokens]
            if body is not text:
                earlier: list[Agreement] = ["earlier"] * len(tokens)
                return Match(whole, self._before_eos(tokens), tuple(earlier))
            period = len(tokens)
            while len(tokens) < max_tokens:  # it ran into the end of the text: copy on from the copy
                tokens.append(tokens[-period])
            before = self._undo[self._undo_starts[place] + length - 1]
            return Match(whole, self._before_eos(tokens), self._agreement(before, tokens))
        return None

    def _own_places(self, key: int, length: int) -> Iterator[tuple[int, list[int], int]]:
        """(tokens that match, the text, place after them) where an n-gram stands in the current text, newest first.

        Only the newest one of those that are shorter than the longest: there nothing more matches.
        """
        place = self._followers.get(key, _NONE)
        while place != _NONE:
            yield self._whole_length(length, self._text, place), self._text, place
            place = self._undo[self._undo_starts[place] + length - 1] if length == self.max_n else _NONE

    def _earlier_places(self, key: int, length: int) -> Iterator[tuple[int, list[int], int]]:
        """The same in earlier texts."""
        place = self._earlier_followers.get(key, _NONE)
        while place != _NONE and place >= self._bases[0]:  # what stood before may have been dropped
            index = bisect_right(self._bases, place) - 1
            body, start = self._earlier[index], place - self._bases[index]
            yield self._whole_length(length, body, start), body, start
            place = self._earlier_before[index][start] if length == self.max_n else _NONE

    def _agreement(self, before: int, tokens: Sequence[int]) -> tuple[Agreement, ...]:
        """How the occurrence whose followers begin at `before` (-1: none) goes along with `tokens`."""
        agreement: list[Agreement] = ["alone"] * len(tokens)
        if before != _NONE:
            text = self._text
            for index, token in enumerate(tokens):
                if before + index >= len(text) or text[before + index] != token:
                    agreement[index] = "differ"
                    break
                agreement[index] = "agree"
        return tuple(agreement)

    def _whole_length(self, length: int, body: Sequence[int], place: int) -> int:
        """How many tokens before `place` in `body` equal the end of the text; the first `length` are known to."""
        text = self._text
        if length == self.max_n:
            most = min(LONGEST_MATCH, place, len(text))
            while length < most and body[place - 1 - length] == text[-1 - length]:
                length += 1
        return length

    def _before_eos(self, tokens: list[int]) -> tuple[int, ...]:
        for index, token in enumerate(tokens):
            if token in self.eos_ids:
                return tuple(tokens[:index])
        return tuple(tokens)

    def save(self, path: Path | str) -> None:
        """Write earlier texts and pool to a .npz file, whole or not at all; CacheError if the folder refuses."""
        arrays: dict[str, npt.NDArray[Any]] = {"format": np.array(_FORMAT, np.int64)}
        for lists, tokens, lengths in ((self._earlier, "tokens", "lengths"), ([*self.pool], "pool", "pool_lengths")):
            arrays[tokens] = np.array([token for one in lists for token in one], np.uint32)
            arrays[lengths] = np.array([len(one) for one in lists], np.int64)
        write_arrays(Path(path), arrays)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        tokens: int,
        max_n: int = 5,
        eos_ids: Collection[int] = (),
        earlier_tokens: int = 16_384,
    ) -> NgramTable:
        """A table that holds the earlier texts and the pool of a file which `save` wrote.

        tokens  size of the vocabulary: ids from there on belong to another model

        Errors: IntegrityError if the file is cut, changed, larger than what `save` writes, or of another model;
        CacheError if it cannot be read.
        """
        path = Path(path)
        table = cls(max_n, eos_ids=eos_ids, earlier_tokens=earlier_tokens)
        try:
            with open(path, "rb") as file:
                texts, grams = _read(file, tokens)
        except OSError as error:
            raise CacheError(f"Cannot read {path}: {error.strerror}.") from error
        except DAMAGED as error:
            raise IntegrityError(f"{path} is not a table of earlier texts ({error}): name another file.") from error
        for text in texts.newest(earlier_tokens):
            table.add_text(text)
        for token, *gram in grams.newest(int(grams.tokens.size)):
            table.pool.add(token, tuple(gram), MAX_NODES)
        return table
