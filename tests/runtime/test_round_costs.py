"""Costs that follow what is seen: a slope over the length of the text, and what a disturbance may do to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specrun.runtime.draft_length import DraftLengthPlanner
from specrun.runtime.proposal import MAX_NODES
from specrun.runtime.round_costs import RoundCosts
from specrun.runtime.tree_planner import TreePlanner


def table(width: int) -> float:
    return 0.004 + 0.001 * width


def after(runs: int, slope: float, *, lengths: tuple[int, ...] = (100, 600, 1100)) -> RoundCosts:
    """Costs that saw `runs` runs, each dearer than the table by slope x length."""
    costs = RoundCosts(table)
    for run in range(runs):
        width, length = 1 + run % 5, lengths[run % len(lengths)]
        costs.note(width, length, table(width) + slope * length)
    return costs


def test_nothing_is_added_before_anything_was_seen() -> None:
    assert RoundCosts(table).beyond(2000) == 0.0
    assert RoundCosts(table).width(4) == table(4)


def test_the_slope_is_found_from_runs_of_several_widths() -> None:
    costs = after(600, 4e-6)
    assert costs.beyond(1000) == pytest.approx(4e-3, rel=0.05)
    for width in (1, 5, 9):
        assert costs.width(width) == pytest.approx(table(width), rel=0.05)


def test_after_a_few_runs_a_round_is_known_behind_the_lengths_that_were_seen() -> None:
    costs = after(60, 4e-6)
    for length in (100, 600, 1100):
        assert costs.width(3) + costs.beyond(length) == pytest.approx(table(3) + 4e-6 * length, rel=0.06)


def test_a_few_runs_behind_a_short_text_move_it_little() -> None:
    costs = RoundCosts(table)
    for _ in range(3):
        costs.note(1, 20, table(1) * 1.5)
    assert costs.beyond(1000) < 0.1 * table(1)


def test_it_follows_a_change() -> None:
    costs = after(300, 8e-6)
    for run in range(500):
        costs.note(1 + run % 5, 800, table(1 + run % 5) + 2e-6 * 800)
    for width in range(1, 6):
        assert costs.width(width) + costs.beyond(800) == pytest.approx(table(width) + 1.6e-3, rel=0.04)


def test_faster_runs_than_the_table_says_add_nothing() -> None:
    assert after(60, -1e-6).beyond(1000) == 0.0


def settled(take: Callable[[int], float]) -> RoundCosts:
    """Costs that saw many runs of widths 1 to 5 behind texts of many lengths."""
    costs = RoundCosts(table)
    for run in range(600):
        width, length = 1 + run % 5, (20, 400, 900)[run % 3]
        costs.note(width, length, take(width) + 1e-6 * length)
    return costs


def test_a_width_that_got_dearer_is_known_to_be() -> None:
    costs = settled(lambda width: table(width) * (1.3 if width == 4 else 1.0))
    assert costs.width(4) == pytest.approx(1.3 * table(4), rel=0.06)
    for width in (1, 2, 3, 5):
        assert costs.width(width) == pytest.approx(table(width), rel=0.06)


def test_widths_that_were_not_seen_go_with_the_others() -> None:
    costs = settled(lambda width: 1.4 * table(width))
    for width in (1, 5, 9, 17):
        assert costs.width(width) == pytest.approx(1.4 * table(width), rel=0.08)


def test_one_disturbed_run_moves_a_width_little() -> None:
    costs = settled(table)
    before = costs.width(3)
    costs.note(3, 400, 100 * table(3))
    assert before < costs.width(3) < 1.05 * before


def test_one_disturbed_run_counts_for_a_few_times_the_table_at_most() -> None:
    disturbed, capped = after(60, 4e-6), after(60, 4e-6)
    disturbed.note(1, 1000, 3.0)
    capped.note(1, 1000, 4 * capped.width(1))
    assert disturbed.beyond(1000) == capped.beyond(1000)


def test_runs_behind_short_texts_on_a_busy_machine_are_no_steep_slope() -> None:
    """Those runs are dearer whatever the length; what is found is bounded, and the true slope comes soon after."""
    busy, free = RoundCosts(table, steepest=1e-5), RoundCosts(table)
    for run in range(60):
        for costs in (busy, free):
            costs.note(1 + run % 5, 20 + run, 3 * table(1 + run % 5))
    assert free.slope > 4e-5
    assert 0.0 < busy.slope <= 1e-5
    for run in range(60):
        busy.note(1 + run % 5, 600, table(1 + run % 5) + 2e-6 * 600)
    assert busy.slope < 4e-6
    assert RoundCosts(table, 1.0, steepest=1e-5).slope == pytest.approx(1e-5)


def test_a_chunk_of_a_prompt_is_no_round() -> None:
    costs = after(60, 4e-6)
    before = costs.beyond(1000)
    costs.note(256, 256, 1.0)
    assert costs.beyond(1000) == before


def test_behind_a_longer_text_more_draft_tokens_pay() -> None:
    """Where a run costs more whatever its width, a further position costs relatively less."""
    costs = after(60, 2e-5)
    chain = DraftLengthPlanner(costs.width, beyond=costs.beyond)
    tree = TreePlanner(costs.width, beyond=costs.beyond)
    counts, rewards = [], []
    for length in (10, 2000):
        chain.begin(length)
        tree.begin(length)
        counts.append(chain.choose([0.5] * 16, 16))
        rewards.append(tree.least_reward)
        assert tree.costs == [costs.width(width) + costs.beyond(length) for width in range(1, MAX_NODES + 2)]
    assert counts[0] < counts[1]
    assert rewards[0] > rewards[1]


def test_without_a_slope_the_costs_stay_those_of_the_table() -> None:
    planner = TreePlanner(table)
    planner.begin(5000)
    assert planner.costs[0] == table(1)


def test_the_rest_of_a_round_counts_whatever_the_length() -> None:
    costs = RoundCosts(table)
    for _ in range(50):
        costs.note_rest(4e-4)
    assert costs.beyond(0) == pytest.approx(4e-4)
    costs.note_rest(10.0)  # a disturbance
    assert costs.beyond(0) < 4e-4 + 0.05 * table(1)
