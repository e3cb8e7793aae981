"""The end of the context: where it is reached, and what is said when it does not suffice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import ContextLengthError, UsageError
from specrun.runtime import Engine

from .checks import read, same_output, text_of
from .conftest import TinyModels

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


@pytest.mark.parametrize("draft", ["self", "mix", "mix-48"])
def test_k_shrinks_at_the_end_of_the_context(models: TinyModels, draft: str) -> None:
    """exllamav2#274, llama.cpp#10641: context 64, 60-token prompt, limit 50, every K: ends where plain ends."""
    engine = models.engine("tgt-64", draft)
    for count in (1, 20, 47, 56, 60, 62, 63):
        prompt = text_of(count)
        plain = engine.generate(prompt, method="none", max_tokens=50, **RAW)
        assert plain.usage.completion_tokens == min(50, 64 - count)
        assert plain.finish_reason == "length"
        for method in ("draft", "ngram"):
            for draft_length in (1, 3, 5, 16, 40, 1000, None):
                _, result = read(engine.stream(prompt, method=method, draft_length=draft_length, max_tokens=50, **RAW))
                same_output(result, plain)


def test_without_a_limit_the_context_is_filled(models: TinyModels) -> None:
    engine = models.engine("tgt-64", "mix")
    prompt = text_of(56)
    plain = engine.generate(prompt, method="none", **RAW)
    assert plain.usage.completion_tokens == 8
    same_output(engine.generate(prompt, draft_length=16, **RAW), plain)


def test_a_draft_with_a_shorter_context(models: TinyModels) -> None:
    """Beyond its context the draft proposes nothing, and decoding goes on plainly."""
    engine = models.engine("tgt-64", "mix-48")
    drafted = engine.generate(text_of(30), draft_length=4, **RAW)
    assert drafted.speculation.proposed > 0
    assert drafted.usage.completion_tokens == 34
    beyond = engine.generate(text_of(50), draft_length=4, **RAW)
    assert beyond.speculation.proposed == 0
    assert beyond.usage.completion_tokens == 14
    back = engine.generate(text_of(30), draft_length=4, **RAW)
    same_output(back, drafted)
    assert back.speculation.accepted == drafted.speculation.accepted


def test_the_context_option(models: TinyModels) -> None:
    """lmstudio#499, ollama#3839: a smaller context bounds prompt and text, with a draft too; nothing is cut off."""
    prompt = text_of(60)
    limited = models.engine("tgt", "mix", context=64)
    whole = models.engine("tgt").generate(prompt, method="none", max_tokens=4, **RAW)
    for method in ("none", "draft", "ngram"):
        result = limited.generate(prompt, method=method, draft_length=8, **RAW)
        assert result.token_ids == whole.token_ids
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == 60
    assert limited.memory().kv_draft_bytes <= limited.memory().kv_target_bytes
    with pytest.raises(ContextLengthError, match=r"64 tokens .* 64"):
        limited.generate(text_of(64), **RAW)


def test_a_draft_is_not_sized_for_one_row(models: TinyModels) -> None:
    """llama.cpp#25719: the draft's catch-up run holds many tokens, its proposal asks for one row."""
    engine = models.engine("tgt", "mix")
    prompt = text_of(300)
    plain = engine.generate(prompt, method="none", max_tokens=40, **RAW)
    same_output(engine.generate(prompt, draft_length=5, max_tokens=40, **RAW), plain)


@pytest.mark.parametrize("count", [64, 65, 300])
def test_a_prompt_that_does_not_fit(models: TinyModels, count: int) -> None:
    """onnxruntime-genai#1558, ollama#3839: an error with both numbers; nothing of the prompt is dropped silently."""
    engine = models.engine("tgt-64", "mix")
    for method in ("none", "draft", "ngram"):
        with pytest.raises(ContextLengthError, match=rf"{count} tokens and the context holds 64"):
            engine.stream(text_of(count), method=method, max_tokens=3, **RAW)
    assert engine.generate(text_of(63), **RAW).usage.completion_tokens == 1


def test_the_session_refuses_what_its_tables_do_not_hold(models: TinyModels) -> None:
    engine = models.engine("tgt-64")
    positions = models.bundle("tgt-64").manifest.kv.positions
    tokens = np.full(positions + 1, 5).tolist()
    with pytest.raises(ContextLengthError, match="64"):
        engine.logits(tokens)
    assert engine.generate("abc", max_tokens=3, **RAW).usage.completion_tokens == 3


@pytest.mark.parametrize("options", [{"context": 1}, {"context": 0}, {"threads": 0}])
def test_load_options_that_cannot_be(models: TinyModels, options: dict[str, int]) -> None:
    models.bundle("tgt")
    with pytest.raises(UsageError):
        Engine.load("tgt", **options)


def test_an_empty_prompt(models: TinyModels) -> None:
    with pytest.raises(UsageError, match="empty"):
        models.engine("tgt").generate("", raw=True)
    with pytest.raises(UsageError, match="no tokens"):
        models.engine("tgt").logits([])
