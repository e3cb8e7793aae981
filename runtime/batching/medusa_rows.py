"""Medusa for rows of a batch: one run of the heads for all rows that want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.batching.drafting_group import GoesOn, StepCosts
from specrun.runtime.batching.row_chain import RowChain
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.chooser import Chooser
from specrun.runtime.feature_rows import Columns
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.request import Request
from specrun.runtime.speculator import Choice, MedusaSession

MEASURED = 4  # rows of the second run that costs are measured by

Drawing = Callable[[Request, Chooser], tuple[HeadSampling, HeadEstimate]]


class MedusaRow:
    """The newest feature of a row."""

    method = "medusa"
    needs_features = True

    def __init__(self, sampling: HeadSampling, estimate: HeadEstimate, columns: Columns) -> None:
        self.chain = RowChain(estimate, blind=sampling.drawn)
        self.sampling = sampling
        self.feature: NDArray[np.float32] | None = None
        self.position = -1  # of the token whose feature is held
        self._columns = columns

    def start(self, prompt: Sequence[int]) -> None:
        """Nothing is held of an earlier request."""

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Keep the last row."""
        if len(features):
            self.feature = features[-1, self._columns].copy()
            self.position = position + len(features) - 1

    def rewind_to(self, length: int) -> None:
        """The features that come next take the place of what is held."""

    def finish(self) -> None:
        """Nothing to free."""


class MedusaRows:
    """The group of all rows that draft with one Medusa speculator (`DraftingGroup`)."""

    def __init__(self, session: MedusaSession, columns: Columns, alone: float, drawing: Drawing) -> None:
        """alone: seconds of a run for one row. drawing: how a request draws, and what is known of such."""
        several = min(max(session.measure(MEASURED), alone), MEASURED * alone)  # what is beyond was disturbed
        slope = (several - alone) / (MEASURED - 1)
        self.first_cost = StepCosts(lambda rows: alone + slope * (rows - 1))
        self.depth = session.heads
        self._session = session
        self._columns = columns
        self._drawing = drawing

    @property
    def step_cost(self) -> None:
        """There are no further runs."""
        return None

    def row(self, request: Request, chooser: Chooser) -> MedusaRow:
        """What a request has of the group."""
        return MedusaRow(*self._drawing(request, chooser), self._columns)

    def held(self, prompt: Sequence[int]) -> None:
        """The last position's feature comes in any case."""
        return

    def behind(self, rows: Sequence[RowProposer]) -> float:
        """It keeps nothing of a text."""
        return 0.0

    def draft(self, rows: Sequence[RowProposer], goes_on: GoesOn) -> None:
        """One run gives all depths."""
        ready: list[tuple[RowProposer, MedusaRow, NDArray[np.float32]]] = []
        for row in rows:
            head = row.head
            if isinstance(head, MedusaRow) and head.feature is not None and head.position == len(row.context) - 2:
                ready.append((row, head, head.feature))
        if not ready:
            return
        heads, count = self._session.heads, len(ready)
        noises = [head.sampling.noise(*range(len(row.context), len(row.context) + heads)) for row, head, _ in ready]
        noise = None
        if any(own is not None for own in noises):
            blank = np.zeros((heads, self._session.draft_vocabulary), np.float32)
            own_rows = [blank if own is None else own for own in noises]
            noise = np.stack(own_rows, axis=1).reshape(heads * count, -1)
        drawn = any(head.sampling.drawn for _, head, _ in ready)
        with self.first_cost.timed(count):
            candidates = self._session.run(
                np.stack([feature for _, _, feature in ready]),
                [row.context[-1] for row, _, _ in ready],
                Choice(noise=noise, logits=drawn),
            )
        for place, (row, head, _) in enumerate(ready):
            own = noises[place]
            for depth in range(min(heads, row.limit)):
                at = depth * count + place
                sure = head.sampling.sureness_at_one(
                    candidates.tokens[at], candidates.log_probs[at], None if own is None else own[depth]
                )
                q = None
                if head.sampling.drawn and candidates.logits is not None:
                    q = head.sampling.distribution(candidates.logits[at])
                if not head.chain.extend(candidates.tokens[at], sure, q):
                    break

    @property
    def nbytes(self) -> int:
        """Bytes of its KV buffers."""
        return 0

    def close(self) -> None:
        """The session belongs to the engine."""
