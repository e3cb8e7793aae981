"""Rows of a batch: each text is the one that the request has alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.session import ModelSession

from .checks import check_counters, close_logprobs, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT, token_id
from .toys import EARTH, STOPPED, TURN_END_ID

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}

# Prompts of 1 to 330 tokens, answers of 1 to 60: rows join and leave at different rounds.
MIXED: list[tuple[str, dict[str, Any]]] = [
    (PROMPT, {"max_tokens": 33}),
    ("a", {"max_tokens": 5}),
    (text_of(40), {"max_tokens": 1}),
    ("red blue red blue red blue", {"max_tokens": 60}),
    (text_of(330), {"max_tokens": 21}),
    (text_of(17) + PROMPT, {"max_tokens": 2}),
    ("the same, the same, the same, the", {"max_tokens": 44}),
    ("zebra", {"max_tokens": 12}),
    (PROMPT, {"max_tokens": 18}),
    (text_of(129), {"max_tokens": 9}),
    ("no tokens", {"max_tokens": 0}),
]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "seed": 3},
    "filters": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 5},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 7},
}


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which wide rounds pay; those measured on a tiny model are mostly noise."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)


def answers(batch: BatchEngine, requests: Sequence[tuple[str, dict[str, Any]]], **options: Any) -> list[Result]:
    """The results of requests, in their order."""
    found: dict[int, Result] = {}
    given = (BatchRequest(index, prompt, options | own) for index, (prompt, own) in enumerate(requests))
    for answer in batch.run(given):
        assert isinstance(answer.result, Result), answer.result
        assert answer.index not in found
        check_counters(answer.result)
        found[answer.index] = answer.result
    return [found[index] for index in range(len(requests))]


def alone(engine: Engine, requests: Sequence[tuple[str, dict[str, Any]]], **options: Any) -> list[Result]:
    """The results of the same requests by plain decoding, each alone."""
    results = []
    for prompt, own in requests:
        engine.reset()
        results.append(engine.generate(prompt, **(options | own | {"method": "none", "draft_length": None})))
    return results


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("size", [2, 4, 7])
@pytest.mark.parametrize("name", ["tgt", "tgt-int8"])
def test_rows_equal_solo_runs(models: TinyModels, wide: None, name: str, size: int, sampling: str) -> None:
    """text-generation-inference#1411, 1Cat-vLLM#656: mixed prompts in a batch, greedy and sampled, every method."""
    engine = models.engine(name)
    options = RAW | SAMPLINGS[sampling]
    plain = alone(engine, MIXED, **options)
    accepted = 0
    for method, draft_length in (("none", None), ("ngram", None), ("auto", None), ("ngram", 3)):
        batch = BatchEngine(engine, batch_size=size)
        results = answers(batch, MIXED, method=method, draft_length=draft_length, **options)
        for ours, theirs in zip(results, plain, strict=True):
            same_output(ours, theirs)
        stats = batch.stats
        assert stats.done == len(MIXED)
        assert stats.failed == 0
        assert stats.completion_tokens == sum(result.usage.completion_tokens for result in plain)
        assert stats.accepted == sum(result.speculation.accepted for result in results)
        assert stats.row_rounds == sum(result.speculation.rounds for result in results)
        assert 2 <= max(rows for rows, _ in stats.widths) <= size
        assert (stats.proposed > 0) == (method != "none")
        assert stats.rounds < stats.row_rounds
        accepted += stats.accepted
    assert accepted or "temperature" in options


def test_all_rows_come_into_use(models: TinyModels) -> None:
    """Where answers are longer than the batch has rows, every row runs, and none stays over."""
    engine = models.engine("tgt")
    requests = [(f"{index}", {"max_tokens": 20}) for index in range(16)]
    batch = BatchEngine(engine, batch_size=6)
    answers(batch, requests, **RAW)
    rounds = {rows: sum(n for (r, _), n in batch.stats.widths.items() if r == rows) for rows in range(1, 7)}
    assert rounds[6] == max(rounds.values())
    assert batch.stats.row_rounds / batch.stats.rounds > 4


