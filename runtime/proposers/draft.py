"""A draft model: a small model with the target's tokenizer guesses token by token (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import Distribution
from specrun.runtime.session import ModelSession

# Chance that a draft token stands, by its place in the proposal; the last one for all later.
PRIORS = {0: 0.6, 1: 0.6, 2: 0.6, 3: 0.6}


class DraftProposer:
    """Runs `session`, the draft, over what it has not seen yet. `chooser` applies the request's sampling.

    known: the tokens that the draft's cache holds from the request before.
    """

    name = "draft"
    needs_features = False

    def __init__(
        self,
        session: ModelSession,
        chooser: Chooser,
        planner: DraftLengthPlanner,
        estimate: AcceptanceEstimate[int],
        known: Sequence[int],
    ) -> None:
        self._session = session
        self._chooser = chooser
        self._planner = planner
        self._estimate = estimate
        self._known = known

    def start(self, prompt_tokens: Sequence[int]) -> None:
        """Keep what the draft's cache shares with this prompt."""
        shared = 0
        for ours, theirs in zip(self._known[: self._session.length], prompt_tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        self._session.rewind_to(shared)

    def take_features(self, position: int, features: NDArray[np.float32]) -> None:
        """Not needed."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        """At most `limit` draft tokens, drawn under the request's own sampling options."""
        session = self._session
        room = session.sizes.context - len(context)
        count = self._planner.choose((self._estimate.chance(_cell(place)) for place in range(limit)), min(limit, room))
        if count <= 0:
            self._estimate.fade(0)
            return EMPTY
        tokens: list[int] = []
        distributions: list[Distribution] = []
        logits = session.prefill(context[session.length :])
        while True:
            token, q = self._chooser.draft(logits[0], tokens, len(context))
            tokens.append(token)
            if q is not None:
                distributions.append(q)
            if len(tokens) == count:
                break
            logits = session.run([token], rows=1)
        if distributions:
            return Proposal(tuple(tokens), "sampled", tuple(distributions))
        return Proposal(tuple(tokens), "deterministic")

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Learn how the last proposal fared."""
        for place in range(evaluated):
            self._estimate.observe(_cell(place), place < accepted)

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` tokens; the draft has not run its own last one."""
        if length < self._session.length:
            self._session.rewind_to(length)

    def close(self) -> None:
        """The session belongs to the engine."""


def _cell(place: int) -> int:
    return min(place, max(PRIORS))
