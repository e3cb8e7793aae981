"""Target and draft vocabularies: padded sizes go together, other tokenizers are refused."""

from __future__ import annotations

from typing import Any

import pytest

from specrun.models_cache.errors import SpecrunError, VocabularyMismatchError
from specrun.runtime import Engine
from specrun.runtime.check import check_pair

from .checks import same_output
from .conftest import TinyModels

REAL = 120
PROMPT = "!#$ 0123"  # the reduced tokenizer knows some of ASCII only


@pytest.mark.parametrize("pair", [("real128", "real160"), ("real160", "real128"), ("real160", "mix128")])
@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "seed": 4}, {"temperature": 0.8, "sampling": "rejection"}]
)
def test_padded_vocabularies(models: TinyModels, pair: tuple[str, str], options: dict[str, Any]) -> None:
    """vllm#7252, TensorRT-LLM#2789: sizes 128 and 160, 120 real tokens, both orders: no id >= 120 comes out."""
    engine = models.engine(*pair)
    for manifest in (models.bundle(name).manifest for name in pair):
        assert manifest.sizes.tokens == REAL
        assert manifest.sizes.vocabulary in (128, 160)
    request = {"raw": True, "max_tokens": 100, "ignore_eos": True, **options}
    results = []
    for method in ("none", "draft", "ngram"):
        for draft_length in (1, 4, 8) if method != "none" else (None,):
            results.append(engine.generate(PROMPT, method=method, draft_length=draft_length, logprobs=3, **request))
            assert len(results[-1].token_ids) == 100
            assert max(results[-1].token_ids) < REAL
            assert all(token < REAL for t in results[-1].tokens for token, _ in t.top_logprobs)
    if options.get("sampling") != "rejection":
        for result in results:
            same_output(result, results[0])
    drafted = [result for result in results if result.method == "draft"]
    assert all(result.speculation.accepted > 0 for result in drafted)
    if pair[1] != "mix128" and options.get("sampling") != "rejection":  # the same weights, apart from the padding
        assert all(result.speculation.acceptance_rate == 1.0 for result in drafted)


def test_padding_would_win_if_it_were_looked_at(models: TinyModels) -> None:
    """The padding rows of these models are large: the test above could fail."""
    engine = models.engine("real160")
    result = engine.generate(PROMPT, raw=True, method="none", max_tokens=100, ignore_eos=True)
    tokens = engine.encode(PROMPT, raw=True)
    above = sum(int(engine.logits([*tokens, *result.token_ids[:at]]).argmax()) >= REAL for at in range(100))
    assert above > 20


def test_two_tokens_swapped(models: TinyModels) -> None:
    """llama.cpp#3812: the same size, two tokens swapped: an error naming the first that differs."""
    models.bundle("tgt"), models.bundle("swapped")
    with pytest.raises(VocabularyMismatchError, match=r"id 40 "):
        Engine.load("tgt", draft="swapped")
    check = check_pair("tgt", "swapped")
    assert not check.fits
    assert "id 40 " in check.reasons[0]


def test_another_tokenizer(models: TinyModels) -> None:
    """transformers#46936: different tokenizers are refused; the target alone still loads."""
    models.bundle("tgt"), models.bundle("other"), models.bundle("real128")
    for name in ("other", "real128"):
        with pytest.raises(VocabularyMismatchError, match="same model family"):
            Engine.load("tgt", draft=name)
        assert not check_pair("tgt", name).fits
    assert models.engine("tgt").generate("a", raw=True, max_tokens=3).usage.completion_tokens == 3


def test_a_draft_that_does_not_load(models: TinyModels) -> None:
    """mlx-engine#280: a draft that is missing or broken is an error, never silence."""
    models.bundle("tgt")
    with pytest.raises(SpecrunError, match="nowhere"):
        Engine.load("tgt", draft="nowhere")


def test_check_pair_on_a_pair_that_fits(models: TinyModels) -> None:
    models.bundle("tgt"), models.bundle("mix")
    check = check_pair("tgt", "mix")
    assert check.fits
    assert "100%" in " ".join(check.reasons)  # as heavy as the target
    assert check.facts["vocabulary"] == [288, 288]
    models.bundle("tgt-64"), models.bundle("mix-48")
    assert any("48 positions" in reason and "64" in reason for reason in check_pair("tgt-64", "mix-48").reasons)
    models.bundle("table"), models.bundle("table-eos")
    assert any("end-of-text" in reason for reason in check_pair("table", "table-eos").reasons)
    for pair in (("tgt-64", "mix-48"), ("table", "table-eos"), ("real128", "real160")):
        assert check_pair(*pair).fits
