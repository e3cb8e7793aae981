"""Rows of a batch that draft by every method that a bundle has: each text is the one that the request has alone."""

from __future__ import annotations

from typing import Any

import pytest

from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime.batching.batch_costs import BatchCosts

from .checks import check_counters, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
METHODS = ("medusa", "eagle", "draft", "medusa+ngram", "eagle+ngram", "draft+ngram", "auto")
MIXED: list[tuple[str, dict[str, Any]]] = [
    (PROMPT, {"max_tokens": 25}),
    ("a", {"max_tokens": 5}),
    ("red blue red blue red blue", {"max_tokens": 40}),
    (text_of(300), {"max_tokens": 17}),
    (text_of(40), {"max_tokens": 1}),
    (PROMPT + " and so on", {"max_tokens": 14}),
    ("zebra", {"max_tokens": 30, "stop": ["e", "7"]}),
    (PROMPT, {"max_tokens": 18}),
    ("no tokens", {"max_tokens": 0}),
]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "seed": 3},
    "penalties": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7},
}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which wide rounds and asking heads pay; those measured on a tiny model are mostly noise."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)


def answers(
    engine: Engine, size: int, requests: list[tuple[str, dict[str, Any]]], **options: Any
) -> tuple[BatchEngine, list[Result]]:
    batch = BatchEngine(engine, batch_size=size)
    found: dict[int, Result] = {}
    for answer in batch.run(BatchRequest(index, prompt, options | own) for index, (prompt, own) in enumerate(requests)):
        assert isinstance(answer.result, Result), answer.result
        check_counters(answer.result)
        found[answer.index] = answer.result
    return batch, [found[index] for index in range(len(requests))]


def alone(engine: Engine, requests: list[tuple[str, dict[str, Any]]], **options: Any) -> list[Result]:
    results = []
    for prompt, own in requests:
        engine.reset()
        results.append(engine.generate(prompt, **(options | own | {"method": "none", "draft_length": None})))
    return results


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("name", ["heads", "heads-int8"])
def test_rows_equal_solo_runs(models: TinyModels, wide: None, name: str, size: int, sampling: str) -> None:
    engine = models.engine(name)
    options = RAW | SAMPLINGS[sampling]
    plain = alone(engine, MIXED, **options)
    for method in METHODS:
        for draft_length in (None, 3):
            batch, results = answers(engine, size, MIXED, method=method, draft_length=draft_length, **options)
            for ours, theirs in zip(results, plain, strict=True):
                same_output(ours, theirs)
            stats = batch.stats
            assert stats.proposed > 0
            assert stats.draft_s > 0
            assert stats.accepted == sum(result.speculation.accepted for result in results)
            assert max(rows for rows, _ in stats.widths) >= 2
