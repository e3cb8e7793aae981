"""EAGLE#212 with learned heads: of 80 prompts, 80 texts equal plain decoding's."""

from __future__ import annotations

from typing import Any

import pytest

from .checks import same_output, text_of
from .conftest import TinyModels


@pytest.mark.parametrize("name", ["heads", "heads-int8"])
def test_eighty_of_eighty(models: TinyModels, name: str) -> None:
    """By EAGLE and Medusa, alone and with n-grams, each in turn, at several K."""
    engine = models.engine(name)
    methods = ("eagle", "medusa", "eagle+ngram", "medusa+ngram")
    options: dict[str, Any] = {"raw": True, "ignore_eos": True}
    drafted = 0
    for index in range(80):
        prompt = f"{index} {text_of(1 + index * 7 % 50)} {index * index}"
        limit = 8 + index % 25
        plain = engine.generate(prompt, method="none", max_tokens=limit, **options)
        result = engine.generate(
            prompt, method=methods[index % 4], draft_length=1 + index % 7, max_tokens=limit, **options
        )
        same_output(result, plain)
        drafted += result.speculation.evaluated
    assert drafted > 800
