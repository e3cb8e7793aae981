"""N-grams that a model guessed, by the token before them: the pool of lookahead decoding (Fu et al. 2024, section 3.2).

They were never text: `NgramTable`, which owns one, holds those that were. Both are saved in one file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

KEYS: Final = 4096
"""Tokens that the pool knows what follows of; the one that was guessed about longest ago is dropped first."""

Gram = tuple[int, ...]


class NgramPool:
    """For each token the n-grams that were guessed to follow it last.

    eos_ids  no n-gram holds one of these, before it or in it: what a model guesses beyond the end of a text is no text

    >>> pool = NgramPool(); pool.add(5, (6, 7), 2); pool.add(5, (8, 9), 2); pool.guesses(5)
    ((8, 9), (6, 7))
    """

    def __init__(self, *, eos_ids: Collection[int] = (), keys: int = KEYS) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._keys = keys
        self._grams: OrderedDict[int, list[Gram]] = OrderedDict()  # of each token, the newest last

    def __len__(self) -> int:
        """N-grams held."""
        return sum(map(len, self._grams.values()))

    def __iter__(self) -> Iterator[Gram]:
        """Each n-gram with its token before it, the oldest first: added in this order they make the same pool."""
        for token, grams in self._grams.items():
            for gram in grams:
                yield (token, *gram)

    def add(self, token: int, gram: Gram, most: int) -> None:
        """Note that `gram` was guessed to follow `token`, of which only the `most` newest n-grams are kept."""
        if not self._eos_ids.isdisjoint((token, *gram)):
            return
        grams = self._grams.setdefault(token, [])
        self._grams.move_to_end(token)
        if gram in grams:
            grams.remove(gram)
        grams.append(gram)
        del grams[: max(0, len(grams) - most)]
        if len(self._grams) > self._keys:
            self._grams.popitem(last=False)

    def guesses(self, token: int) -> tuple[Gram, ...]:
        """The n-grams that may follow a token, the newest first."""
        return tuple(reversed(self._grams.get(token, ())))
