"""N-gram proposals through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specrun.models_cache.errors import IntegrityError
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.ngram import NgramProposer

from .checks import make_speculation_pay, read, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT, token_id
from .toys import TURN_END_ID

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


def test_a_repeating_prompt_runs_to_the_limit(models: TinyModels) -> None:
    """transformers#46790: ids a b c d e f g c d with no EOS: proposals are made, the text runs to the limit."""
    engine = models.engine("tgt")
    for prompt in ("abcdefgcd", "<=>^<=>^<="):
        for method in ("none", "ngram"):
            result = engine.generate(prompt, method=method, draft_length=5, max_tokens=30, **RAW)
            assert (result.usage.completion_tokens, result.finish_reason) == (30, "length")


@pytest.mark.parametrize("prompt", ["a", "Ma", "SMa"])
def test_short_prompts_begin_with_a_plain_step(models: TinyModels, prompt: str) -> None:
    """vllm#7047: prompts of 1, 2, 3 different tokens: nothing matches, the first rounds are plain steps."""
    engine = models.engine("table")
    assert len(engine.encode(prompt, raw=True)) == len(prompt)
    plain = engine.generate(prompt, method="none", max_tokens=3, **RAW)
    _, result = read(engine.stream(prompt, method="ngram", draft_length=4, max_tokens=3, **RAW))
    same_output(result, plain)
    assert len({*engine.encode(prompt, raw=True), *plain.token_ids}) == len(prompt) + 3
    assert result.speculation.proposed == 0


def test_eos_is_never_copied(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers#31301: the prompt holds EOS after a match: it is not proposed, the text goes on."""
    engine = models.engine("tgt")
    proposals: list[Proposal] = []
    propose = NgramProposer.propose

    def watched(self: NgramProposer, committed: Sequence[int], limit: int) -> Proposal:
        proposals.append(propose(self, committed, limit))
        return proposals[-1]

    monkeypatch.setattr(NgramProposer, "propose", watched)
    messages = [{"role": "user" if index % 2 == 0 else "assistant", "content": "same"} for index in range(9)]
    assert TURN_END_ID in engine.encode(messages)
    plain = engine.generate(messages, method="none", max_tokens=60)
    same_output(engine.generate(messages, method="ngram", draft_length=8, max_tokens=60), plain)
    assert any(len(proposal) for proposal in proposals)
    assert not any({0, TURN_END_ID} & set(proposal.tokens) for proposal in proposals)


def test_a_repeat_after_many_rounds_without(models: TinyModels) -> None:
    """buun-llama-cpp#74: 30 rounds without a match, then a repetition: nothing is doubled."""
    engine = models.engine("table")
    plain = engine.generate("S", method="none", max_tokens=60, raw=True)
    for draft_length in (1, 4, 8):
        engine.reset()
        _, result = read(engine.stream("S", method="ngram", draft_length=draft_length, max_tokens=60, raw=True))
        same_output(result, plain)
        assert result.speculation.to_json()["accepted_histogram"][0] >= 15
        assert result.speculation.accepted > 10


def test_a_period_gives_several_tokens_a_round(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python#2110: what is repeated comes several tokens a round, with a fixed and with an adaptive K."""
    engine = models.engine("table")
    make_speculation_pay(engine, monkeypatch)
    plain = engine.generate("<", method="none", max_tokens=200, raw=True)
    assert plain.text == ("=>^<" * 50)
    for draft_length, at_least in ((4, 4.5), (None, 5.0)):
        engine.reset()
        result = engine.generate("<", method="ngram", draft_length=draft_length, max_tokens=200, raw=True)
        same_output(result, plain)
        assert result.speculation.mean_accepted_tokens > at_least


def test_speculation_stops_where_it_does_not_pay(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp#25908: nothing is accepted: an adaptive K goes plain, and says so in the counters."""
    from specrun.runtime.calibration import Calibration
    from specrun.runtime.round_costs import RoundCosts

    engine = models.engine("tgt", "rnd")
    monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 17: 9.0}).cost))
    monkeypatch.setattr(engine.drafting, "_draft_calibration", Calibration(1, {1: 0.2}))
    fixed = engine.generate(PROMPT, method="draft", draft_length=4, max_tokens=200, **RAW)
    adaptive = engine.generate(PROMPT, method="draft", max_tokens=200, **RAW)
    assert adaptive.token_ids == fixed.token_ids
    assert fixed.speculation.acceptance_rate < 0.2
    assert adaptive.speculation.proposed < 60 < fixed.speculation.proposed


def test_earlier_texts_propose_and_are_forgotten(models: TinyModels, tmp_path) -> None:
    engine = models.engine("tgt")
    plain = engine.generate(PROMPT, method="none", max_tokens=60, **RAW)
    cold = engine.generate(PROMPT, method="ngram", draft_length=4, max_tokens=60, **RAW)
    warm = engine.generate(PROMPT, method="ngram", draft_length=4, max_tokens=60, **RAW)
    assert warm.speculation.accepted > cold.speculation.accepted + 30
    engine.save_ngrams(tmp_path / "texts.npz")
    engine.reset()
    again = engine.generate(PROMPT, method="ngram", draft_length=4, max_tokens=60, **RAW)
    assert again.speculation.accepted == cold.speculation.accepted
    engine.reset()
    engine.load_ngrams(tmp_path / "texts.npz")
    loaded = engine.generate(PROMPT, method="ngram", draft_length=4, max_tokens=60, **RAW)
    assert loaded.speculation.accepted > cold.speculation.accepted + 30
    for result in (cold, warm, again, loaded):
        same_output(result, plain)
    (tmp_path / "texts.npz").write_bytes(b"no table")
    with pytest.raises(IntegrityError):
        engine.load_ngrams(tmp_path / "texts.npz")


def test_ids_of_the_table_are_tokens(models: TinyModels) -> None:
    """A table that proposes ids the graph does not know would fail at the run: they are refused when it is loaded."""
    table = NgramTable()
    table.add_text([token_id("a"), 5000])
    engine = models.engine("tgt")
    path = models.home / "foreign.npz"
    table.save(path)
    with pytest.raises(IntegrityError, match="5000"):
        engine.load_ngrams(path)
    assert engine.generate(text_of(9), max_tokens=3, **RAW).usage.completion_tokens == 3
