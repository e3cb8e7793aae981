"""A draft model: a small model with the target's tokenizer guesses token by token (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner, DraftPlan
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import Distribution
from specrun.runtime.session import ModelSession
from specrun.runtime.tree_planner import Planned

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
        vocabulary: NDArray[np.int32] | None = None,
        tokens: int = 0,
    ) -> None:
        """vocabulary: the target's token of each of the draft's logits, if it has fewer than the target's `tokens`."""
        self._session = session
        self._chooser = chooser
        self._planner = planner
        self._estimate = estimate
        self._known = known
        self._vocabulary = vocabulary
        self._full = np.full(tokens, -np.inf, np.float32) if vocabulary is not None else None

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
        return self.plan(context, limit).proposal

    @property
    def chosen_blindly(self) -> bool:
        """What a draft is worth is known before it is made, so it is never made in vain."""
        return True

    def waits(self) -> bool:
        """Never: a plan that drafts nothing costs nothing."""
        return False

    def outlook(self, context: Sequence[int], limit: int) -> tuple[float, float]:
        """(tokens a second, 0): what `plan` will say."""
        return self._length(context, limit).rate, 0.0

    def plan(self, context: Sequence[int], limit: int, copied: Sequence[tuple[int, float]] = ()) -> Planned:
        """As `propose`, with what it is worth."""
        session = self._session
        plan = self._length(context, limit)
        if plan.count <= 0:
            self._estimate.fade(0)
            return Planned(EMPTY, 1.0, plan.seconds)
        tokens: list[int] = []
        distributions: list[Distribution] = []
        logits = session.prefill(context[session.length :])
        while True:
            token, q = self._chooser.draft(self._row(logits[0]), tokens, len(context))
            tokens.append(token)
            if q is not None:
                distributions.append(q)
            if len(tokens) == plan.count:
                break
            logits = session.run([token], rows=1)
        if distributions:
            return Planned(Proposal(tuple(tokens), "sampled", tuple(distributions)), plan.expected, plan.seconds)
        return Planned(Proposal(tuple(tokens), "deterministic"), plan.expected, plan.seconds)

    def _length(self, context: Sequence[int], limit: int) -> DraftPlan:
        """How many tokens to draft: not more than the draft's own context holds."""
        room = min(limit, self._session.sizes.context - len(context))
        return self._planner.plan((self._estimate.chance(_cell(place)) for place in range(limit)), max(0, room))

    def _row(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The draft's logits as a row of the target's vocabulary: what it does not know has no chance."""
        if self._full is None:
            return logits
        self._full[self._vocabulary] = logits
        return self._full

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


def priors(acceptance: Sequence[Sequence[float]]) -> dict[int, float]:
    """The chances at the first places by what was measured when a draft was trained, [depth][rank]."""
    first = [ranks[0] for ranks in acceptance if ranks]
    return {place: first[min(place, len(first) - 1)] for place in PRIORS} if first else PRIORS
