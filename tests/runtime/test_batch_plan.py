"""What a batch goes by: the joint width, the costs of rounds, the number of rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.batch_size import SIZES, choose_batch_size, memory_for_rows
from specrun.runtime.batching.joint_width import joint_width
from specrun.runtime.calibration import Calibration

MEASURED = Calibration(1, {1: 5.0, 2: 6.0, 3: 6.5, 5: 8.0, 9: 10.0, 17: 15.0})


def expected(chances: Sequence[Sequence[float]], width: int) -> float:
    """Tokens of a round, by the definition."""
    return sum(1 + sum(itertools.accumulate(own[: width - 1], lambda a, b: a * b)) for own in chances)


def test_the_width_with_the_most_tokens_a_second() -> None:
    """Against every width in turn, for random rows and costs."""
    rng = np.random.default_rng(4)
    widths = set()
    for _ in range(500):
        chances = [(rng.random(rng.integers(0, 8)) ** 0.2).tolist() for _ in range(rng.integers(1, 9))]
        costs = 1 + np.cumsum(rng.random(20) * 0.8)
        most = int(rng.integers(1, 12))
        width = joint_width(chances, lambda w, costs=costs: float(costs[w - 1]), most=most)
        end = min(most, 1 + max(map(len, chances)))
        rates = [expected(chances, w) / costs[w - 1] for w in range(1, end + 1)]
        assert rates[width - 1] == pytest.approx(max(rates))
        widths.add(width)
    assert len(widths) > 5


def test_what_bounds_the_width() -> None:
    chances = [[0.9, 0.9, 0.9], []]

    def flat(width: int) -> float:
        return 1.0

    def steep(width: int) -> float:
        return float(width)

    assert joint_width(chances, flat) == 4
    assert joint_width(chances, flat, most=2) == 2
    assert joint_width(chances, flat, most=0) == 1
    assert joint_width(chances, steep) == 1
    assert joint_width(chances, steep, least=3) == 3
    assert joint_width(chances, steep, least=3, most=2) == 2
    assert joint_width(chances, flat, least=9) == 4
    assert joint_width([[], []], flat) == 1
    assert joint_width([[0.0, 0.0]], flat) == 1  # of equal ones the narrower


def test_speculation_gets_shallower_as_the_batch_grows() -> None:
    """By the same model: the more rows, the more a position costs beside what a run costs anyway."""
    costs = BatchCosts(MEASURED)
    widths = [
        joint_width([[0.8] * 16] * rows, lambda w, rows=rows: costs.round(rows, w)) for rows in (1, 2, 4, 8, 16, 32)
    ]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
    lone = joint_width([[0.8] * 8], lambda w: costs.round(1, w))
    beside = joint_width([[0.8] * 8, *[[]] * 7], lambda w: costs.round(8, w))
    assert lone > beside == 1  # seven rows that propose nothing would pay for it


def test_costs_begin_with_the_table() -> None:
    costs = BatchCosts(MEASURED)
    assert costs.round(1, 5) == costs.round(5, 1) == 8.0
    assert costs.round(4, 2) == pytest.approx(9.5)
    assert costs.table(33) == pytest.approx(15.0 + 16 * 5 / 8)
    assert BatchCosts(Calibration(1, {1: 2.0})).table(3) == pytest.approx(6.0)


def test_costs_follow_what_is_seen() -> None:
    costs = BatchCosts(MEASURED)
    for _ in range(60):
        costs.note(4, 2, 19.0)
    assert costs.run(4, 2) == pytest.approx(19.0, rel=0.02)
    assert costs.run(8, 1) == pytest.approx(19.0, rel=0.02)  # twice the table, as everything seen
    before = costs.run(4, 2)
    costs.note(4, 2, 1e6)
    assert costs.run(4, 2) < 1.3 * before
    assert costs.round(4, 2) == costs.run(4, 2)
    for _ in range(60):
        costs.note_rest(4, 2.0)
    assert costs.round(4, 2) == pytest.approx(costs.run(4, 2) + 2.0)
    assert costs.round(8, 2) == pytest.approx(costs.run(8, 2) + 4.0)


def test_the_number_of_rows() -> None:
    costs = BatchCosts(MEASURED)
    size = choose_batch_size(costs, 1, None)
    per_token = {one: costs.round(one, 1) / one for one in SIZES}
    assert per_token[size] <= 1.05 * min(per_token.values())
    assert all(per_token[one] > 1.05 * min(per_token.values()) for one in SIZES if one < size)
    assert choose_batch_size(costs, 100, 399) == 3
    assert choose_batch_size(costs, 100, 50) == 1
    dear = BatchCosts(Calibration(1, {1: 1.0, 2: 2.0, 4: 4.0, 9: 9.0, 17: 17.0}))
    assert choose_batch_size(dear, 1, None) == 1  # rows cost as much together as one by one


def test_memory_is_told_here() -> None:
    found = memory_for_rows()
    assert found is None or found > 2**20
