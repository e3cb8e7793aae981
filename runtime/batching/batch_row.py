"""One request in a row of a batch: the same loop as alone, answered by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from specrun.models_cache.errors import UsageError
from specrun.runtime.batching.row_drafts import RowDrafts
from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.request import Request
from specrun.runtime.running import Piece, Running
from specrun.runtime.target_run import RunAnswer, RunRequest, resume

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine

SOLO_METHODS = ("lookahead",)
"""What drafts for one request at a time: its window needs a token tree, and rows of a batch run chains."""


def solo_reason(method: str | None, *, ragged: bool) -> str | None:
    """That a method drafts for one request at a time, as the beginning of a sentence; None for one that can in a batch.

    ragged: whether rows with several new tokens run together; without that nothing but n-grams drafts in a batch.
    """
    if method in SOLO_METHODS:
        return f"Method '{method}' drafts for one request at a time"
    if ragged or method in (None, "auto", "none", "ngram"):
        return None
    return f"Method '{method}' drafts for one request at a time on this ONNX Runtime"


def batch_method(engine: Engine, method: str | None) -> str:
    """The method by which a request runs in a batch; "auto" is what the engine has beside n-grams, as far as it pays.

    Errors: UsageError for one that the engine cannot run, or that drafts for one request at a time.
    """
    ragged = engine.target.ragged
    if method in (None, "auto"):
        return engine.drafting.automatic() if ragged else "ngram"
    assert method is not None
    rows_for(method, 2, ragged=ragged)
    engine.require_method(method)
    return method


def rows_for(method: str | None, batch_size: int | None, *, ragged: bool = True) -> int | None:
    """The batch size for requests by this method: 1, if none was asked for and it drafts for one request at a time.

    ragged: as for `solo_reason`. Raises UsageError where more rows were asked for.
    """
    reason = solo_reason(method, ragged=ragged)
    if reason is None or batch_size == 1:
        return batch_size
    if batch_size is not None:
        raise UsageError(f"{reason}: choose another, or a batch size of 1.")
    return 1


class BatchRow:
    """A request and its row. `request` is the run that its loop waits for, None once it has ended."""

    def __init__(
        self, engine: Engine, pool: RowPool, slot: int, index: int, running: Running, drafts: RowDrafts
    ) -> None:
        """drafts: what drafts for the rows of the batch."""
        self.index = index
        self.running = running
        self.target = pool.row(slot)
        self.request: RunRequest | None = None
        self._engine = engine
        self._pool = pool
        self._drafts = drafts
        self.drafting: RowProposer | None = None
        self._steps = running.steps(self)

    @property
    def slot(self) -> int:
        """The row's place in the pool."""
        return self.target.slot

    @property
    def chances(self) -> tuple[float, ...]:
        """Of each token of the proposal that waits, that it stands if those before it do."""
        return self.drafting.chances if self.drafting is not None else ()

    @property
    def least_width(self) -> int:
        """The width that a fixed K asks for; 1 without."""
        if self.running.request.options.draft_length is None:
            return 1
        return 1 + len(self.offer)

    @property
    def offer(self) -> Proposal:
        """The proposal that waits."""
        return self.drafting.offer if self.drafting is not None else EMPTY

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
        if step is None and self.drafting is not None:
            self.drafting.close()

    def cut(self, width: int) -> Proposal:
        """What of the proposal a round of this width runs."""
        assert self.request is not None
        return self.offer.first(width - len(self.request.tokens))

    def move_to(self, slot: int) -> None:
        """Let the row lie in another place."""
        self._pool.move(self.slot, slot)
        self.target.slot = slot

    def close(self) -> None:
        """End the request where it is."""
        self._steps.close()
        self.running.done = True
        self.request = None
        if self.drafting is not None:
            self.drafting.close()

    # What the request asks of its place.

    def proposer(self, request: Request, chooser: Chooser) -> RowProposer | None:
        """What drafts for it, in step with the other rows; None for plain decoding."""
        self.drafting = self._drafts.proposer(request, chooser)
        return self.drafting

    def prepare(self, prompt: Sequence[int], length: int, *, method: str = "none") -> int:
        """Take over the row, with what any row holds of the prompt."""
        self._pool.reserve(length)
        aim = self._drafts.held(self.drafting, prompt)
        return self._pool.begin(self.slot, prompt) if aim is None else self._pool.begin(self.slot, prompt, aim=aim)

    def finish_request(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """Remember the text for n-grams; its row holds it until another request comes."""
        memory = self._engine.memory("none" if self.drafting is None else str(request.method))
        self.running.memory = replace(
            memory, kv_target_bytes=self._pool.cache.nbytes, kv_draft_bytes=self._drafts.nbytes
        )
        self._engine.drafting.remember(request, committed)
