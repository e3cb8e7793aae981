"""One request in a row of a batch: the same loop as alone, answered by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specrun.models_cache.errors import UsageError
from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.offered import OfferedNgrams
from specrun.runtime.request import Request
from specrun.runtime.row_pool import RowPool
from specrun.runtime.running import Piece, Running
from specrun.runtime.target_run import RunAnswer, RunRequest, resume

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine

BATCH_METHODS = ("none", "ngram")
"""What can draft for the rows of a batch; "auto" is n-grams there, and a round's width 1 where they do not pay."""


def batch_method(method: str | None) -> str:
    """The method by which a request runs in a batch; UsageError for one that drafts for one request at a time."""
    if method in (None, "auto"):
        return "ngram"
    assert method is not None
    if method not in BATCH_METHODS:
        raise UsageError(
            f"Method '{method}' drafts for one request at a time: choose auto, ngram or none, or a batch size of 1."
        )
    return method


def rows_for(method: str | None, batch_size: int | None) -> int | None:
    """The batch size for requests by this method: 1, if none was asked for and it drafts for one request at a time.

    Raises UsageError where more rows were asked for.
    """
    if method in (None, "auto", *BATCH_METHODS) or batch_size == 1:
        return batch_size
    if batch_size is not None:
        batch_method(method)
    return 1


class BatchRow:
    """A request and its row. `request` is the run that its loop waits for, None once it has ended."""

    def __init__(self, engine: Engine, pool: RowPool, slot: int, index: int, running: Running) -> None:
        self.index = index
        self.running = running
        self.target = pool.row(slot)
        self.request: RunRequest | None = None
        self._engine = engine
        self._pool = pool
        self._offered: OfferedNgrams | None = None
        self._steps = running.steps(self)

    @property
    def slot(self) -> int:
        """The row's place in the pool."""
        return self.target.slot

    @property
    def chances(self) -> tuple[float, ...]:
        """Of each token of the proposal that waits, that it stands if those before it do."""
        return self._offered.chances if self._offered is not None else ()

    @property
    def least_width(self) -> int:
        """The width that a fixed K asks for; 1 without."""
        if self.running.request.options.draft_length is None or self.request is None:
            return 1
        return 1 + len(self.request.proposal)

    def begin(self) -> None:
        """Go to the first run: of the prompt, or what no other row has of it."""
        self._go_to(next(self._steps, None))

    def advance(self, answer: RunAnswer) -> None:
        """Go on to the next run with the answer to the last one."""
        self._go_to(resume(self._steps, answer))

    def stop(self) -> None:
        """End the request here, with the text of what was committed."""
        self._go_to(resume(self._steps, None))

    def _go_to(self, step: Piece | RunRequest | None) -> None:
        while isinstance(step, Piece):
            step = next(self._steps, None)
        self.request = step

    def cut(self, width: int) -> Proposal:
        """What of the proposal a round of this width runs."""
        assert self.request is not None
        proposal = self.request.proposal
        return proposal.first(min(proposal.main_length, width - len(self.request.tokens)))

    def move_to(self, slot: int) -> None:
        """Let the row lie in another place."""
        self._pool.move(self.slot, slot)
        self.target.slot = slot

    def close(self) -> None:
        """End the request where it is."""
        self._steps.close()
        self.running.done = True
        self.request = None

    # What the request asks of its place.

    def proposer(self, request: Request, chooser: Chooser) -> OfferedNgrams | None:
        """N-grams over a text of its own, or None."""
        self._offered = self._engine.drafting.row_proposer(request, self._engine.prediction(request))
        return self._offered

    def prepare(self, prompt: Sequence[int], length: int, *, method: str = "none") -> int:
        """Take over the row, with what any row holds of the prompt."""
        self._pool.reserve(length)
        return self._pool.begin(self.slot, prompt)

    def finish_request(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """Remember the text for n-grams; its row holds it until another request comes."""
        self.running.memory = replace(self._engine.memory("none"), kv_target_bytes=self._pool.cache.nbytes)
        self._engine.drafting.finish(request, committed, drafted=drafted)