def test_every_batch_size(models: TinyModels, wide: None) -> None:
    """1, 4, 16 mixed prompts at once, and a batch with more rows than requests."""
    engine = models.engine("tgt-int8")
    plain = alone(engine, MIXED, **RAW)
    for size in (1, 3, 11, 16):
        for ours, theirs in zip(
            answers(BatchEngine(engine, batch_size=size), MIXED, method="ngram", **RAW), plain, strict=True
        ):
            same_output(ours, theirs)


def test_rows_have_their_own_method_length_and_sampling(models: TinyModels, wide: None) -> None:
    """Plain rows, sampled ones, and ones with a fixed K share the rounds."""
    engine = models.engine("tgt")
    kinds: list[dict[str, Any]] = [
        {"method": "none"},
        {"method": "ngram", "draft_length": 5},
        {"temperature": 0.9, "seed": 11},
        {"method": "auto", "sample_index": 3, "temperature": 0.9, "seed": 11},
        {"method": "ngram", "draft_length": 0},
        {"min_tokens": 6},
    ]
    requests = [(prompt, own | kinds[index % len(kinds)]) for index, (prompt, own) in enumerate(MIXED[:-1] * 2)]
    requests = [(prompt, own | {"max_tokens": max(8, own["max_tokens"])}) for prompt, own in requests]
    results = answers(BatchEngine(engine, batch_size=5), requests, raw=True)
    for ours, theirs, (_, own) in zip(results, alone(engine, requests, raw=True), requests, strict=True):
        same_output(ours, theirs)
        if own.get("draft_length") == 5 and ours.speculation.rounds:
            assert ours.speculation.proposed
        if own.get("method") == "none" or own.get("draft_length") == 0:
            assert not ours.speculation.proposed


def test_log_probabilities(models: TinyModels, wide: None) -> None:
    engine = models.engine("tgt")
    results = answers(BatchEngine(engine, batch_size=3), MIXED, method="ngram", logprobs=3, **RAW)
    for ours, theirs in zip(results, alone(engine, MIXED, logprobs=3, **RAW), strict=True):
        same_output(ours, theirs)
        close_logprobs(ours, theirs, within=0.0)


def test_ends(models: TinyModels, wide: None) -> None:
    """Stop strings over several tokens, end-of-text ids, characters of several bytes, row by row."""
    engine = models.engine("table")
    assert STOPPED[3:6] == [token_id(letter) for letter in "END"]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("A", {"stop": "END", "max_tokens": 30}),
        ("A", {"stop": ["FG", "c"], "max_tokens": 30}),
        ("A", {"stop": "END", "min_tokens": 8, "max_tokens": 30}),
        ("abc", {"max_tokens": 40}),
        ("abc", {"max_tokens": 40, "ignore_eos": True, "stop": "56"}),
        ("[", {"max_tokens": 20, "stop": "{"}),
        ("[", {"max_tokens": 3}),
        ("<=>^<=>^", {"max_tokens": 25, "stop": "<=>^" * 3}),
    ]
    results = answers(BatchEngine(engine, batch_size=4), requests * 2, method="ngram", raw=True)
    for ours, theirs in zip(results, alone(engine, requests * 2, raw=True), strict=True):
        same_output(ours, theirs)
    assert results[0].finish_reason == "stop"
    assert results[0].text.endswith(" ")
    assert results[3].token_ids[-1] == TURN_END_ID
    assert EARTH in results[5].text
    assert results[6].finish_reason == "length"


def test_chat_prompts_and_system_messages(models: TinyModels) -> None:
    engine = models.engine("tgt")
    prompts: list[Any] = ["Hi", [{"role": "user", "content": "Hi"}], "Name a colour."]
    options: list[dict[str, Any]] = [{"max_tokens": 9, "system": system} for system in (None, "Be brief.", "Rhyme.")]
    requests = [(prompt, own) for prompt in prompts for own in options]
    results = answers(BatchEngine(engine, batch_size=4), requests)
    for ours, theirs in zip(results, alone(engine, requests), strict=True):
        same_output(ours, theirs)


