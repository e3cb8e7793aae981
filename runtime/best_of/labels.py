"""A file of questions whose right answers are known, and what the samples of one are worth against its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrun.models_cache.errors import UsageError
from specrun.models_cache.strictjson import StrictJsonError, parse_object
from specrun.runtime.best_of.answers import NUMBER, AnswerPattern, normalise
from specrun.runtime.best_of.candidates import Candidate, Score, mean_logprob
from specrun.runtime.best_of.report import Labelled
from specrun.runtime.best_of.result import BestOfResult
from specrun.runtime.best_of.vote import VoteScore


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and its right answer, as `normalise` writes it."""

    prompt: str
    answer: str


def read_questions(path: Path) -> list[Question]:
    """The questions of a JSON Lines file: {"prompt": text, "answer": text or number}; other keys are not looked at.

    Raises UsageError that names the line.
    """
    questions = []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text: give a file of JSON lines.") from None
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                questions.append(_question(parse_object(line)))
            except (StrictJsonError, UsageError) as error:
                raise UsageError(f"{path}, line {number}: {error}") from None
    if not questions:
        raise UsageError(f"{path} has no question: give a JSON object with prompt and answer on each line.")
    return questions


def _question(line: dict[str, object]) -> Question:
    prompt, answer = line.get("prompt"), line.get("answer")
    if not isinstance(prompt, str) or not prompt:
        raise UsageError("prompt must be text.")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not normalise(str(answer)):
        raise UsageError("answer must be text or a number.")
    return Question(prompt, normalise(str(answer)))


class Marker:
    """Tells which candidates are right: those in which the score's own pattern, or the last number, is the answer."""

    def __init__(self, score: Score) -> None:
        """Raises UsageError for unit tests, which tell themselves what is right."""
        if score.name == "tests":
            raise UsageError("Unit tests tell what is right themselves: leave answers out, or choose another score.")
        self._vote = isinstance(score, VoteScore)
        self._pattern = score.answer if isinstance(score, VoteScore) else AnswerPattern()

    def require_findable(self, answer: str) -> None:
        """Raise UsageError for an answer that no text can be found to give."""
        if not answer:
            raise UsageError("The answer is empty: give what a right text says.")
        if self._pattern.pattern == NUMBER and self._pattern.find([answer]) != [answer]:
            raise UsageError(
                f"The answer {answer!r} is no number, and the last number of a text is what it is compared with: say "
                "where texts have the answer with --score 'vote:REGEX'."
            )

    def right(self, answer: str) -> Callable[[Candidate], bool]:
        """Whether a candidate gives this answer, as `normalise` writes it."""
        return lambda candidate: self._pattern.find([candidate.text]) == [answer]

    def labelled(self, result: BestOfResult, answer: str) -> Labelled:
        """The samples of a question for a report."""
        candidates = result.candidates
        answers = tuple(self._pattern.find([candidate.text for candidate in candidates]))
        return Labelled(
            tuple(found == answer for found in answers),
            None if self._vote else result.scores,
            answers if self._vote else (),
            tuple(map(mean_logprob, candidates)) if self._vote else (),
            result.usage.prompt_tokens,
            tuple(len(candidate.token_ids) for candidate in candidates),
        )
