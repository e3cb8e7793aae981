"""Prompt lookup: proposes what followed the last tokens where they stood before (Saxena 2023)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner
from specrun.runtime.ngram_table import Agreement, Match, NgramTable
from specrun.runtime.predicted_text import PredictedText
from specrun.runtime.proposal import Proposal
from specrun.runtime.tree_planner import Planned

Cell = tuple[int, Agreement]

# Chance that a copied token stands, by how many tokens before it match: after j accepted tokens the match is j longer.
# Counted on SmolLM2-135M's greedy answers to 140 Spec-Bench prompts; what a request shows then moves the estimates.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 20)
_CHANCES: dict[Agreement, tuple[float, ...]] = {
    "alone": (0.32, 0.54, 0.70, 0.76, 0.78, 0.82, 0.84, 0.89, 0.95),
    "agree": (0.50, 0.81, 0.83, 0.86, 0.90, 0.93, 0.96, 0.98, 0.99),
    "differ": (0.13, 0.21, 0.24, 0.31, 0.40, 0.40, 0.40, 0.50, 0.80),
    "earlier": (0.12, 0.25, 0.32, 0.38, 0.42, 0.55, 0.60, 0.75, 0.85),
}
PRIORS: dict[Cell, float] = {
    (length, agreement): chance
    for agreement, chances in _CHANCES.items()
    for length, chance in zip(LENGTHS, chances, strict=True)
}


_PREDICTED = (0.55, 0.75, 0.86, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97)


class NgramProposer:
    """Copies from the texts of `table`, the current one first; as many tokens as `planner` finds worth it.

    prediction: what is likely to come; it goes first wherever as much of the output matches as of any other text.
    """

    name = "ngram"
    needs_features = False

    def __init__(
        self,
        table: NgramTable,
        planner: DraftLengthPlanner,
        estimate: AcceptanceEstimate[Cell],
        prediction: PredictedText | None = None,
    ) -> None:
        self._table = table
        self._prediction = prediction
        self._prompt_length = 0
        # What is predicted well in one request may not be in the next.
        self._predicted = AcceptanceEstimate[Cell](
            {(length, "predicted"): chance for length, chance in zip(LENGTHS, _PREDICTED, strict=True)}
        )
        self._planner = planner
        self._estimate = estimate
        self._cells: list[Cell] = []  # of the match that was planned with last
        self._tokens: tuple[int, ...] = ()
        self._chances: list[float] = []

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request."""
        self._prompt_length = len(prompt_tokens)
        self._table.rewind_to(0)
        self._table.extend(prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Not needed."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """At most `limit` tokens after the longest match; EMPTY without one, or where it would not pay."""
        return self.plan(context, limit).proposal

    def plan(self, context: Sequence[int], limit: int) -> Planned:
        """As `propose`, with what it is worth."""
        self._table.extend(context[len(self._table) :])
        self._planner.begin(len(context))
        match = self._lookup(context, limit)
        self._cells = _cells(match) if match is not None else []
        self._tokens = match.tokens if match is not None else ()
        self._chances = [self._estimate_of(cell).chance(cell) for cell in self._cells]
        plan = self._planner.plan(self._chances, len(self._tokens))
        if not plan.count and self._cells:
            self._estimate_of(self._cells[0]).fade(self._cells[0])
        return Planned(Proposal(self._tokens[: plan.count], "deterministic"), plan.expected, plan.seconds)

    def _lookup(self, context: Sequence[int], limit: int) -> Match | None:
        """What most tokens before it lead to, in the prediction or in the table."""
        copied = self._table.lookup(limit)
        if self._prediction is None:
            return copied
        predicted = self._prediction.lookup(context, self._prompt_length, limit)
        return predicted if predicted and (copied is None or predicted.length >= copied.length) else copied

    def _estimate_of(self, cell: Cell) -> AcceptanceEstimate[Cell]:
        return self._predicted if cell[1] == "predicted" else self._estimate

    @property
    def match(self) -> list[tuple[int, float]]:
        """The tokens of the match that was planned with last, proposed or not, and their chances."""
        return list(zip(self._tokens, self._chances, strict=True))

    def learn_from(self, tokens: Sequence[int]) -> None:
        """Learn from what followed the context of the last plan, whether or not it was proposed."""
        for cell, ours, theirs in zip(self._cells, self._tokens, tokens, strict=False):
            self._estimate_of(cell).observe(cell, ours == theirs)
            if ours != theirs:
                break

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Learn how the last proposal fared."""
        for index in range(evaluated):
            cell = self._cells[index]
            self._estimate_of(cell).observe(cell, index < accepted)

    def rewind_to(self, length: int) -> None:
        """Forget what lies beyond `length` tokens."""
        if length < len(self._table):
            self._table.rewind_to(length)

    def close(self) -> None:
        """The table belongs to the engine: nothing to free."""
        self._cells = []


def _cells(match: Match) -> list[Cell]:
    return [
        (LENGTHS[bisect_right(LENGTHS, match.length + index) - 1], agreement)
        for index, agreement in enumerate(match.agreement[: len(match.tokens)])
    ]
