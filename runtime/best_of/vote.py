"""Majority vote: the answer that most candidates give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specrun.runtime.best_of.answers import AnswerPattern
from specrun.runtime.best_of.candidates import Candidate, mean_logprob


class VoteScore:
    """The number of candidates with the same answer (Wang et al. 2022); the mean log-probability breaks ties.

    answer: where a text has its answer; by default the last number.
    """

    name = "vote"

    def __init__(self, answer: AnswerPattern | None = None) -> None:
        self.answer = answer or AnswerPattern()
        self.notes: tuple[str, ...] = ()
        """What there is to say of the last call of `scores`."""

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`: the votes plus less than 1 for the log-probability, and so below 1 without an answer."""
        answers = self.answer.find([candidate.text for candidate in candidates])
        voted = any(answer is not None for answer in answers)
        chosen = ": the most probable one was chosen" if any(candidate.token_ids for candidate in candidates) else ""
        self.notes = () if voted else (f"no sample has an answer to vote on{chosen}",)
        return vote_scores(answers, [mean_logprob(candidate) for candidate in candidates])


def vote_scores(answers: Sequence[str | None], logprobs: Sequence[float]) -> list[float]:
    """Votes for each one's answer, 0 for None, plus a part below 1 that grows with its mean log-probability."""
    votes = Counter(answer for answer in answers if answer is not None)
    return [
        (0 if answer is None else votes[answer]) + 0.5 / (1.0 - min(logprob, 0.0))
        for answer, logprob in zip(answers, logprobs, strict=True)
    ]
