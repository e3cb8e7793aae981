"""Scores that the model itself gives: how probable its text was to it, and how decided it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrun.models_cache.errors import UsageError
from specrun.runtime.best_of.candidates import Candidate, mean, mean_logprob


class LogprobScore:
    """The mean log-probability of the tokens, in nats."""

    name = "logprob"

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`; -inf for a candidate without tokens. Raises UsageError for one without log-probabilities."""
        for candidate in candidates:
            require_each(candidate, candidate.logprobs, "log-probabilities")
        return [mean_logprob(candidate) for candidate in candidates]

    def bound(self, logprobs: Sequence[float], most_tokens: int) -> float | None:
        """See `Bounded`: every further token would be certain, and there would be as many of them as there may be.

        The sum cannot rise above what it is, and the mean of a negative sum is highest over the most tokens.
        """
        if most_tokens < 1:
            return None
        return math.fsum(logprobs) / max(most_tokens, len(logprobs))


class CertaintyScore:
    """Self-certainty: the mean over the tokens of KL(uniform || p), in nats (Kang et al. 2025, eq. 8)."""

    name = "certainty"

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`; -inf for a candidate without tokens. Raises UsageError for one without certainties."""
        for candidate in candidates:
            require_each(candidate, candidate.certainties, "certainties")
        return [mean(candidate.certainties) for candidate in candidates]


def require_each(candidate: Candidate, values: Sequence[float], what: str) -> None:
    """Raise UsageError unless there is a value for each token of the candidate."""
    if len(values) != len(candidate.token_ids):
        raise UsageError(
            f"Candidate {candidate.index} has {len(values)} {what} for {len(candidate.token_ids)} tokens: "
            "ask for them when sampling."
        )
