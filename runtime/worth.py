"""What drafting brought in a request, by this machine's measured costs."""

from __future__ import annotations

from collections.abc import Callable

from specrun.runtime.result import SpeculationStats


def speed_ratio(stats: SpeculationStats, cost: Callable[[int], float]) -> float | None:
    """About how many times as fast as plain decoding a request was; None if nothing was drafted.

    cost(width): seconds of a target run. A round had 1 + proposed / rounds positions on average; drafting is added in
    the proportion that was measured. S = E[tokens] / (K phi + v(K + 1)), with what came about in place of the expected.
    """
    if not stats.proposed:
        return None
    width = 1 + round(stats.proposed / stats.rounds)
    drafting = stats.draft_s / stats.verify_s if stats.verify_s > 0.0 else 0.0
    return stats.mean_accepted_tokens * cost(1) / (cost(width) * (1.0 + drafting))
