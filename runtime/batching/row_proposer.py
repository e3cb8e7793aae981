"""What drafts for one row of a batch, as its loop sees it: it offers, and the width of the round cuts what is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.batching.ngram_turns import NgramTurns
from specrun.runtime.batching.row_chain import RowChain
from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.offered import OfferedNgrams


class HeadRow(Protocol):
    """One row of a speculator that drafts for all rows together: it keeps in step, its group makes the runs."""

    method: str
    chain: RowChain
    needs_features: bool

    def start(self, prompt: Sequence[int]) -> None:
        """A request begins; `prompt` grows into its text."""
        ...

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """As `Proposer.take_features`."""
        ...

    def rewind_to(self, length: int) -> None:
        """As `Proposer.rewind_to`."""
        ...

    def finish(self) -> None:
        """The request has ended; may be called twice."""
        ...


class RowProposer:
    """N-grams, a head's row, or both. `propose` offers what n-grams have; the head's part comes when `accept_chain` is
    called, after all rows have said what they offer.

    Until then `context` and `limit` are those of the round. What was cut off is learnt from as well.
    """

    def __init__(
        self,
        ngram: OfferedNgrams | None,
        head: HeadRow | None,
        chooser: Chooser,
        fixed: int | None,
        turns: NgramTurns | None = None,
    ) -> None:
        """chooser: of the request. fixed: the K that is asked for. turns: of the batch, for n-grams with no such K."""
        names = [*([] if head is None else [head.method]), *([] if ngram is None else ["ngram"])]
        self.name = "+".join(names)
        self.needs_features = head is not None and head.needs_features
        self.head = head
        self.fixed = fixed
        self.offer: Proposal = EMPTY
        self.chances: tuple[float, ...] = ()
        self.context: Sequence[int] = ()
        self.limit = 0
        self._ngram = ngram
        self._turns = turns or NgramTurns()
        self._chooser = chooser

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Begin a request."""
        if self._ngram is not None:
            self._ngram.start(prompt_tokens)
        if self.head is not None:
            self.head.start(prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """For the head."""
        if self.head is not None:
            self.head.take_features(position, features)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """What n-grams have, at most `limit` tokens."""
        self.context, self.limit = context, limit if self.fixed is None else min(limit, self.fixed)
        if self._ngram is None or (self.fixed is None and not self._turns.open):
            self._offer(EMPTY, ())
        else:
            with self._turns.timed():
                self._offer(self._ngram.propose(context, self.limit), self._ngram.chances)
        if self.head is not None:
            self.head.chain.begin(context, list(zip(self.offer.tokens, self.chances, strict=True)))
        return self.offer

    def accept_chain(self) -> None:
        """Offer what the head's chain has become."""
        assert self.head is not None
        self.head.chain.remember(len(self.context))
        self._offer(self.head.chain.proposal, self.head.chain.chances)

    def _offer(self, proposal: Proposal, chances: Sequence[float]) -> None:
        self.offer = self._chooser.allowed_part(proposal, len(self.context))
        self.chances = tuple(chances[: len(self.offer)])

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """The text that follows tells it all."""

    def rewind_to(self, length: int) -> None:
        """Forget what lies beyond `length` tokens."""
        if self._ngram is not None:
            self._ngram.rewind_to(length)
        if self.head is not None:
            self.head.chain.rewind_to(length)
            self.head.rewind_to(length)

    def close(self) -> None:
        """The request has ended."""
        if self._ngram is not None:
            self._ngram.close()
        if self.head is not None:
            self.head.finish()
