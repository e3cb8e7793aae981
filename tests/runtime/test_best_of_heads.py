"""Best-of-N whose rows draft with a bundle's speculators: their texts are plain ones, and heads see the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.row_drafts import RowDrafts
from specrun.runtime.proposers.eagle import WINDOW

from .checks import text_of
from .conftest import TinyModels
from .test_best_of import LONG, PROMPT, RAW, texts

METHODS = ("medusa", "eagle", "draft", "medusa+ngram", "eagle+ngram", "draft+ngram", "auto")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which wide rounds and asking heads pay; those measured on a tiny model are mostly noise."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.8}, {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.3}]
)
@pytest.mark.parametrize("name", ["heads", "heads-int8"])
def test_samples_equal_plain_ones(models: TinyModels, wide: None, name: str, options: dict[str, Any]) -> None:
    engine = models.engine(name)
    for prompt in (PROMPT, LONG, text_of(300)):
        plain = engine.best_of(prompt, n=5, method="none", **RAW, **options)
        for method in METHODS:
            for draft_length in (None, 3):
                found = engine.best_of(prompt, n=5, method=method, draft_length=draft_length, **RAW, **options)
                assert texts(found) == texts(plain), (method, draft_length)
                assert found.speculation.proposed > 0, (method, draft_length)
                assert found.memory.kv_rows_bytes > 0


def test_heads_get_the_features_of_the_prompt(models: TinyModels, wide: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its last tokens, as a prompt read in the row itself would have given, whatever was cached before."""
    engine = models.engine("heads")
    taken: list[tuple[int, Any]] = []
    proposer = RowDrafts.proposer

    def watched(self: RowDrafts, *arguments: Any) -> Any:
        made = proposer(self, *arguments)
        if made is None:
            return made
        take = made.take_features

        def taking(position: int, features: Any) -> None:
            taken.append((position, features.copy()))
            take(position, features)

        made.take_features = taking  # type: ignore[method-assign]
        return made

    monkeypatch.setattr(RowDrafts, "proposer", watched)
    prompt = text_of(300)
    tokens = engine.encode(prompt, raw=True)
    for _ in range(2):  # the second time the prompt is in the cache
        taken.clear()
        engine.best_of(prompt, n=2, method="eagle", temperature=0.8, **RAW)
        firsts = [entry for entry in taken if entry[0] < len(tokens) - 1]
        assert len(firsts) == 2
        for position, features in firsts:
            assert position == len(tokens) - 1 - WINDOW
            assert len(features) == WINDOW + 1
            assert np.any(features[0] != features[-1])
        engine.best_of(prompt, n=1, method="none", temperature=0.8, **RAW)
