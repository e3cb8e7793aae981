"""A draft model: a small model with the target's tokenizer guesses token by token (Leviathan et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.chooser import Chooser
from specrun.runtime.draft_length import DraftLengthPlanner, DraftPlan
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import Distribution
from specrun.runtime.session import ModelSession
from specrun.runtime.tree_planner import Planned

ACCEPTANCE: tuple[tuple[float, ...], ...] = ((0.6,),) * 4
"""[place][0]: the chance that a draft token stands before anything was seen; the last one for all later places."""


class DraftReader:
    """Makes draft tokens of a draft model's logits, under the sampling of one request."""

    def __init__(
        self,
        chooser: Chooser,
        vocabulary: NDArray[np.int32] | None = None,
        tokens: int = 0,
        *,
        temperature: float = 1.0,
    ) -> None:
        """vocabulary: the target's token of each of the draft's logits, if it has fewer than the target's `tokens`.

        temperature: at which the draft's sureness of a token is taken.
        """
        self._chooser = chooser
        self._temperature = temperature
        self._vocabulary = vocabulary
        self._full = np.full(tokens, -np.inf, np.float32) if vocabulary is not None else None

    def next(
        self, logits: NDArray[np.float32], drafts: Sequence[int], committed: int
    ) -> tuple[int, Distribution | None, float]:
        """(draft token after `drafts`, q if it was drawn, the draft's log-probability of it) by logits f32 [V]."""
        token, q = self._chooser.draft(self._row(logits), drafts, committed)
        return token, q, self._sure(logits, token)

    def _sure(self, logits: NDArray[np.float32], token: int) -> float:
        if self._vocabulary is not None:
            token = int(self._vocabulary.searchsorted(token))
        row = logits - logits.max()
        row /= self._temperature
        return float(row[token] - np.log(np.exp(row).sum()))

    def _row(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The draft's logits as a row of the target's vocabulary: what it does not know has no chance."""
        if self._full is None:
            return logits
        self._full[self._vocabulary] = logits
        return self._full


class DraftProposer:
    """Runs `session`, the draft, over what it has not seen yet.

    known: the tokens that the draft's cache holds from the request before.
    """

    name = "draft"
    needs_features = False

    def __init__(
        self,
        session: ModelSession,
        reader: DraftReader,
        planner: DraftLengthPlanner,
        estimate: HeadEstimate,
        known: Sequence[int],
    ) -> None:
        self._session = session
        self._reader = reader
        self._planner = planner
        self._estimate = estimate
        self._known = known
        self._sureness: list[float] = []  # of the draft tokens of the last round

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
        most = plan.count if self._planner.fixed is not None else self._room(context, limit)
        expected = reached = 1.0
        self._sureness = []
        tokens: list[int] = []
        distributions: list[Distribution] = []
        logits = session.prefill(context[session.length :])
        while True:
            token, q, sureness = self._reader.next(logits[0], tokens, len(context))
            tokens.append(token)
            if q is not None:
                distributions.append(q)
            self._sureness.append(sureness)
            reached *= self._estimate.chance(len(tokens) - 1, self._sureness[-1])
            expected += reached
            if len(tokens) >= most or not self._goes_on(len(tokens), expected, reached):
                break
            logits = session.run([token], rows=1)
        if distributions:
            return Planned(Proposal(tuple(tokens), "sampled", tuple(distributions)), plan.expected, plan.seconds)
        return Planned(Proposal(tuple(tokens), "deterministic"), plan.expected, plan.seconds)

    def _length(self, context: Sequence[int], limit: int) -> DraftPlan:
        """How many tokens to draft: not more than the draft's own context holds."""
        room = self._room(context, limit)
        self._planner.begin(len(context))
        return self._planner.plan(map(self._estimate.best_child, range(room)), room)

    def _room(self, context: Sequence[int], limit: int) -> int:
        return max(0, min(limit, self._session.sizes.context - len(context)))

    def _goes_on(self, count: int, expected: float, reached: float) -> bool:
        """Whether to draft another token; decided before it is drawn, so that q stays what it is."""
        fixed = self._planner.fixed is not None
        return fixed or self._planner.pays(count, expected, reached * self._estimate.best_child(count))

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        """Learn how the last proposal fared."""
        for place in range(evaluated):
            self._estimate.learn(place, 0, self._sureness[place], place < accepted)

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` tokens; the draft has not run its own last one."""
        if length < self._session.length:
            self._session.rewind_to(length)

    def close(self) -> None:
        """The session belongs to the engine."""
