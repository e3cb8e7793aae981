"""Best of N: wrong arguments, scores that misbehave, and what stop texts take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime import Candidate

from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "max_tokens": 5, "seed": 11}


class Fixed:
    """The same for all."""

    name = "fixed"

    def __init__(self, value: object) -> None:
        self._value = value

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[Any]:
        return [self._value] * len(candidates)


@pytest.mark.parametrize("prompt", [[], None, ["hi"], 3])
def test_prompts_that_are_none(models: TinyModels, prompt: Any) -> None:
    with pytest.raises(UsageError, match="A prompt is "):
        models.engine("tgt").best_of(prompt, n=2)


def test_budgets_and_scores_that_are_none(models: TinyModels) -> None:
    engine = models.engine("tgt")
    for wrong, words in (
        ({"budget_tokens": "5"}, "budget_tokens must be 1 or more, not '5'"),
        ({"budget_tokens": float("nan")}, "budget_tokens must be 1"),
        ({"budget_s": "5"}, "budget_s must be above 0, not '5'"),
        ({"budget_s": True}, "budget_s must be above 0, not True"),
        ({"method": "lookahead"}, "best-of runs several: choose another"),
        ({"score": "vote"}, "A score is an object .* not 'vote'"),
    ):
        with pytest.raises(UsageError, match=words):
            engine.best_of(PROMPT, n=2, **RAW, **wrong)  # type: ignore[arg-type]
    for value in ("x", None, float("nan")):
        with pytest.raises(UsageError, match="candidate 0 is no number"):
            engine.best_of(PROMPT, n=2, score=Fixed(value), **RAW)


def test_labels_count_as_true_or_false(models: TinyModels) -> None:
    engine = models.engine("tgt")
    labels: list[Any] = ["yes", None, 5]
    found = engine.best_of(PROMPT, n=3, right=lambda candidate: labels[candidate.index], **RAW)
    assert found.pass_at_k == {1: pytest.approx(2 / 3), 2: 1.0, 3: 1.0}


def test_tokens_that_a_stop_text_takes_back_end_no_sample(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner is one whose last tokens, the beginning of the stop text, were improbable."""
    monkeypatch.setattr("specrun.runtime.best_of.run.MOST_ROWS", 1)
    engine = models.engine("tgt")
    options: dict[str, Any] = {"raw": True, "seed": 2, "temperature": 0.5, "max_tokens": 4, "ignore_eos": True}
    options["stop"] = ['v"']
    whole = engine.best_of("one two", n=8, **options)
    assert whole.winner is not None
    assert whole.winner.finish_reason == "stop"
    pruned = engine.best_of("one two", n=8, prune=True, **options)
    assert pruned.pruned
    assert pruned.winner == whole.winner
