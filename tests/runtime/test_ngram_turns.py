"""When n-grams are looked up for the rows of a batch, and when that rests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.ngram_turns import NgramTurns

from .checks import same_output
from .conftest import TinyModels
from .test_batch_methods import MIXED, RAW, alone, answers


def rounds(turns: NgramTurns, count: int, lift: float) -> list[bool]:
    """Whether each of `count` rounds, and all of this lift, was one with n-grams."""
    seen = []
    for _ in range(count):
        seen.append(turns.open)
        turns.count_round(lift)
    return seen


def test_while_they_pay_they_are_always_looked_up() -> None:
    assert all(rounds(NgramTurns(), 200, 1.02))


def test_where_they_never_pay_they_are_tried_now_and_then() -> None:
    seen = rounds(NgramTurns(), 400, 0.97)
    assert 8 <= sum(seen) <= 30
    assert any(seen[200:])


def test_they_come_back_soon_once_they_pay() -> None:
    turns = NgramTurns()
    rounds(turns, 200, 0.97)
    later = rounds(turns, 60, 1.5)
    assert all(later[40:])


def test_one_bad_round_among_good_ones_changes_nothing() -> None:
    turns = NgramTurns()
    rounds(turns, 10, 1.3)
    rounds(turns, 1, 0.9)
    assert all(rounds(turns, 10, 1.3))


def test_seconds_are_those_of_looking_up_since_the_last_question() -> None:
    turns = NgramTurns()
    for _ in range(2):
        with turns.timed():
            time.sleep(0.01)
    assert 0.02 <= turns.spent() < 1.0
    assert turns.spent() == 0.0


@pytest.mark.parametrize("method", ["ngram", "medusa+ngram"])
def test_rows_that_rest_and_wake_equal_solo_runs(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """N-grams rest every other round; texts, counters and what is learnt of copies go on."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)
    flips: list[bool] = []

    def count_round(self: NgramTurns, lift: float) -> None:
        self.open = not self.open
        flips.append(self.open)

    monkeypatch.setattr(NgramTurns, "count_round", count_round)
    engine = models.engine("heads")
    options: dict[str, Any] = RAW | {"temperature": 0.4, "seed": 5}
    plain = alone(engine, MIXED, **options)
    batch, results = answers(engine, 3, MIXED, method=method, **options)
    for ours, theirs in zip(results, plain, strict=True):
        same_output(ours, theirs)
    assert batch.stats.accepted > 0
    assert True in flips
    assert False in flips
