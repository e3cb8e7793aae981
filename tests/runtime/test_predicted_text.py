"""Predicted outputs: found again after differences, accepted where right, and never to be seen in a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.ngram_table import LONGEST_MATCH, Match
from specrun.runtime.predicted_text import PredictedText

from .checks import make_speculation_pay, read, same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .toys import LOWER


def tokens(match: Match | None) -> tuple[int, ...] | None:
    return None if match is None else match.tokens


def test_an_output_that_comes_as_predicted() -> None:
    """From the first token on, with the surest match that there is."""
    predicted = list(range(10, 40))
    text = PredictedText(predicted)
    prompt = [1, 2, 3]
    for done in range(30):
        match = text.lookup([*prompt, *predicted[:done]], 3, 4)
        assert match is not None
        assert match == Match(LONGEST_MATCH, tuple(predicted[done : done + 4]))
        assert set(match.agreement) == {"predicted"}
    assert text.lookup([*prompt, *predicted], 3, 4) is None
    assert text.lookup(prompt, 3, 0) is None


def test_it_is_found_again_after_a_difference() -> None:
    text = PredictedText([5, 6, 7, 8, 9, 10, 11, 12])
    assert tokens(text.lookup([1, 5, 6], 1, 2)) == (7, 8)
    assert text.lookup([1, 5, 6, 99], 1, 2) is None
    assert tokens(text.lookup([1, 5, 6, 99, 9], 1, 2)) == (10, 11)  # 7 and 8 were replaced by 99
    match = text.lookup([1, 5, 6, 99, 9, 10], 1, 2)
    assert match is not None
    assert (match.length, match.tokens) == (2, (11, 12))
    assert text.lookup([5, 6, 7], 3, 2) is not None  # the prompt is no output
    assert tokens(text.lookup([5, 6, 7, 5], 3, 2)) == (6, 7)


def test_of_several_places_the_next_one_wins() -> None:
    """A line that comes again and again: the output walks through its places one after another."""
    predicted = [7, 1, 7, 2, 7, 3, 7, 4]
    text = PredictedText(predicted)
    assert tokens(text.lookup([50, 7, 1], 1, 1)) == (7,)
    assert tokens(text.lookup([50, 7, 1, 60, 7], 1, 1)) == (2,)
    assert tokens(text.lookup([50, 7, 1, 60, 7, 2, 61, 7], 1, 1)) == (3,)


def test_what_can_be_looked_up_in_any_text(rng: np.random.Generator) -> None:
    """Random texts over few tokens: what is proposed always follows an end of the output in the prediction."""
    for _ in range(300):
        predicted = rng.integers(0, 4, int(rng.integers(0, 30))).tolist()
        text = PredictedText(predicted)
        output = rng.integers(0, 4, int(rng.integers(0, 12))).tolist()
        match = text.lookup([9, *output], 1, 5)
        if match is None:
            assert not predicted or (output and output[-1] not in predicted[:-1])
            continue
        count = min(match.length, len(output))
        wanted = [*output[len(output) - count :], *match.tokens] if count else [*match.tokens]
        windows = [predicted[place : place + len(wanted)] for place in range(len(predicted))]
        assert wanted in windows
    assert PredictedText([]).lookup([1, 2], 1, 4) is None


def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right, nearly right, wrong and empty, greedy and sampled, several methods: the same text as plain.

    The text is digits, which the tokenizer never joins, so that a prediction has the tokens of the text.
    """
    for name, methods in (("tgt", ("ngram", "auto", None)), ("heads", ("eagle+ngram", "medusa+ngram"))):
        engine = models.engine(name)
        make_speculation_pay(engine, monkeypatch)
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            options: dict[str, Any] = {"raw": True, "regex": "[0-9]{60}", **sampling}
            plain = engine.generate(PROMPT, method="none", **options)
            half = len(plain.text) // 2
            predictions = {
                "right": plain.text + " and more",
                "edited": plain.text[:half] + " else 0 " + plain.text[half + 5 :],
                "wrong": "".join(map(chr, range(33, 127))) * 3,
                "empty": "",
            }
            for method in methods:
                rounds: dict[str, int] = {}
                for kind, prediction in predictions.items():
                    engine.reset()
                    _, result = read(engine.stream(PROMPT, method=method, prediction=prediction, **options))
                    same_output(result, plain)
                    rounds[kind] = result.speculation.rounds
                    if kind == "right" and name == "tgt":
                        assert result.speculation.acceptance_rate > 0.6
                if name == "tgt":
                    assert rounds["right"] < 0.5 * rounds["empty"]


def test_a_right_prediction_of_a_known_text(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table model writes the alphabet once; predicted, it comes in two rounds of 16, all accepted."""
    engine = models.engine("table")
    make_speculation_pay(engine, monkeypatch)
    alphabet = engine.tokenizer.decode(LOWER)
    plain = engine.generate("a", method="none", raw=True)
    assert plain.text == alphabet[1:]
    _, result = read(engine.stream("a", raw=True, method="ngram", prediction=alphabet[1:]))
    same_output(result, plain)
    assert result.speculation.acceptance_rate == 1.0
    assert result.speculation.rounds <= 4
    engine.reset()
    assert engine.generate("a", raw=True, method="ngram").speculation.accepted == 0


def test_a_draft_that_was_named_is_joined_by_ngrams(models: TinyModels) -> None:
    engine = models.engine("tgt", "mix")
    assert engine.generate("x", max_tokens=2, raw=True).method == "draft"
    assert engine.generate("x", max_tokens=2, raw=True, prediction="abc").method == "draft+ngram"
    assert engine.generate("x", max_tokens=2, raw=True, prediction="abc", method="none").method == "none"
    for method in ("draft", "lookahead"):
        with pytest.raises(UsageError, match="used by n-grams"):
            engine.stream("x", prediction="abc", method=method)
    with pytest.raises(UsageError, match="must be text"):
        engine.stream("x", prediction=5)  # type: ignore[arg-type]
