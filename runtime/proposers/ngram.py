"""Prompt lookup: proposes what followed the last tokens where they stood before (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.draft_length import DraftLengthPlanner
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.proposal import EMPTY, Proposal

# Chance that the j-th copied token stands, by the length of the match.
PRIORS = {
    1: (0.28, 0.45, 0.55, 0.6),
    2: (0.42, 0.55, 0.62, 0.68),
    3: (0.55, 0.64, 0.70, 0.74),
    4: (0.65, 0.71, 0.76, 0.80),
    5: (0.80, 0.83, 0.86, 0.90),
}


class NgramProposer:
    """Copies from the texts of `table`, the current one first; as many tokens as `planner` finds worth it."""

    name = "ngram"

    def __init__(self, table: NgramTable, planner: DraftLengthPlanner) -> None:
        self._table = table
        self._planner = planner
        self._key = 0

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request."""
        self._table.rewind_to(0)
        self._table.extend(prompt_tokens)

    def propose(self, committed: Sequence[int], limit: int) -> Proposal:
        """At most `limit` tokens after the longest match; EMPTY without one, or where it would not pay."""
        self._table.extend(committed[len(self._table) :])
        match = self._table.lookup(limit)
        if match is None or not match.tokens:
            return EMPTY
        self._key = match.length
        count = self._planner.choose(match.length, len(match.tokens))
        return Proposal(match.tokens[:count], "deterministic") if count else EMPTY

    def observe(self, *, evaluated: int, accepted: int) -> None:
        """Learn how the last proposal fared."""
        if evaluated:
            self._planner.observe(self._key, evaluated=evaluated, accepted=accepted)

    def rewind_to(self, length: int) -> None:
        """Forget what lies beyond `length` committed tokens."""
        if length < len(self._table):
            self._table.rewind_to(length)

    def close(self) -> None:
        """The table belongs to the engine: nothing to free."""
        self._key = 0
