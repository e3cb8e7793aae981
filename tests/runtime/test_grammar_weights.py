"""Constrained text on real weights: JSON that fits its schema, the same with every method."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specrun.export.shipped_speculators import ensure_shipped
from specrun.models_cache.layout import find_bundle
from specrun.runtime import Engine

from .checks import read, same_output

pytestmark = pytest.mark.weights

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "city": {"type": ["string", "null"], "maxLength": 20},
    },
    "required": ["name", "age", "colours", "city"],
    "additionalProperties": False,
}
PROMPT = "Describe a person named Ada as JSON, with her name, age, favourite colours and city."


def test_json_is_the_same_with_every_method(smollm2: str) -> None:
    ensure_shipped(find_bundle(smollm2))
    with Engine.load(smollm2) as engine:
        for sampling in ({}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 4, "top_p": 0.9}):
            options: dict[str, Any] = {"json_schema": SCHEMA, "max_tokens": 200, **sampling}
            engine.reset()
            _, plain = read(engine.stream(PROMPT, method="none", **options))
            assert plain.finish_reason == "stop"
            found = json.loads(plain.text)
            assert list(found) == ["name", "age", "colours", "city"]
            assert isinstance(found["name"], str)
            assert 0 <= found["age"] <= 120
            assert 2 <= len(found["colours"]) <= 4
            assert {*found["colours"]} <= {"red", "green", "blue"}
            accepted = 0
            for method in ("ngram", "eagle+ngram", "eagle", "medusa+ngram", "draft", "lookahead"):
                _, result = read(engine.stream(PROMPT, method=method, **options))
                same_output(result, plain)
                accepted += result.speculation.accepted
            assert accepted > 10