@pytest.mark.parametrize("size", [2, 8])
def test_shared_prefixes_are_prefilled_once(models: TinyModels, wide: None, size: int) -> None:
    """text-generation-inference#2711: 8 prompts with 200 shared tokens: equal with the reuse off, and read once."""
    engine = models.engine("tgt-int8")
    requests = [(text_of(200) + f" {index}: go", {"max_tokens": 6 + 5 * (index % 3)}) for index in range(8)]
    plain = alone(engine, requests, **RAW)
    assert not any(result.usage.cached_tokens for result in plain)
    batch = BatchEngine(engine, batch_size=size)
    results = answers(batch, requests, method="ngram", **RAW)
    for ours, theirs in zip(results, plain, strict=True):
        same_output(ours, theirs)
    assert results[0].usage.cached_tokens == 0
    assert all(result.usage.cached_tokens >= 200 for result in results[1:])
    stats = batch.stats
    assert stats.prefill_tokens + stats.cached_tokens == stats.prompt_tokens
    assert stats.prefill_tokens < 200 + 8 * 10


def test_interleaved_prompts(models: TinyModels, wide: None) -> None:
    """sglang#8726: A, B, A, C, A: the As are identical, the second is read from the row of the first."""
    engine = models.engine("tgt-int8")
    a, b, c = PROMPT + text_of(30), text_of(60), "other" + text_of(45)
    for sampling in ({}, {"temperature": 0.9, "seed": 8}):
        requests = [(prompt, {"max_tokens": 20}) for prompt in (a, b, a, c, a)]
        for size in (2, 5):
            results = answers(BatchEngine(engine, batch_size=size), requests, **RAW, **sampling)
            assert len({results[index].token_ids for index in (0, 2, 4)}) == 1
            assert results[2].usage.cached_tokens == results[2].usage.prompt_tokens - 1
            for ours, theirs in zip(results, alone(engine, requests, **RAW, **sampling), strict=True):
                same_output(ours, theirs)


def test_rows_at_the_end_of_the_context(models: TinyModels, wide: None) -> None:
    """Short rows propose 16 tokens while a long one has a single position left."""
    engine = models.engine("tgt-64")
    requests: list[tuple[str, dict[str, Any]]] = [
        (text_of(count), {"draft_length": k}) for count in (60, 63, 3, 40, 20, 62, 5) for k in (None, 16)
    ]
    for size in (3, 7):
        batch = BatchEngine(engine, batch_size=size)
        results = answers(batch, requests, method="ngram", **RAW)
        for ours, theirs in zip(results, alone(engine, requests, **RAW), strict=True):
            same_output(ours, theirs)
            assert ours.usage.prompt_tokens + ours.usage.completion_tokens == 64
        assert max(width for _, width in batch.stats.widths) > 8


