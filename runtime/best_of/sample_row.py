"""One sample in its row: as a request of a batch, but it drafts from all samples' texts and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specrun.runtime.batching.batch_row import BatchRow
from specrun.runtime.batching.row_drafts import RowDrafts
from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.best_of.siblings import SiblingTable, SiblingTexts
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner
from specrun.runtime.proposers.ngram import Cell, NgramProposer
from specrun.runtime.proposers.offered import OfferedNgrams
from specrun.runtime.request import Request
from specrun.runtime.running import Running

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine


class SampleRow(BatchRow):
    """texts, estimate: what the samples of the prompt have in common."""

    def __init__(
        self,
        engine: Engine,
        pool: RowPool,
        slot: int,
        index: int,
        running: Running,
        drafts: RowDrafts,
        *,
        texts: SiblingTexts,
        estimate: AcceptanceEstimate[Cell],
    ) -> None:
        self._texts, self._estimate = texts, estimate
        super().__init__(engine, pool, slot, index, running, drafts)

    def proposer(self, request: Request, chooser: Chooser) -> RowProposer | None:
        """What drafts for it; n-grams are those of all samples."""
        self.drafting = self._drafts.proposer(request, chooser, self._ngrams)
        return self.drafting

    def _ngrams(self, request: Request) -> OfferedNgrams:
        table = SiblingTable(self._engine.drafting.table, self._texts, request.sample_index)
        planner = DraftLengthPlanner(lambda width: 1.0, fixed=request.options.draft_length)
        return OfferedNgrams(NgramProposer(table, planner, self._estimate, self._engine.prediction(request)))

    def finish_request(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """The other samples may copy all of it; the engine keeps nothing."""
        if drafted:
            start = len(self.running.prompt_tokens)
            self._texts.extend(request.sample_index, committed[start:], start)
        memory = self._engine.memory("none" if self.drafting is None else str(request.method))
        self.running.memory = replace(
            memory, kv_target_bytes=self._pool.cache.nbytes, kv_draft_bytes=self._drafts.nbytes
        )
        if self.drafting is not None:
            self.drafting.close()
