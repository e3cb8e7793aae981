"""What every result must fulfil."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specrun.runtime import Engine, Piece, Result, Stream
from specrun.runtime.calibration import Calibration
from specrun.runtime.round_costs import RoundCosts


def check_counters(result: Result) -> None:
    """accepted <= evaluated <= proposed; completion = 1 + accepted + corrections + bonuses - discarded; and so on."""
    s, count = result.speculation, result.usage.completion_tokens
    assert 0 <= s.accepted <= s.evaluated <= s.proposed
    assert s.evaluated - s.accepted in range(s.corrections + 1)
    assert s.discarded >= 0
    if count or s.rounds:
        assert count == 1 + s.accepted + s.corrections + s.bonuses - s.discarded
    histogram = s.to_json()["accepted_histogram"]
    assert sum(histogram) == s.rounds
    assert sum(index * value for index, value in enumerate(histogram)) == s.accepted
    assert count == len(result.token_ids) == len(result.tokens)
    assert [token.id for token in result.tokens] == list(result.token_ids)
    if not s.discarded:
        sources = [token.source for token in result.tokens]
        wanted = {"prefill": min(count, 1), "draft": s.accepted, "correction": s.corrections, "bonus": s.bonuses}
        assert {name: sources.count(name) for name in wanted} == wanted


def read(stream: Stream) -> tuple[list[Piece], Result]:
    """All pieces and the result, which say the same."""
    pieces = list(stream)
    result = stream.result
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.tokens] == list(result.tokens)
    check_counters(result)
    return pieces, result


def same_output(result: Result, plain: Result) -> None:
    """The same text, ids and ending as plain decoding; the counters may differ."""
    assert result.token_ids == plain.token_ids
    assert result.text == plain.text
    assert result.finish_reason == plain.finish_reason
    assert result.usage.completion_tokens == plain.usage.completion_tokens
    assert result.usage.prompt_tokens == plain.usage.prompt_tokens
    check_counters(result)
    check_counters(plain)


def close_logprobs(result: Result, plain: Result, within: float = 1e-4) -> None:
    """Log-probabilities of each token and of the likeliest ones agree."""
    assert len(result.tokens) == len(plain.tokens)
    for ours, theirs in zip(result.tokens, plain.tokens, strict=True):
        assert ours.logprob is not None
        assert theirs.logprob is not None
        assert abs(ours.logprob - theirs.logprob) <= within
        assert [token for token, _ in ours.top_logprobs] == [token for token, _ in theirs.top_logprobs]
        for (_, a), (_, b) in zip(ours.top_logprobs, theirs.top_logprobs, strict=True):
            assert abs(a - b) <= within


def text_of(count: int) -> str:
    """A raw prompt of exactly `count` tokens (digits are never joined), not a repetition of itself."""
    digits: Sequence[int] = [(index * index * 7 + index * 3 + index // 7) % 10 for index in range(count)]
    return "".join(map(str, digits))


def make_speculation_pay(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which an adaptive K varies with the acceptance: tiny targets cost as much as their drafts."""
    monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 5: 1.2, 17: 2.0}).cost))
    if engine.has_draft:
        monkeypatch.setattr(engine.drafting, "_draft_calibration", Calibration(1, {1: 0.02}))
