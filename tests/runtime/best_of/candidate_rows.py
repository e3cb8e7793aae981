"""Candidates for tests of scores."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.runtime.best_of import Candidate


def candidate(
    text: str = "", logprobs: Sequence[float] = (), certainties: Sequence[float] = (), *, index: int = 0
) -> Candidate:
    """A candidate with as many tokens as it has numbers."""
    count = max(len(logprobs), len(certainties))
    return Candidate(index, text, tuple(range(count)), "stop", tuple(logprobs), tuple(certainties))


def candidates(*texts: str) -> list[Candidate]:
    """Candidates of these texts, a token each, the first the most probable."""
    return [candidate(text, [-0.1 * (index + 1)], index=index) for index, text in enumerate(texts)]
