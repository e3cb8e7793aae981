"""One sample in its row: as a request of a batch, but it drafts from all samples' texts and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specrun.runtime.batch_row import BatchRow
from specrun.runtime.best_of.siblings import SiblingTable, SiblingTexts
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner
from specrun.runtime.proposers.ngram import Cell, NgramProposer
from specrun.runtime.proposers.offered import OfferedNgrams
from specrun.runtime.request import Request
from specrun.runtime.row_pool import RowPool
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
        *,
        texts: SiblingTexts,
        estimate: AcceptanceEstimate[Cell],
    ) -> None:
        self._texts, self._estimate = texts, estimate
        super().__init__(engine, pool, slot, index, running)

    def proposer(self, request: Request, chooser: Chooser) -> OfferedNgrams | None:
        """N-grams over all samples, or None."""
        fixed = request.options.draft_length
        if request.method == "none" or fixed == 0:
            return None
        table = SiblingTable(self._engine.drafting.table, self._texts, request.sample_index)
        planner = DraftLengthPlanner(lambda width: 1.0, fixed=fixed)
        self._offered = OfferedNgrams(NgramProposer(table, planner, self._estimate, self._engine.prediction(request)))
        return self._offered

    def finish_request(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """The other samples may copy all of it; the engine keeps nothing."""
        if drafted:
            start = len(self.running.prompt_tokens)
            self._texts.extend(request.sample_index, committed[start:], start)
        self.running.memory = replace(self._engine.memory("none"), kv_target_bytes=self._pool.cache.nbytes)
