"""What a grammar leaves of another proposer's draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import Proposal, Proposer


class WithinGrammar:
    """Proposes as `proposer` does, without what the request's grammar forbids: it would only be run to be rejected."""

    def __init__(self, proposer: Proposer, chooser: Chooser) -> None:
        self.name = proposer.name
        self.needs_features = proposer.needs_features
        self._proposer = proposer
        self._chooser = chooser

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """As the proposer."""
        self._proposer.start(prompt_tokens)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """As the proposer."""
        self._proposer.take_features(position, features)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """What may stand of the proposal."""
        return self._chooser.allowed_part(self._proposer.propose(context, limit), len(context))

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """As the proposer; what was left out was not judged."""
        self._proposer.observe(evaluated=evaluated, accepted=accepted, path=path)

    def rewind_to(self, length: int) -> None:
        """As the proposer."""
        self._proposer.rewind_to(length)

    def close(self) -> None:
        """As the proposer."""
        self._proposer.close()
