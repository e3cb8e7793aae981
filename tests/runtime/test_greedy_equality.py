"""Speculation never changes a greedy text: every method, K, precision, prompt length, after growth of the cache."""

from __future__ import annotations

import pytest

from specrun.runtime import Engine, running, session

from .checks import check_counters, make_speculation_pay, read, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 8, 16, None)  # None: adaptive
DRAFTS = ("self", "mix", "rnd")
PROMPTS = (PROMPT, "a", "red blue red blue red blue", text_of(200))
OPTIONS = {"raw": True, "max_tokens": 48, "ignore_eos": True}


def test_the_target_writes_a_varied_text(models: TinyModels) -> None:
    """Else equality would say little."""
    for prompt in PROMPTS:
        result = models.engine("tgt").generate(prompt, method="none", **OPTIONS)
        assert len(set(result.token_ids)) > 16
        check_counters(result)
        assert result.speculation.proposed == 0
        assert result.speculation.mean_accepted_tokens == 1.0


@pytest.mark.parametrize("draft_length", DRAFT_LENGTHS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_draft_equals_plain(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, draft: str, draft_length: int | None
) -> None:
    """optimum#1924, TensorRT-LLM#2208: SELF, MIX and RND at every K give the one id sequence of plain decoding."""
    engine = models.engine("tgt", draft)
    make_speculation_pay(engine, monkeypatch)
    proposed = 0
    for prompt in PROMPTS:
        plain = engine.generate(prompt, method="none", **OPTIONS)
        _, result = read(engine.stream(prompt, draft_length=draft_length, **OPTIONS))
        assert result.method == "draft"
        same_output(result, plain)
        proposed += result.speculation.proposed
        if draft == "self" and draft_length is not None:
            assert result.speculation.accepted == result.speculation.evaluated
        if draft_length is not None:
            assert result.speculation.proposed <= draft_length * result.speculation.rounds
    assert proposed > 0


@pytest.mark.parametrize("draft_length", [0, *DRAFT_LENGTHS])
def test_ngram_equals_plain(models: TinyModels, monkeypatch: pytest.MonkeyPatch, draft_length: int | None) -> None:
    """vllm#41758: "red blue red blue red blue" and others with n-grams of 2 .. 5 tokens."""
    engine = models.engine("tgt")
    make_speculation_pay(engine, monkeypatch)
    proposed = 0
    for prompt in (*PROMPTS, "ab" * 60):
        plain = engine.generate(prompt, method="none", **OPTIONS)
        for _ in range(2):  # the second time the earlier text proposes
            _, result = read(engine.stream(prompt, method="ngram", draft_length=draft_length, **OPTIONS))
            same_output(result, plain)
            proposed += result.speculation.proposed
    assert (proposed > 0) == (draft_length != 0)


def test_one_token_prompt(models: TinyModels) -> None:
    """transformers#30042: one-token prompt, MIX, k 5, 64 tokens."""
    engine = models.engine("tgt", "mix")
    assert len(engine.encode("x", raw=True)) == 1
    options = {"raw": True, "max_tokens": 64, "ignore_eos": True}
    plain = engine.generate("x", method="none", **options)
    result = engine.generate("x", method="draft", draft_length=5, **options)
    same_output(result, plain)
    assert 0 < result.speculation.accepted < result.speculation.evaluated
    assert result.usage.completion_tokens == 64


def test_eighty_of_eighty(models: TinyModels) -> None:
    """EAGLE#212: 80 prompts, 80 equal texts."""
    engine = models.engine("tgt", "mix")
    equal = 0
    for index in range(80):
        prompt = f"{index * 37 % 101} {'the and ring'[index % 7 :]} {index}"
        plain = engine.generate(prompt, method="none", max_tokens=24, raw=True)
        drafted = engine.generate(prompt, method="draft", draft_length=index % 5 + 1, max_tokens=24, raw=True)
        equal += plain.token_ids == drafted.token_ids
    assert equal == 80


@pytest.mark.parametrize("precision", ["int8", "int4", "source"])
def test_quantised_graphs(models: TinyModels, precision: str) -> None:
    """8-bit, 4-bit and GGUF blocks: each graph equals its own plain decoding, with any draft and K."""
    for draft in (None, "mix", "mix-int8") if precision == "int8" else (None, "mix"):
        engine = models.engine(f"tgt-{precision}", draft)
        assert engine.calibration.exactness == "bitwise"
        for prompt in ("a", PROMPT, text_of(200)):
            plain = engine.generate(prompt, method="none", **OPTIONS)
            assert len(set(plain.token_ids)) > 16
            for draft_length in (1, 2, 3, 4, 5, 8, 16, None):
                same_output(engine.generate(prompt, draft_length=draft_length, **OPTIONS), plain)


@pytest.mark.parametrize("count", [1, 2, 3, 24, 255, 256, 257, 300])
def test_prompt_lengths_around_a_chunk(models: TinyModels, count: int) -> None:
    """The prefill runs in chunks of 256: neither the border nor the cache of a longer prompt shows in the text."""
    prompt = text_of(count)
    engine = models.engine("tgt", "mix")
    assert len(engine.encode(prompt, raw=True)) == count
    plain = engine.generate(prompt, method="none", **OPTIONS)
    assert plain.usage.cached_tokens == 0
    for method in ("draft", "ngram", "none"):
        engine.reset()
        cold = engine.generate(prompt, method=method, draft_length=4, **OPTIONS)
        assert cold.usage.cached_tokens == 0
        same_output(cold, plain)
        warm = engine.generate(prompt, method=method, draft_length=4, **OPTIONS)
        assert warm.usage.cached_tokens == count - 1
        same_output(warm, plain)


@pytest.mark.parametrize("precision", ["", "-int8", "-int4", "-source"])
def test_any_chunking_of_the_prefill(models: TinyModels, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Logits after 290 tokens are the same bits, whatever the chunks of the prefill."""
    engine = models.engine(f"tgt{precision}")
    tokens = engine.encode(text_of(290), raw=True)
    expected = engine.logits(tokens)
    for chunk in (1, 2, 3, 7, 16, 64, 255, 289, 290, 1000):
        monkeypatch.setattr(session, "PREFILL_CHUNK", chunk)
        engine.reset()
        assert (engine.logits(tokens) == expected).all(), chunk


@pytest.mark.parametrize("method", ["none", "draft", "ngram"])
def test_growth_of_the_cache_in_the_middle(models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The buffers move while a text is written, twice: the text does not notice."""
    prompt = text_of(30)
    options = {"raw": True, "max_tokens": 470, "ignore_eos": True}
    expected = models.engine("tgt", "mix").generate(prompt, method="none", **options)
    monkeypatch.setattr(running, "RESERVED_TOKENS", 1)
    with Engine.load("tgt", draft="mix", threads=1) as engine:
        started = engine.stream(prompt, method=method, draft_length=5, **options)
        next(started)
        before = engine.memory()
        for _ in started:
            continue
        after = engine.memory()
    assert after.kv_target_bytes > before.kv_target_bytes
    assert (after.kv_draft_bytes > before.kv_draft_bytes) == (method == "draft")
    same_output(started.result, expected)
    assert started.result.usage.completion_tokens == 470