def test_rows_in_use_stay_together(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is over more rows than decode, or wait for their prompt to be read."""
    engine = models.engine("tgt")
    runs: list[tuple[int, int]] = []
    run = ModelSession.run_batch

    def watched(self: ModelSession, tokens: Sequence[Sequence[int]], **options: Any) -> Any:
        runs.append((len(tokens), sum(bool(len(own)) for own in tokens)))
        return run(self, tokens, **options)

    monkeypatch.setattr(ModelSession, "run_batch", watched)
    requests = [(f"{index}", {"max_tokens": 40 if index == 5 else 4 + index}) for index in range(6)]
    plain = alone(engine, requests, **RAW)
    runs.clear()
    for ours, theirs in zip(answers(BatchEngine(engine, batch_size=6), requests, **RAW), plain, strict=True):
        same_output(ours, theirs)
    assert all(rows == active for rows, active in runs)
    assert runs[-20:] == [(1, 1)] * 20


def test_long_prompts_are_read_between_rounds(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt of two chunks is read, the rows beside it go on, a round after each chunk."""
    engine = models.engine("tgt")
    runs: list[str] = []
    run = ModelSession.run_batch

    def watched(self: ModelSession, tokens: Sequence[Sequence[int]], **options: Any) -> Any:
        runs.append("chunk" if max(map(len, tokens)) > 20 else "round" if len(tokens) > 1 else "short")
        return run(self, tokens, **options)

    requests: list[tuple[str, dict[str, Any]]] = [
        ("a", {"max_tokens": 30}),
        ("b", {"max_tokens": 4}),
        (text_of(400), {"max_tokens": 6}),
    ]
    plain = alone(engine, requests, **RAW)
    monkeypatch.setattr(ModelSession, "run_batch", watched)
    results = answers(BatchEngine(engine, batch_size=2), requests, method="none", **RAW)
    for ours, theirs in zip(results, plain, strict=True):
        same_output(ours, theirs)
    first = runs.index("chunk")
    assert runs[first + 1] in ("round", "short")
    assert runs[first + 2] == "chunk"
    assert runs.count("chunk") == 2


def test_growth_of_the_buffers(models: TinyModels, wide: None) -> None:
    """A long request joins while others run: the buffers move, no bit changes."""
    engine = models.engine("tgt-int8")
    requests = [(PROMPT, {"max_tokens": 30}), ("b", {"max_tokens": 9}), (text_of(300), {"max_tokens": 60})]
    results = answers(BatchEngine(engine, batch_size=2), requests, method="ngram", **RAW)
    for ours, theirs in zip(results, alone(engine, requests, **RAW), strict=True):
        same_output(ours, theirs)


def test_requests_are_read_as_rows_get_free(models: TinyModels) -> None:
    engine = models.engine("tgt")
    read, done = 0, 0

    def requests() -> Iterator[BatchRequest]:
        nonlocal read
        for index in range(40):
            read += 1
            yield BatchRequest(index, f"{index}", {"max_tokens": 3 + index % 5, **RAW})

    for _ in BatchEngine(engine, batch_size=3).run(requests()):
        done += 1
        assert read <= done + 6
    assert done == 40


def test_earlier_texts_help_later_rows(models: TinyModels, wide: None) -> None:
    """What one row wrote is proposed to a later one, and to requests of the engine after the batch."""
    engine = models.engine("tgt")
    requests = [(PROMPT, {"max_tokens": 40})] * 2
    first, second = (
        answers(BatchEngine(engine, batch_size=2), [requests[0]], method="ngram", **RAW),
        answers(BatchEngine(engine, batch_size=2), [requests[1]], method="ngram", **RAW),
    )
    same_output(first[0], second[0])
    assert second[0].speculation.rounds < first[0].speculation.rounds
    assert engine.generate(PROMPT, method="ngram", draft_length=8, max_tokens=40, **RAW).speculation.rounds <= 6


def test_rows_with_a_grammar_or_a_prediction(models: TinyModels, wide: None) -> None:
    """Each row follows its own grammar, and copies from its own prediction."""
    engine = models.engine("tgt")
    (likely,) = alone(engine, [(PROMPT, {"max_tokens": 40})], **RAW)
    requests: list[tuple[str, dict[str, Any]]] = [
        (PROMPT, {"regex": r"(the|and|ring) ([a-f]{2,5} ){3,9}end\.", "max_tokens": 60}),
        (PROMPT, {"max_tokens": 40, "prediction": likely.text, "ignore_eos": True}),
        ("a", {"json_schema": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}, "max_tokens": 60}),
        ("zebra", {"max_tokens": 20}),
    ]
    results = answers(BatchEngine(engine, batch_size=3), requests, raw=True)
    for ours, theirs in zip(results, alone(engine, requests, raw=True), strict=True):
        same_output(ours, theirs)
    assert results[1].speculation.accepted > 10
    assert results[0].text.endswith("end.")
