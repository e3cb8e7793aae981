"""Chooses K, the draft tokens of a round, from what a run of each width costs and how drafts fared so far.

A round with K draft tokens commits E[K] = 1 + a1 + a1 a2 + ... + a1 .. aK tokens on average, aj being the chance that
the j-th stands if those before it do, and costs K step_cost + cost(K + 1). The best K has the largest E[K] a second:
Leviathan et al. 2023, theorem 3.8, with a measured cost of each width instead of a constant one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

PRIOR_STRENGTH = 6.0  # the prior weighs like so many drafts
DECAY = 0.98  # an old draft counts less: texts change their character
MAX_DRAFT_LENGTH = 16


class DraftLengthPlanner:
    """Plans K for drafts of several kinds (`key`: the length of an n-gram match; 0 for a draft model).

    cost(width): seconds of a target run; step_cost: seconds of a draft token; priors[key][j]: chance that draft token
    j + 1 stands, the last entry for all later ones. `fixed` switches planning off: K is then always that.
    """

    def __init__(
        self,
        cost: Callable[[int], float],
        *,
        step_cost: float = 0.0,
        priors: Mapping[int, Sequence[float]],
        fixed: int | None = None,
    ) -> None:
        self._costs = [cost(width) for width in range(1, MAX_DRAFT_LENGTH + 2)]
        self._step_cost = step_cost
        self._fixed = fixed
        self._priors = priors
        # key -> per depth [accepted, tried], decayed
        self._seen: dict[int, list[list[float]]] = {key: [[0.0, 0.0] for _ in prior] for key, prior in priors.items()}

    def chance(self, key: int, depth: int) -> float:
        """Estimated chance that draft token `depth` (from 0) stands if those before it do."""
        prior = self._priors[key]
        depth = min(depth, len(prior) - 1)
        accepted, tried = self._seen[key][depth]
        return (PRIOR_STRENGTH * prior[depth] + accepted) / (PRIOR_STRENGTH + tried)

    def choose(self, key: int, available: int) -> int:
        """The K in 0 .. available with the most expected tokens a second."""
        if self._fixed is not None:
            return min(self._fixed, available)
        best, best_rate = 0, 1.0 / self._costs[0]
        expected, reached = 1.0, 1.0
        for count in range(1, min(available, MAX_DRAFT_LENGTH) + 1):
            reached *= self.chance(key, count - 1)
            expected += reached
            rate = expected / (count * self._step_cost + self._costs[count])
            if rate > best_rate:
                best, best_rate = count, rate
        if best == 0 and available:
            self._fade(key)  # what made it give up is forgotten in time, so that it tries again
        return best

    def observe(self, key: int, *, evaluated: int, accepted: int) -> None:
        """Learn how many draft tokens of the last round were judged, and how many of these stood."""
        cells = self._seen[key]
        for depth in range(evaluated):
            cell = cells[min(depth, len(cells) - 1)]
            cell[0] = cell[0] * DECAY + (depth < accepted)
            cell[1] = cell[1] * DECAY + 1.0

    def _fade(self, key: int) -> None:
        for cell in self._seen[key]:
            cell[0] *= DECAY
            cell[1] *= DECAY
