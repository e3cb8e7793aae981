"""A batch on real weights: SmolLM2-135M in 8 bits."""

from __future__ import annotations

import pytest

from specrun.export.shipped_speculators import ensure_shipped
from specrun.models_cache.layout import find_bundle
from specrun.runtime import BatchEngine, BatchRequest, Engine, Result

from .checks import same_output, text_of

PROMPTS = (
    "List the days of the week, then list them again in the same order.",
    "Write a Python function that adds two numbers.",
    "日本語で「こんにちは」と書いて、絵文字 🌍 をつけてください。",
    "Repeat exactly: one two three four five six seven one two three four five six seven",
    "What is a tide?",
    "Continue: " + text_of(300),
    "Name three colours.",
    "Copy this list: apple, pear, plum, apple, pear, plum, apple.",
)

HEADS = ("medusa", "eagle", "draft", "medusa+ngram", "eagle+ngram", "draft+ngram")
METHODS = (("none", None), ("auto", None), *((method, k) for method in HEADS for k in (3, None)))


@pytest.mark.weights
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.3, "seed": 5}], ids=["greedy", "sampled"])
def test_rows_equal_solo_runs(smollm2: str, sampling: dict[str, float]) -> None:
    """8 prompts, batch 4, answers of 24 to 56 tokens, every method of the shipped speculators."""
    ensure_shipped(find_bundle(smollm2))
    with Engine.load(smollm2) as engine:
        options = [{"max_tokens": 24 + 8 * (index % 5), **sampling} for index in range(len(PROMPTS))]
        plain = [
            engine.generate(prompt, method="none", **own)  # type: ignore[arg-type]
            for prompt, own in zip(PROMPTS, options, strict=True)
        ]
        for method, draft_length in METHODS:
            batch = BatchEngine(engine, batch_size=4)
            requests = [
                BatchRequest(index, prompt, {"method": method, "draft_length": draft_length, **own})
                for index, (prompt, own) in enumerate(zip(PROMPTS, options, strict=True))
            ]
            found = {answer.index: answer.result for answer in batch.run(requests)}
            for index, theirs in enumerate(plain):
                ours = found[index]
                assert isinstance(ours, Result)
                same_output(ours, theirs)
            assert max(rows for rows, _ in batch.stats.widths) >= 3
            if draft_length is not None:
                assert batch.stats.accepted > 40
