"""Mean log-probability and self-certainty, and what a row cut short can still reach."""

from __future__ import annotations

import itertools
import math

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.best_of.likelihood import CertaintyScore, LogprobScore

from .candidate_rows import candidate


def test_means() -> None:
    rows = [candidate("a", [-1.0, -3.0], [2.0, 5.0]), candidate("b", [-0.5], [1.0]), candidate("")]
    assert LogprobScore().scores("", rows) == [-2.0, -0.5, -math.inf]
    assert CertaintyScore().scores("", rows) == [3.5, 1.0, -math.inf]


@pytest.mark.parametrize(("score", "what"), [(LogprobScore(), "log-prob"), (CertaintyScore(), "certainties")])
def test_candidates_sampled_without_the_numbers(score: LogprobScore | CertaintyScore, what: str) -> None:
    bare = candidate("x", [-1.0]) if what == "certainties" else candidate("x", (), [1.0])
    with pytest.raises(UsageError, match=what):
        score.scores("", [bare])


def test_no_way_on_reaches_more_than_the_bound_and_one_reaches_it() -> None:
    seen, most = [-1.0, -0.25], 5
    bound = LogprobScore().bound(seen, most)
    assert bound is not None
    reached = []
    for extra in range(most - len(seen) + 1):
        for rest in itertools.product([0.0, -0.1, -2.0], repeat=extra):
            reached += LogprobScore().scores("", [candidate("", [*seen, *rest])])
    assert max(reached) == pytest.approx(bound, abs=1e-12)
    assert LogprobScore().bound([], 4) == 0.0
    assert LogprobScore().bound([], 0) is None
    assert not hasattr(CertaintyScore(), "bound")
