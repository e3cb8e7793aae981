"""How well a score chooses: accuracy of the top pick of n, beside pass@n and what theory says of both.

Everything comes from the same N samples a question: an n below N stands for all subsets of n of them, each as likely.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from specrun.models_cache.errors import UsageError
from specrun.runtime import cost_model
from specrun.runtime.best_of.vote import vote_scores

COUNTS: Final = (1, 4, 16)
MOST_SUBSETS: Final = 20_000
GUESSED_FACTOR: Final = 0.8
"""What the essay behind this project guesses that pass@n is of the bound for independent samples."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The samples of one question: which are right, and what chooses among them.

    scores: one for each sample, -inf for one that cannot be chosen. For majority vote None: the votes depend on which
    samples there are, so it is made anew for each subset from `answers` (None: no answer) and `logprobs` (mean of the
    tokens, in nats). tokens: of each sample; prompt_tokens: of the question, with its template.
    """

    right: tuple[bool, ...]
    scores: tuple[float, ...] | None = None
    answers: tuple[str | None, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.right:
            raise UsageError("A question without samples cannot be reported on: leave it out.")
        parts = [self.tokens, self.scores or ()] if self.scores is not None else [self.tokens, self.answers]
        if self.scores is None and len(self.logprobs) != len(self.right):
            raise UsageError("A vote needs the answer and the log-probability of every sample.")
        if any(part and len(part) != len(self.right) for part in parts) or (self.scores is None and not self.answers):
            raise UsageError("A question must have one score, or answer, for every sample.")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """For one n: accuracy: the top pick is right; pass_at: one or more of n are (unbiased, Chen et al. 2021).

    bound: 1 - (1 - p)^n for independent samples, p being the share of all that are right. bound_factor: pass_at /
    bound. flops, flops_separate: floating-point operations against one sample, with the prompt run once, and once for
    each; attention's own are left out.
    """

    n: int
    accuracy: float
    pass_at: float
    bound: float
    bound_factor: float | None
    flops: float | None
    flops_separate: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """correlation: of right and wrong between samples of a question (one-way random effects, ANOVA); None where it
    cannot be had: one question, one sample each, or all alike.
    """

    questions: int
    samples: int
    p: float
    correlation: float | None
    guessed_factor: float
    rows: tuple[ReportRow, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return asdict(self)

    def table(self) -> str:
        """The report as text."""
        lines = [
            f"{self.questions} questions, {self.samples} samples each, {self.p:.1%} of them right",
            f"correlation between samples of a question: {_shown(self.correlation, '.2f')}",
            "   n   top pick    pass@n   1-(1-p)^n   pass@n/bound   FLOPs (prompt once / each time)",
        ]
        for row in self.rows:
            flops = f"{_shown(row.flops, '.1f')}x / {_shown(row.flops_separate, '.1f')}x"
            lines.append(
                f"{row.n:4}   {row.accuracy:8.1%}  {row.pass_at:8.1%}    {row.bound:8.1%}   "
                f"{_shown(row.bound_factor, '.2f'):>12}   {flops}"
            )
        lines.append(f"(the essay guesses a factor of {self.guessed_factor} to the bound)")
        return "\n".join(lines)


def report(questions: Sequence[Labelled], counts: Sequence[int] = COUNTS) -> Report:
    """Put labelled samples together. Counts above the number of samples are left out, and that number itself is added.

    Raises UsageError where there is no question, or not the same number of samples for each.
    """
    if not questions:
        raise UsageError("There is no question to report on: sample some first.")
    sizes = {len(question.right) for question in questions}
    if len(sizes) > 1:
        raise UsageError(f"All questions must have as many samples, not {min(sizes)} to {max(sizes)}.")
    (total,) = sizes
    p = math.fsum(sum(question.right) / total for question in questions) / len(questions)
    rows = []
    for n in sorted({total, *(count for count in counts if 1 <= count < total)}):
        bound = cost_model.coverage_bound(p, n)
        reached = _mean([cost_model.pass_at_k(total, sum(question.right), n) for question in questions])
        rows.append(
            ReportRow(
                n=n,
                accuracy=_mean([pick_accuracy(question, n) for question in questions]),
                pass_at=reached,
                bound=bound,
                bound_factor=reached / bound if bound else None,
                flops=flops_ratio(questions, n, shared=True),
                flops_separate=flops_ratio(questions, n, shared=False),
            )
        )
    found = correlation([question.right for question in questions])
    return Report(len(questions), total, p, found, GUESSED_FACTOR, tuple(rows))


def pick_accuracy(question: Labelled, n: int) -> float:
    """The chance that the top pick of n of the samples is right, over all subsets of n.

    Of equally good ones each is as likely to be picked. Nothing that can be chosen counts as wrong.
    """
    if question.scores is not None:
        return _pick_by_score(question.scores, question.right, n)
    return _pick_by_vote(question, n)


def _pick_by_score(scores: Sequence[float], right: Sequence[bool], n: int) -> float:
    """In closed form: the best of a subset is one of a group of equals unless the subset is drawn from the rest."""
    total = len(scores)
    ranked = set(scores)
    chance = 0.0
    for score in ranked:
        if score == -math.inf:
            continue
        equal = [mark for other, mark in zip(scores, right, strict=True) if other == score]
        lower = sum(other < score for other in scores)
        ways = math.comb(lower + len(equal), n) - math.comb(lower, n)
        chance += ways / math.comb(total, n) * (sum(equal) / len(equal))
    return chance


def _pick_by_vote(question: Labelled, n: int) -> float:
    """Over all subsets where there are up to MOST_SUBSETS, else over so many drawn ones."""
    total = len(question.right)
    subsets: Any = itertools.combinations(range(total), n)
    if math.comb(total, n) > MOST_SUBSETS:
        draw = random.Random(0)
        subsets = (draw.sample(range(total), n) for _ in range(MOST_SUBSETS))
    found = []
    for subset in subsets:
        scores = vote_scores([question.answers[i] for i in subset], [question.logprobs[i] for i in subset])
        best = max(scores)
        equal = [question.right[i] for i, score in zip(subset, scores, strict=True) if score == best]
        found.append(sum(equal) / len(equal))
    return _mean(found)


def correlation(right: Sequence[Sequence[bool]]) -> float | None:
    """The intraclass correlation ICC(1) of right and wrong: (MSB - MSW) / (MSB + (k - 1) MSW), k samples a question.

    Shrout & Fleiss 1979. Negative where samples of a question differ more than those of different ones. None for fewer
    than two questions or samples, or where all are alike.
    """
    questions, k = len(right), min(map(len, right), default=0)
    if questions < 2 or k < 2:
        return None
    means = [sum(row) / len(row) for row in right]
    overall = _mean(means)
    between = k * math.fsum((mean - overall) ** 2 for mean in means) / (questions - 1)
    within = math.fsum((mark - mean) ** 2 for row, mean in zip(right, means, strict=True) for mark in row)
    within /= questions * (k - 1)
    spread = between + (k - 1) * within
    return (between - within) / spread if spread else None


def flops_ratio(questions: Sequence[Labelled], n: int, *, shared: bool) -> float | None:
    """Tokens run for n samples against one: (p + n l) / (p + l), or n of both; None where tokens were not counted.

    Each token costs 2 operations a parameter, in the prompt as in an answer. p, l: means over the questions.
    """
    if any(len(question.tokens) != len(question.right) for question in questions):
        return None
    prompt = _mean([question.prompt_tokens for question in questions])
    answer = _mean([sum(question.tokens) / len(question.tokens) for question in questions])
    if not prompt + answer:
        return None
    return (prompt + n * answer) / (prompt + answer) if shared else float(n)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
