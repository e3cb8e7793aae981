"""Costs that follow what is seen: a slope over the length of the text, and what a disturbance may do to it."""

from __future__ import annotations

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
    assert after(60, 4e-6).beyond(1000) == pytest.approx(4e-3, rel=0.05)


def test_a_few_runs_behind_a_short_text_move_it_little() -> None:
    costs = RoundCosts(table)
    for _ in range(3):
        costs.note(1, 20, table(1) * 1.5)
    assert costs.beyond(1000) < 0.1 * table(1)


def test_it_follows_a_change() -> None:
    costs = after(300, 8e-6)
    for run in range(500):
        costs.note(1 + run % 5, 800, table(1 + run % 5) + 2e-6 * 800)
    assert costs.beyond(1000) == pytest.approx(2e-3, rel=0.1)


def test_faster_runs_than_the_table_says_add_nothing() -> None:
    assert after(60, -1e-6).beyond(1000) == 0.0


def test_one_disturbed_run_counts_for_a_few_times_the_table_at_most() -> None:
    disturbed, capped = after(60, 4e-6), after(60, 4e-6)
    disturbed.note(1, 1000, 3.0)
    capped.note(1, 1000, 4 * table(1))
    assert disturbed.beyond(1000) == capped.beyond(1000)


def test_runs_behind_short_texts_on_a_busy_machine_are_no_steep_slope() -> None:
    """Those runs are dearer whatever the length; what is found is bounded, and the true slope comes soon after."""
    busy, free = RoundCosts(table, steepest=1e-5), RoundCosts(table)
    for run in range(60):
        for costs in (busy, free):
            costs.note(1 + run % 5, 20 + run, 3 * table(1 + run % 5))
    assert free.slope > 5e-5
    assert 0.0 < busy.slope <= 1e-5
    for run in range(60):
        busy.note(1 + run % 5, 600, table(1 + run % 5) + 2e-6 * 600)
    assert busy.slope == pytest.approx(2e-6, rel=0.05)
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
        assert tree.costs == [table(width) + costs.beyond(length) for width in range(1, MAX_NODES + 2)]
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
