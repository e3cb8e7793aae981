"""What drafts for the rows of a batch: n-grams for each row by itself, a speculator for all its rows in one run.

Whether a speculator is asked, and how far it drafts, goes by the expected tokens a second of the round as a whole: the
chances of all rows, the measured cost of each width, and that of drafting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.draft_rows import DraftRows
from specrun.runtime.batching.drafting_group import DraftingGroup
from specrun.runtime.batching.eagle_forest import EagleForest
from specrun.runtime.batching.eagle_rows import EagleRows
from specrun.runtime.batching.joint_width import JointPlan, joint_plan
from specrun.runtime.batching.medusa_rows import MedusaRows
from specrun.runtime.batching.ngram_turns import NgramTurns
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.heads import HEAD_METHODS
from specrun.runtime.proposers.combined import Lift
from specrun.runtime.proposers.draft import DraftReader
from specrun.runtime.proposers.offered import OfferedNgrams
from specrun.runtime.request import Request
from specrun.runtime.speculator import MedusaSession

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine

_MOST: Final = 3.0  # times what drafting should take: beyond, it was disturbed, or a head read prompts first
_AHEAD: Final = 64  # rounds that catching up with a text should pay off in
_LEAST_GAIN: Final = 1.1  # of a round, below which keeping rows in step with a speculator takes what it brings
_LIFT_MEMORY: Final = 0.5  # of what asking brought: over all rows a round tells more than one row's does

Cost = Callable[[int], float]


class RowDrafts:
    """Of one batch of at most `rows` rows. Speculators are loaded by the first request that names their method."""

    def __init__(self, engine: Engine, rows: int, costs: BatchCosts) -> None:
        self._engine = engine
        self._rows = rows
        self._costs = costs
        self._worth: dict[str, bool] = {}
        self._groups: dict[str, DraftingGroup] = {}
        self._lifts: dict[tuple[str, int], Lift] = {}
        self.turns = NgramTurns()

    def proposer(
        self, request: Request, chooser: Chooser, ngrams: Callable[[Request], OfferedNgrams] | None = None
    ) -> RowProposer | None:
        """The proposer of a request, None for plain decoding. ngrams: if not over its own text and earlier ones."""
        base, _, second = str(request.method).partition("+")
        fixed = request.options.draft_length
        if base == "none" or fixed == 0:
            return None
        ngram = None
        if "ngram" in (base, second):
            ngram = (ngrams or self._ngrams)(request)
        head = None if base == "ngram" else self._group(base).row(request, chooser)
        if head is not None and ngram is not None and fixed is None and not self._may_pay(base, head.chain.estimate):
            head = None
        return RowProposer(ngram, head, chooser, fixed, self.turns)

    def _may_pay(self, base: str, estimate: HeadEstimate) -> bool:
        """Whether a speculator beside n-grams can pay in this batch: if not, no row need be kept in step with it.

        By its average chances in a round of all rows in which n-grams have nothing; decided once.
        """
        if base not in self._worth:
            group, rows = self._group(base), self._rows
            rates = []
            for depth in range(1, min(group.depth, MAX_DRAFT_LENGTH) + 1):
                chances = [tuple(map(estimate.best_child, range(depth)))] * rows
                cost = _plus(lambda width: self._costs.round(rows, width), self._spent(group, rows, depth))
                rates.append(joint_plan(chances, cost).rate)
            self._worth[base] = max(rates) * self._costs.round(rows, 1) > _LEAST_GAIN * rows
        return self._worth[base]

    def _ngrams(self, request: Request) -> OfferedNgrams:
        return self._engine.drafting.offered_ngrams(request, self._engine.prediction(request))

    def held(self, proposer: RowProposer | None, prompt: Sequence[int]) -> int | None:
        """Up to which position of the prompt the row's head needs no features; None if that is all the same to it."""
        head = None if proposer is None else proposer.head
        return None if head is None else self._groups[head.method].held(prompt)

    def draft(self, rows: Sequence[RowProposer | None], cost: Cost, *, most: int) -> float:
        """Let the speculators add to what n-grams offer, where that pays; the seconds that it took.

        rows: of all that run, None for those that never propose. cost(width): seconds of the round; most: the widest.
        """
        start = time.perf_counter()
        for base, group in self._groups.items():
            own = [row for row in rows if row is not None and self._drafts(row, base)]
            if own:
                self._ask(base, group, own, rows, cost, most)
        return time.perf_counter() - start

    def close(self) -> None:
        """Free what is not the engine's."""
        for group in self._groups.values():
            group.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the groups' KV buffers."""
        return sum(group.nbytes for group in self._groups.values())

    def _drafts(self, row: RowProposer, base: str) -> bool:
        return row.head is not None and row.head.method == base and row.limit > 0 and not row.head.chain.keeps_copy

    def _ask(
        self,
        base: str,
        group: DraftingGroup,
        own: Sequence[RowProposer],
        rows: Sequence[RowProposer | None],
        cost: Cost,
        most: int,
    ) -> None:
        """Ask one speculator for its rows, if that is worth its time."""
        without = joint_plan(_chances(rows), cost, most=most)
        forced = any(row.fixed is not None for row in own)
        first = sum(row.chances[0] if row.chances else 0.0 for row in own) / len(own)
        lift = self._lifts.get((base, len(own)))
        if lift is None:
            expected = self._expected_rate(group, own, rows, cost, most) / without.rate
            lift = self._lifts[base, len(own)] = Lift.expected(expected, memory=_LIFT_MEMORY)
        least = 1.0 + group.behind(own) / (_AHEAD * without.seconds)
        if not lift.worth_asking(first, least) and not forced:
            return
        start = time.perf_counter()
        likely = self._spent(group, len(own), 1)

        def goes_on(growing: Sequence[RowProposer]) -> bool:
            nonlocal likely
            step = 0.0 if group.step_cost is None else group.step_cost.of(len(growing))
            if not any(row.fixed is not None for row in growing):
                now = self._plan(rows, own, (), cost, most, likely)
                if self._plan(rows, own, growing, cost, most, likely + step).rate <= now.rate:
                    return False
            likely += step
            return True

        group.draft(own, goes_on)
        for row in own:
            row.accept_chain()
        spent = min(time.perf_counter() - start, _MOST * likely)
        planned = joint_plan(_chances(rows), _plus(cost, spent), most=most)
        lift.note(first, planned.rate / without.rate)

    @staticmethod
    def _plan(
        rows: Sequence[RowProposer | None],
        own: Sequence[RowProposer],
        growing: Sequence[RowProposer],
        cost: Cost,
        most: int,
        spent: float,
    ) -> JointPlan:
        """The round as it stands, or with one token more for the rows that grow."""
        chances = _chances(rows)
        for place, row in enumerate(rows):
            if row is None or row.head is None or row not in own:
                continue
            chain = row.head.chain
            known = chain.chances
            if row in growing:
                at = chain.depth
                copied = known[at] if at < len(known) else 0.0
                known = (*known[:at], max(copied, chain.likely()), *known[at + 1 :])
            chances[place] = known
        return joint_plan(chances, _plus(cost, spent), most=most)

    def _expected_rate(
        self,
        group: DraftingGroup,
        own: Sequence[RowProposer],
        rows: Sequence[RowProposer | None],
        cost: Cost,
        most: int,
    ) -> float:
        """Tokens a second of a round in which the head drafts where n-grams have nothing, by its average chances."""
        best = 0.0
        for depth in range(1, min(group.depth, MAX_DRAFT_LENGTH) + 1):
            spent = self._spent(group, len(own), depth)
            chances = _chances(rows)
            for place, row in enumerate(rows):
                if row is not None and row.head is not None and row in own and not row.chances:
                    chances[place] = tuple(map(row.head.chain.estimate.best_child, range(depth)))
            best = max(best, joint_plan(chances, _plus(cost, spent), most=most).rate)
        return best

    @staticmethod
    def _spent(group: DraftingGroup, rows: int, depth: int) -> float:
        further = 0.0 if group.step_cost is None else (depth - 1) * group.step_cost.of(rows)
        return group.first_cost.of(rows) + further

    def _group(self, base: str) -> DraftingGroup:
        if base not in self._groups:
            self._groups[base] = self._open(base)
        return self._groups[base]

    def _open(self, base: str) -> DraftingGroup:
        drafting, tokens = self._engine.drafting, self._engine.bundle.manifest.sizes.tokens
        if base not in HEAD_METHODS:
            draft = drafting.open_draft()

            def reading(request: Request, chooser: Chooser) -> tuple[DraftReader, HeadEstimate]:
                return drafting.draft_reader(request, chooser), draft.estimates[request.options.sampling.greedy]

            return DraftRows(draft, self._rows, reading)
        head = drafting.heads.loaded(base)

        def drawing(request: Request, chooser: Chooser) -> tuple[HeadSampling, HeadEstimate]:
            options, index = request.options.sampling, request.sample_index
            sampling = HeadSampling(options, head.vocabulary, chooser.noise, tokens=tokens, sample_index=index)
            return sampling, head.estimates[options.greedy]

        if isinstance(head.session, MedusaSession):
            return MedusaRows(head.session, head.columns, head.costs.append, drawing)
        forest = head.session.another(EagleForest)
        return EagleRows(forest, head.columns, head.costs, self._rows, drawing)


def _plus(cost: Cost, seconds: float) -> Cost:
    return lambda width: cost(width) + seconds


def _chances(rows: Sequence[RowProposer | None]) -> list[tuple[float, ...]]:
    return [() if row is None else row.chances for row in rows]
