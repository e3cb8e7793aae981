"""EAGLE for rows of a batch: each level of all rows' chains is one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.batching.drafting_group import GoesOn, StepCosts
from specrun.runtime.batching.eagle_forest import EagleForest, ForestRow
from specrun.runtime.batching.medusa_rows import Drawing
from specrun.runtime.batching.row_chain import RowChain
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.feature_rows import Columns, FeatureRows
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.kv_cache import shared_prefix
from specrun.runtime.proposers.eagle import CHUNK, KEPT_ROWS, WINDOW, EagleCosts
from specrun.runtime.request import Request
from specrun.runtime.speculator import MAX_BRANCHES, PLAIN, Candidates, Choice

FEW: Final = 16  # slots of a row that are written in the run for all rows; more come in runs of their own


class EagleRow:
    """A row's slots in the forest, and the features of which no slot was written yet."""

    method = "eagle"
    needs_features = True

    def __init__(self, group: EagleRows, sampling: HeadSampling, estimate: HeadEstimate, columns: Columns) -> None:
        self.chain = RowChain(estimate, blind=sampling.drawn)
        self.sampling = sampling
        self.text: Sequence[int] = ()
        self.slots = ForestRow()
        self.first = 0  # the position that the first slot stands for
        self.features = FeatureRows(columns)
        self._columns = columns
        self._group = group
        self._begun = False

    @property
    def written(self) -> int:
        """The position that the next slot stands for."""
        return self.first + self.slots.length

    def start(self, prompt: Sequence[int]) -> None:
        """The prompt's first features tell how much of it the target held already."""
        self.text = prompt

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Keep them until their slots are written."""
        if not self._begun:
            self._begun = True
            self._group.enter(self, position)
        if position < self.written:
            self.slots.rewind_to(max(0, position - self.first))
        self.features.take(position, features)
        if self.features.end - self.written > 2 * WINDOW:  # the head was not asked for long: it begins anew
            self.first, self.slots = self.features.end - WINDOW, ForestRow()
            self._group.keep()
        self.features.forget_before(self.written)

    def rewind_to(self, length: int) -> None:
        """Keep the slots whose tokens are among the first `length`."""
        if length - 1 < self.written:
            self.slots.rewind_to(max(0, length - 1 - self.first))

    def finish(self) -> None:
        """The slots stay until room is needed: a later prompt may begin like this text."""
        self.text, self.features = [*self.text], FeatureRows(self._columns)
        self._group.leave(self)


class EagleRows:
    """The group of all rows that draft with one EAGLE speculator (`DraftingGroup`)."""

    def __init__(self, forest: EagleForest, columns: Columns, costs: EagleCosts, rows: int, drawing: Drawing) -> None:
        """rows: of the batch; so many ended ones are remembered. drawing: as in `MedusaRows`."""
        more = costs.level(1)
        self.first_cost = StepCosts(lambda count: costs.append + costs.level(count) - more)
        self.step_cost = StepCosts(costs.level)
        self._slot_cost = (costs.level(MAX_BRANCHES) - more) / (MAX_BRANCHES - 1)
        self.depth = MAX_DRAFT_LENGTH
        self._forest = forest
        self._columns = columns
        self._drawing = drawing
        self._most = rows
        self._running: list[EagleRow] = []
        self._ended: list[EagleRow] = []

    def row(self, request: Request, chooser: Chooser) -> EagleRow:
        """What a request has of the group."""
        return EagleRow(self, *self._drawing(request, chooser), self._columns)

    def held(self, prompt: Sequence[int]) -> int:
        """How many of the prompt's first positions have their slots in some row."""
        return max((self._shared(other, prompt) for other in (*self._running, *self._ended)), default=0)

    def enter(self, row: EagleRow, position: int) -> None:
        """A row whose features come from `position` on: it begins with slots of another one where these reach it."""
        prompt, others = row.text, [*self._running, *self._ended]
        best = max(others, key=lambda other: self._shared(other, prompt), default=None)
        if best is not None and self._shared(best, prompt) >= position > best.first:
            row.slots, row.first = best.slots.copy(position - best.first), best.first
        else:
            row.first = max(position, len(prompt) - 1 - WINDOW)
        row.features.clear(position)
        self._running.append(row)
        self.keep()

    def leave(self, row: EagleRow) -> None:
        """A row has ended."""
        if row in self._running:
            self._running.remove(row)
            self._ended = [*self._ended, row][-self._most :]
            self.keep()

    def keep(self) -> None:
        """Tell the forest whose slots are in use."""
        self._forest.rows = [row.slots for row in (*self._running, *self._ended)]

    def _shared(self, other: EagleRow, prompt: Sequence[int]) -> int:
        """Up to which position the slots of a row stand for `prompt` too: a slot knows the token behind it as well."""
        alike = shared_prefix(other.text[: other.written + 1], prompt)
        return max(0, min(other.written, alike - 1))

    def behind(self, rows: Sequence[RowProposer]) -> float:
        """Seconds of writing slots, beyond the few that any round writes."""
        heads = [(row, row.head) for row in rows if isinstance(row.head, EagleRow)]
        return self._slot_cost * sum(max(0, len(row.context) - FEW - head.written) for row, head in heads)

    def draft(self, rows: Sequence[RowProposer], goes_on: GoesOn) -> None:
        """Write the slots that are new, then level by level as long as that is worth it."""
        ready: list[tuple[RowProposer, EagleRow]] = []
        for row in rows:
            head = row.head
            if isinstance(head, EagleRow) and self._fits(row, head):
                ready.append((row, head))
        new = sum(len(row.context) + MAX_DRAFT_LENGTH - head.written for row, head in ready)
        if not ready or not self._forest.room(new):
            return
        for row, head in ready:
            end = len(row.context) - 1
            while end - head.written > FEW:
                self._write([(row, head)], min(head.written + CHUNK, end - 1), PLAIN)
        noises = [head.sampling.noise(len(row.context)) for row, head in ready]
        with self.first_cost.timed(len(ready)):
            candidates = self._write(ready, None, self._choice(ready, noises))
        end = self._forest.end
        try:
            growing = self._extend(ready, candidates, noises)
            while growing:
                members = [row for row, head in growing if row.fixed is not None or head.chain.likely()]
                growing = [pair for pair in growing if pair[0] in members]
                if not growing or not goes_on(members):
                    break
                heads = [head for _, head in growing]
                noises = [head.sampling.noise(len(row.context) + head.chain.depth) for row, head in growing]
                with self.step_cost.timed(len(growing)):
                    candidates = self._forest.grow(
                        [head.slots for head in heads],
                        [head.chain.tip for head in heads],
                        self._choice(growing, noises),
                    )
                growing = self._extend(growing, candidates, noises)
        finally:
            self._forest.drop_chains([head.slots for _, head in ready], end)

    def _fits(self, row: RowProposer, head: EagleRow) -> bool:
        """Whether a row's features are there, and the head has positions for them and a chain."""
        end = len(row.context) - 1
        if row.limit <= 0 or head.features.end < end:
            return False
        if head.written >= end:  # its last slot is needed again
            head.slots.rewind_to(end - 1 - head.first)
        return end - head.first + MAX_DRAFT_LENGTH < self._forest.positions

    def _write(self, rows: Sequence[tuple[RowProposer, EagleRow]], end: int | None, choice: Choice) -> Candidates:
        """Write the slots up to position `end`, by default all that can be written."""
        ends = [len(row.context) - 1 if end is None else end for row, _ in rows]
        starts = [head.written for _, head in rows]
        spans = [(row, head, first, last) for (row, head), first, last in zip(rows, starts, ends, strict=True)]
        candidates = self._forest.append(
            [head.slots for _, head in rows],
            [head.features.rows(first, last) for _, head, first, last in spans],
            [row.context[first + 1 : last + 1] for row, _, first, last in spans],
            choice,
        )
        for _, head, _, last in spans:
            head.features.forget_before(last - KEPT_ROWS)
        return candidates

    def _choice(
        self, rows: Sequence[tuple[RowProposer, EagleRow]], noises: Sequence[NDArray[np.float32] | None]
    ) -> Choice:
        noise = None
        if any(own is not None for own in noises):
            blank = np.zeros((1, self._forest.draft_vocabulary), np.float32)
            noise = np.concatenate([blank if own is None else own for own in noises])
        return Choice(noise=noise, logits=any(head.sampling.drawn for _, head in rows))

    def _extend(
        self,
        rows: Sequence[tuple[RowProposer, EagleRow]],
        candidates: Candidates,
        noises: Sequence[NDArray[np.float32] | None],
    ) -> list[tuple[RowProposer, EagleRow]]:
        """Extend the chains; the rows that may go on."""
        further = []
        for place, (row, head) in enumerate(rows):
            tokens, own = candidates.tokens[place], noises[place]
            sure = head.sampling.sureness_at_one(tokens, candidates.log_probs[place], None if own is None else own[0])
            q = None
            if head.sampling.drawn and candidates.logits is not None:
                q = head.sampling.distribution(candidates.logits[place])
            if head.chain.extend(tokens, sure, q) and head.chain.depth < min(row.limit, MAX_DRAFT_LENGTH):
                further.append((row, head))
        return further

    @property
    def nbytes(self) -> int:
        """Bytes of its KV buffers."""
        return self._forest.cache.nbytes

    def close(self) -> None:
        """Free the slots."""
        self._forest.close()
