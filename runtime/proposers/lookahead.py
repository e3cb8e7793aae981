"""Lookahead decoding: guesses from a pool of n-grams, which a Jacobi iteration beside them fills (Fu et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.lookahead import LookaheadShape, TokenTree, Window
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import greedy_tokens

SURE_MATCH: Final = 3
"""From so many tokens before it on, what is copied may take the room of all guesses: it is right far more often."""


class LookaheadProposer:
    """Guesses and a window in one target run.

    The whole is a tree of deterministic draft tokens, the window's too: where the target goes through one it stands,
    like any other. That makes more of the same run (`docs/benchmarks.md`) and needs no second rule. So they count as
    draft tokens, and nothing is run that is deeper than may be committed: the last tokens of a text, and a small draft
    length, have less of a window. Guesses are the table's, as for `ngram`, then the pool's, in the room of G n-grams.

    The window moves by one column a round, as in the authors' code, however many tokens were committed; moving it by
    that many found less.
    """

    name = "lookahead"
    needs_features = False

    def __init__(self, table: NgramTable, shape: LookaheadShape, *, tokens: int) -> None:
        """tokens: size of the target's real vocabulary."""
        self._table = table
        self._shape = shape
        self._tokens = tokens
        self._window = Window(shape, (0,))
        self._ends: list[int | None] = []

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request, with a window of the prompt's n-grams."""
        self._table.rewind_to(0)
        self._table.extend(prompt_tokens)
        self._window = Window(self._shape, prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Not needed."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """The guesses, the best first, and the window; nothing of it deeper than `limit`."""
        self._table.extend(context[len(self._table) :])
        tree = TokenTree(limit)
        self._guess(tree, context[-1])
        self._ends = self._window.place(tree, context[-1])
        return tree.proposal()

    def _guess(self, tree: TokenTree, current: int) -> None:
        """What stood behind the same tokens before, then the n-grams of the pool, as far as there is room."""
        most = self._shape.ngram - 1
        room = most * self._shape.guesses
        match = self._table.lookup(room)
        if match is not None:
            tree.add_chain(match.tokens if match.length >= SURE_MATCH else match.tokens[:most])
        for gram in self._table.pool.guesses(current):
            if len(tree) + most > room:
                break
            tree.add_chain(gram[:most])

    def take_logits(self, logits: NDArray[np.float32]) -> None:
        """Let the window go on, and put the n-grams that this completes into the pool."""
        for column, node in enumerate(self._ends):
            if node is not None and node + 1 < len(logits):
                best = greedy_tokens(logits[node + 1 : node + 2], self._tokens)
                token, *gram = self._window.advance(column, int(best[0]))
                self._table.pool.add(token, tuple(gram), self._shape.guesses)

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Nothing to learn."""

    def rewind_to(self, length: int) -> None:
        """Forget what lies beyond `length` tokens."""
        if length < len(self._table):
            self._table.rewind_to(length)

    def close(self) -> None:
        """The table belongs to the engine: nothing to free."""
