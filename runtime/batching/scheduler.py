"""Continuous batching: rows join and leave at any round, and each takes the decisions of a run of its own.

A round asks every row for its next run, lets the speculators draft for all rows together, chooses one width for all,
makes one ragged run, and hands each row its logits.
Between two rounds the prompt of a newcomer is prefilled in its own row, a chunk at a time; while most rows stand idle
more than one, as a round costs nearly the same for few rows. Rows in use are kept next to each other, so that the last
ones do not pay for those that ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator

from specrun.models_cache.errors import BackendError, SpecrunError
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.batch_row import BatchRow
from specrun.runtime.batching.batch_stats import BatchStats
from specrun.runtime.batching.joint_width import joint_plan, joint_width
from specrun.runtime.batching.row_drafts import RowDrafts
from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.engine import Engine
from specrun.runtime.result import Result
from specrun.runtime.running import Running
from specrun.runtime.target_run import RunAnswer

Incoming = tuple[int, Running | SpecrunError]
Finished = tuple[int, Result | SpecrunError]


class Scheduler:
    """Runs requests in the rows of one pool; the engine is held by the caller.

    memory: bytes that the positions of the rows may take, None for any number. A request that has to wait for it waits
    until rows have ended; one alone always runs. pool: the rows, where they are not the target's own; make_row: what a
    request is in one. before_round is called before each round; a request that is cancelled by then ends there.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int,
        costs: BatchCosts,
        stats: BatchStats,
        *,
        memory: int | None = None,
        pool: RowPool | None = None,
        make_row: Callable[[Engine, RowPool, int, int, Running, RowDrafts], BatchRow] = BatchRow,
        before_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._pool = pool or RowPool(engine.target, rows)
        self._drafts = RowDrafts(engine, rows, costs)
        self._make_row = make_row
        self._before_round = before_round
        self._lookup_s = 0.0  # what looking up the n-grams that wait took
        self._size = rows
        self._costs = costs
        self._stats = stats
        self._positions = None if memory is None else memory // self._pool.position_bytes
        self._rows: list[BatchRow] = []  # that decode
        self._newcomer: BatchRow | None = None  # whose prompt is being read
        self._waiting: tuple[int, Running] | None = None  # came, and has no row yet

    def run(self, incoming: Iterator[Incoming | None]) -> Generator[Finished]:
        """Answer all requests, in order of completion; they are taken as rows get free. None: more may come later."""
        try:
            while True:
                yield from self._fill(incoming)
                if not self._rows:
                    return
                self._before_round()
                yield from self._stop_cancelled()
                if self._rows:
                    self._close_ranks()
                    yield from self._round()
        finally:
            for row in (*self._rows, *([] if self._newcomer is None else [self._newcomer])):
                row.close()
            self._drafts.close()
            self._pool.close()

    def _fill(self, incoming: Iterator[Incoming | None]) -> Generator[Finished]:
        """Prefill newcomers as far as there is time before the next round; if no row decodes then, all is done."""
        while True:
            if self._newcomer is None:
                if len(self._rows) == self._size:
                    return
                if self._waiting is None:
                    came = next(incoming, None)
                    if came is None:
                        return
                    index, running = came
                    if isinstance(running, SpecrunError):
                        yield self._failed(index, running)
                        continue
                    self._waiting = index, running
                if not self._fits(self._waiting[1]):
                    return
                slot = self._free_slot()
                self._newcomer = self._make_row(self._engine, self._pool, slot, *self._waiting, self._drafts)
                self._waiting = None
            row = self._newcomer
            try:
                self._read(row)
            except BackendError:
                raise
            except SpecrunError as error:
                self._newcomer = None
                row.close()
                yield self._failed(row.index, error)
                continue
            if row.request is None:
                self._newcomer = None
                yield self._ended(row)
            elif not row.request.prefill:
                self._newcomer = None
                self._rows.append(row)
            if 2 * len(self._rows) >= self._size and not self._pool.read:
                return

    def _read(self, row: BatchRow) -> None:
        """Run the next chunk of a row's prompt."""
        start = time.perf_counter()
        if row.request is None:
            row.begin()
        request = row.request
        if request is not None:
            logits, seconds = self._pool.run(row.slot, [request.tokens], rows=1)
            self._stats.prefill_tokens += len(request.tokens)
            row.advance(RunAnswer(request.proposal, logits[0], seconds))
        self._stats.prefill_s += time.perf_counter() - start

    def _round(self) -> Generator[Finished]:
        """One run for all rows that decode."""
        start = time.perf_counter()
        rows = sorted(self._rows, key=lambda row: row.slot)
        first, count = rows[0].slot, rows[-1].slot - rows[0].slot + 1
        most_width = min(MAX_DRAFT_LENGTH + 1, self._pool.room(first, count))

        def cost(width: int) -> float:
            return self._costs.round(count, width)

        copied = joint_plan([row.chances for row in rows], cost, most=most_width)
        self._drafts.turns.count_round(copied.expected * cost(1) / (len(rows) * (copied.seconds + self._lookup_s)))
        draft_s = self._drafts.draft([row.drafting for row in rows], cost, most=most_width)
        least = max(row.least_width for row in rows)
        width = joint_width([row.chances for row in rows], cost, least=least, most=most_width)
        tokens: list[list[int]] = [[] for _ in range(count)]
        proposals = [row.cut(width) for row in rows]
        for row, proposal in zip(rows, proposals, strict=True):
            assert row.request is not None
            tokens[row.slot - first] = [*row.request.tokens, *proposal.tokens]
        most = 1 + max(map(len, proposals))
        logits, seconds = self._pool.run(first, tokens, rows=most)
        self._costs.note(count, max(map(len, tokens)), seconds)

        ended: list[Finished] = []
        self._rows = []
        for place, (row, proposal) in enumerate(zip(rows, proposals, strict=True)):
            own = logits[row.slot - first][most - 1 - len(proposal) :]
            try:
                row.advance(RunAnswer(proposal, own, seconds / len(rows)))
            except BaseException as error:
                if isinstance(error, BackendError) or not isinstance(error, SpecrunError):
                    self._rows += rows[place:]  # to be closed
                    raise
                row.close()
                ended.append(self._failed(row.index, error))
                continue
            if row.request is None:
                ended.append(self._ended(row))
            else:
                self._rows.append(row)
        self._lookup_s = self._drafts.turns.spent()
        draft_s += self._lookup_s
        rest = time.perf_counter() - start - draft_s - seconds
        self._costs.note_rest(count, rest)
        self._stats.count_round(rows=len(rows), width=width, run_s=seconds, draft_s=draft_s, rest_s=rest)
        yield from ended

    def _stop_cancelled(self) -> Generator[Finished]:
        """End the rows whose requests were cancelled."""
        for row in [row for row in self._rows if row.running.cancelled.is_set()]:
            self._rows.remove(row)
            row.stop()
            yield self._ended(row)

    def _close_ranks(self) -> None:
        """Move rows into free places before them, unless a newcomer is on its way into one."""
        if self._newcomer is not None:
            return
        for row in sorted(self._rows, key=lambda row: -row.slot):
            slot = self._free_slot()
            if slot > row.slot:
                return
            row.move_to(slot)

    def _free_slot(self) -> int:
        taken = {row.slot for row in self._rows}
        return next(slot for slot in range(self._size + 1) if slot not in taken)

    def _fits(self, running: Running) -> bool:
        if self._positions is None or not self._rows:
            return True
        return sum(row.running.length for row in self._rows) + running.length <= self._positions

    def _ended(self, row: BatchRow) -> Finished:
        row.running.done = True
        result = row.running.result()
        self._stats.count_result(result)
        return row.index, result

    def _failed(self, index: int, error: SpecrunError) -> Finished:
        self._stats.done += 1
        self._stats.failed += 1
        return index, error
