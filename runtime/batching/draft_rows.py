"""A draft model for rows of a batch: each row has its own in a pool, and one run drafts a token for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.batching.drafting_group import GoesOn, StepCosts
from specrun.runtime.batching.row_chain import RowChain
from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.drafting import DraftModel
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.proposers.draft import DraftReader
from specrun.runtime.request import Request
from specrun.runtime.session import PREFILL_CHUNK

WIDE: Final = 16
FEW: Final = 8  # tokens of a row that are read in the run for all rows; more are read in runs of their own

Reading = Callable[[Request, Chooser], tuple[DraftReader, HeadEstimate]]


class DraftRow:
    """A row of the draft's pool, from the start of a request to its end."""

    method = "draft"
    needs_features = False

    def __init__(self, group: DraftRows, reader: DraftReader, estimate: HeadEstimate, *, drawn: bool) -> None:
        self.chain = RowChain(estimate, blind=drawn)
        self.reader = reader
        self.slot: int | None = None
        self.text: Sequence[int] = ()
        self._group = group

    def start(self, prompt: Sequence[int]) -> None:
        """Take a row, with what any row holds of the prompt."""
        self.text = prompt
        self._group.enter(self)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Not needed."""

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._group.rewind(self, length)

    def finish(self) -> None:
        """Leave the row; it holds the text until another request comes."""
        self._group.leave(self)


class DraftRows:
    """The group of all rows that draft with one draft model (`DraftingGroup`)."""

    def __init__(self, draft: DraftModel, rows: int, reading: Reading) -> None:
        """reading: how the draft tokens of a request are made, and what is known of such."""
        self.pool = RowPool(draft.session, rows)
        self.first_cost = StepCosts(draft.calibration.cost)
        self.step_cost = StepCosts(draft.calibration.cost)
        self._token_cost = draft.calibration.cost(WIDE) / WIDE
        self.depth = MAX_DRAFT_LENGTH
        self._reading = reading
        self._context = draft.session.sizes.context
        self._rows: dict[int, DraftRow] = {}  # in use, by slot

    def row(self, request: Request, chooser: Chooser) -> DraftRow:
        """What a request has of the group."""
        sampling = request.options.sampling
        return DraftRow(
            self, *self._reading(request, chooser), drawn=sampling.mode == "rejection" and not sampling.greedy
        )

    def held(self, prompt: Sequence[int]) -> None:
        """It reads texts by itself."""
        return

    def enter(self, row: DraftRow) -> None:
        """Give a request the first free row."""
        row.slot = next(slot for slot in range(len(self._rows) + 1) if slot not in self._rows)
        self._rows[row.slot] = row
        self.pool.begin(row.slot, row.text)

    def leave(self, row: DraftRow) -> None:
        """Free a row, and let the last one in use take its place, so that no run is over rows that are not."""
        if row.slot is None:
            return
        del self._rows[row.slot]
        self.pool.texts[row.slot] = [*row.text]
        last = max(self._rows, default=-1)
        if last > row.slot:
            moved = self._rows[row.slot] = self._rows.pop(last)
            self.pool.move(last, row.slot)
            moved.slot = row.slot
        row.slot = None

    def rewind(self, row: DraftRow, length: int) -> None:
        """Keep the first `length` tokens of a row."""
        if row.slot is not None and length < self.pool.cache.lengths[row.slot]:
            self.pool.cache.rewind_to(length, row.slot)

    def behind(self, rows: Sequence[RowProposer]) -> float:
        """Seconds of reading texts, beyond the few tokens that any round reads."""
        heads = [(row, row.head) for row in rows if isinstance(row.head, DraftRow)]
        held = [0 if head.slot is None else self.pool.cache.lengths[head.slot] for _, head in heads]
        return self._token_cost * sum(
            max(0, len(row.context) - FEW - length) for (row, _), length in zip(heads, held, strict=True)
        )

    def draft(self, rows: Sequence[RowProposer], goes_on: GoesOn) -> None:
        """Read what is new of each text, then draft token by token as long as that is worth it."""
        ready: list[tuple[RowProposer, DraftRow, int]] = []
        for row in rows:
            head = row.head
            if isinstance(head, DraftRow) and head.slot is not None and self._room(row) > 0:
                ready.append((row, head, head.slot))
        if not ready:
            return
        for row, _, slot in ready:
            self._read(slot, row.context)
        lengths = self.pool.cache.lengths
        news = {slot: list(row.context[lengths[slot] :]) for row, _, slot in ready}
        with self.first_cost.timed(len(ready)):
            logits = self._run(news)
        growing = self._extend(ready, logits)
        while growing:
            growing = [entry for entry in growing if entry[0].fixed is not None or entry[1].chain.likely()]
            if not growing or not goes_on([row for row, _, _ in growing]):
                return
            with self.step_cost.timed(len(growing)):
                logits = self._run({slot: [head.chain.tip] for _, head, slot in growing})
            growing = self._extend(growing, logits)

    def _room(self, row: RowProposer) -> int:
        """How many tokens a row may draft: not more than the draft's own context holds."""
        return min(row.limit, MAX_DRAFT_LENGTH, self._context - len(row.context))

    def _read(self, slot: int, context: Sequence[int]) -> None:
        """Run a long new part of a text by itself, but for its last token."""
        lengths = self.pool.cache.lengths
        while len(context) - lengths[slot] > FEW:
            end = min(lengths[slot] + PREFILL_CHUNK, len(context) - 1)
            self.pool.run(slot, [list(context[lengths[slot] : end])], rows=1)

    def _run(self, tokens: dict[int, list[int]]) -> dict[int, NDArray[np.float32]]:
        """Append tokens by slot; the logits f32 [V] after the last of each."""
        first, last = min(tokens), max(tokens)
        logits, _ = self.pool.run(first, [tokens.get(slot, []) for slot in range(first, last + 1)], rows=1)
        return {slot: logits[slot - first][0] for slot in tokens}

    def _extend(
        self, rows: Sequence[tuple[RowProposer, DraftRow, int]], logits: dict[int, NDArray[np.float32]]
    ) -> list[tuple[RowProposer, DraftRow, int]]:
        """Extend the chains; the rows that may go on."""
        further = []
        for row, head, slot in rows:
            token, q, sure = head.reader.next(logits[slot], head.chain.drafted, len(row.context))
            if head.chain.extend([token], [sure], q) and head.chain.depth < self._room(row):
                further.append((row, head, slot))
        return further

    @property
    def nbytes(self) -> int:
        """Bytes of its KV buffers."""
        return self.pool.cache.nbytes

    def close(self) -> None:
        """Free the pool."""
        self.pool.close()
