"""Majority vote and its ties."""

from __future__ import annotations

import itertools

from specrun.runtime.best_of.answers import AnswerPattern
from specrun.runtime.best_of.vote import VoteScore, vote_scores

from .candidate_rows import candidate, candidates


def best(scores: list[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def test_the_answer_that_most_give_wins_however_it_is_written() -> None:
    rows = candidates("it is 7", "1,000", "= $1000.0", "so 1000.", "7")
    scores = VoteScore().scores("", rows)
    assert [int(score) for score in scores] == [2, 3, 3, 3, 2]
    assert best(scores) == 1  # of the three, the most probable


def test_the_log_probability_breaks_ties_and_nothing_else() -> None:
    for logprobs in itertools.permutations([-0.01, -3.0, -700.0, -1e9]):
        scores = vote_scores(["a", "a", "b", "b"], logprobs)
        assert best(scores) == max(range(4), key=logprobs.__getitem__)
        assert best(vote_scores(["a", "a", "a", "b"], logprobs)) != 3


def test_no_answer_loses_against_any_and_all_without_one_still_rank() -> None:
    rows = [candidate("x", [-0.001], index=0), candidate("3", [-9.0], index=1)]
    assert best(VoteScore().scores("", rows)) == 1
    assert best(vote_scores([None, None, None], [-2.0, -1.0, float("-inf")])) == 1


def test_a_pattern_of_the_users() -> None:
    rows = candidates("Answer: yes 1", "Answer: no 2", "Answer: No 3")
    scores = VoteScore(AnswerPattern(r"Answer: (\w+)")).scores("", rows)
    assert best(scores) == 1
    assert VoteScore().scores("", []) == []


def test_a_vote_that_nobody_cast_is_said() -> None:
    score = VoteScore()
    score.scores("", candidates("none", "nor this"))
    assert score.notes == ("no sample has an answer to vote on: the most probable one was chosen",)
    score.scores("", candidates("none", "7"))
    assert score.notes == ()
    score.scores("", [candidate(), candidate(index=1)])
    assert score.notes == ("no sample has an answer to vote on",)
