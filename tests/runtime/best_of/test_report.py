"""The calibration report against brute force over subsets, and its figures on cases worked out by hand."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.best_of.report import (
    Labelled,
    correlation,
    flops_ratio,
    pick_accuracy,
    report,
)
from specrun.runtime.best_of.vote import vote_scores


def brute_force(question: Labelled, n: int) -> float:
    """The mean over all subsets of the share of right ones among the best."""
    found = []
    for subset in itertools.combinations(range(len(question.right)), n):
        if question.scores is not None:
            scores = [question.scores[i] for i in subset]
        else:
            scores = vote_scores([question.answers[i] for i in subset], [question.logprobs[i] for i in subset])
        best = max(scores)
        equal = [question.right[i] for i, score in zip(subset, scores, strict=True) if score == best]
        found.append(0.0 if best == -math.inf else sum(equal) / len(equal))
    return sum(found) / len(found)


@pytest.mark.parametrize("seed", range(20))
def test_the_closed_form_is_the_mean_over_all_subsets(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 8)
    scores = tuple(draw.choice([0.0, 1.0, 2.0, 0.5, -math.inf]) for _ in range(size))
    question = Labelled(tuple(draw.random() < 0.5 for _ in range(size)), scores)
    for n in range(1, size + 1):
        assert pick_accuracy(question, n) == pytest.approx(brute_force(question, n), abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_votes_are_counted_anew_in_each_subset(seed: int) -> None:
    draw = random.Random(seed)
    answers = tuple(draw.choice(["1", "2", "3", None]) for _ in range(7))
    logprobs = tuple(-draw.random() for _ in range(7))
    question = Labelled(tuple(answer == "1" for answer in answers), None, answers, logprobs)
    for n in (1, 2, 4, 7):
        assert pick_accuracy(question, n) == pytest.approx(brute_force(question, n), abs=1e-12)


def test_many_subsets_are_drawn() -> None:
    answers = ("1",) * 15 + ("2",) * 10 + tuple(map(str, range(3, 8)))
    question = Labelled(tuple(a == "1" for a in answers), None, answers, (-1.0,) * 30)
    exact = 0.0  # by how many of each answer are drawn: 15 times the right one, 10 times a wrong one, 5 others
    for ones, twos in itertools.product(range(10), range(10)):
        others = 9 - ones - twos
        if 0 <= others <= 5:
            ways = math.comb(15, ones) * math.comb(10, twos) * math.comb(5, others) / math.comb(30, 9)
            most = max(ones, twos, min(others, 1))
            equal = most * ((ones == most) + (twos == most) + (others if most == 1 else 0))
            exact += ways * (most if ones == most else 0) / equal
    assert math.comb(30, 9) > 10**7
    assert pick_accuracy(question, 9) == pick_accuracy(question, 9) == pytest.approx(exact, abs=0.015)
    assert pick_accuracy(question, 30) == 1.0


def test_figures_by_hand() -> None:
    """Two questions of four samples: one with three right, one with one; the score finds them or not."""
    first = Labelled((True, True, True, False), (1.0, 2.0, 3.0, 4.0), prompt_tokens=10, tokens=(5, 5, 5, 5))
    second = Labelled((True, False, False, False), (9.0, 2.0, 3.0, 4.0), prompt_tokens=30, tokens=(15, 15, 15, 15))
    found = report([first, second], (1, 2, 4, 16))
    assert (found.questions, found.samples, found.p) == (2, 4, 0.5)
    rows = {row.n: row for row in found.rows}
    assert sorted(rows) == [1, 2, 4]
    assert [rows[n].accuracy for n in (1, 4)] == pytest.approx([0.5, 0.5])
    assert rows[2].accuracy == pytest.approx((0.5 + 0.5) / 2)
    assert rows[2].pass_at == pytest.approx((1.0 + 0.5) / 2)  # 1 - C(1,2)/C(4,2), 1 - C(3,2)/C(4,2)
    assert [rows[n].bound for n in (1, 2, 4)] == pytest.approx([0.5, 0.75, 1 - 0.5**4])
    assert rows[2].bound_factor == pytest.approx(1.0)
    assert rows[4].flops == pytest.approx((20 + 40) / 30)
    assert rows[4].flops_separate == 4.0
    # Between: k sum (mean - .5)^2 / 1 = 4 (2/16) = .5. Within: (3/16 + 9/16) (each) 0.75 * 2 / (2 * 3) = .25.
    assert found.correlation == pytest.approx((0.5 - 0.25) / (0.5 + 3 * 0.25))


def test_the_correlation_finds_what_was_put_in() -> None:
    draw = random.Random(1)
    alike = [[mark] * 8 for mark in [True, False] * 10]
    assert correlation(alike) == pytest.approx(1.0)
    free = [[draw.random() < 0.5 for _ in range(16)] for _ in range(2000)]
    assert abs(correlation(free) or 1.0) < 0.02
    mixed = []
    for _ in range(4000):  # p of a question is 0.2 or 0.8: ICC = Var(p) / (mean p (1 - mean p)) = 0.09 / 0.25
        p = draw.choice([0.2, 0.8])
        mixed.append([draw.random() < p for _ in range(16)])
    assert correlation(mixed) == pytest.approx(0.36, abs=0.02)
    for nothing in ([[True, False]], [[True], [False]], [[True, True], [True, True]], []):
        assert correlation(nothing) is None


def test_independent_samples_reach_the_bound_and_correlated_ones_do_not() -> None:
    draw = random.Random(2)
    free = [Labelled(tuple(draw.random() < 0.3 for _ in range(16)), (0.0,) * 16) for _ in range(1500)]
    row = report(free, (4,)).rows[0]
    assert row.bound_factor == pytest.approx(1.0, abs=0.02)
    alike = [Labelled((draw.random() < 0.3,) * 16, (0.0,) * 16) for _ in range(1500)]
    row = report(alike, (4,)).rows[0]
    assert row.pass_at == pytest.approx(0.3, abs=0.05)
    assert row.bound > 0.7


def test_nothing_right_and_no_token_counts() -> None:
    found = report([Labelled((False, False), (1.0, 1.0))])
    assert found.p == 0.0
    assert found.correlation is None
    assert found.rows[-1].bound_factor is None
    assert found.rows[-1].flops is None
    assert flops_ratio([Labelled((True,), (1.0,))], 1, shared=True) is None
    assert "- " in found.table()
    assert "pass@n" in found.table()
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["n"] == 1


def test_questions_that_cannot_be_reported_on() -> None:
    for questions, message in [
        ([], "no question"),
        ([Labelled((True,), (1.0,)), Labelled((True, True), (1.0, 2.0))], "as many samples, not 1 to 2"),
    ]:
        with pytest.raises(UsageError, match=message):
            report(questions)
    with pytest.raises(UsageError, match="without samples"):
        Labelled(())
    with pytest.raises(UsageError, match="one score"):
        Labelled((True, False), (1.0,))
    with pytest.raises(UsageError, match="log-probability of every sample"):
        Labelled((True,), None, ("1",))
