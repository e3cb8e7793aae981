"""Faults that others had with one request, held against the rows of a batch: each row is what plain decoding gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime import batch as batch_module

from .checks import check_counters, close_logprobs, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .toys import LOWER, TURN_END_ID

Asked = tuple[str, dict[str, Any]]
RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds as wide as the longest proposal, so that rows are cut, corrected and stopped inside their blocks."""
    monkeypatch.setattr(batch_module.BatchCosts, "round", lambda self, rows, width: 1.0 + 1e-6 * width)


def rows(engine: Engine, requests: Sequence[Asked], *, size: int = 4, **options: Any) -> list[Result]:
    """Results of requests run together, each held against plain decoding alone."""
    batch = BatchEngine(engine, batch_size=size)
    given = [BatchRequest(index, prompt, {**options, **own}) for index, (prompt, own) in enumerate(requests)]
    found = {answer.index: answer.result for answer in batch.run(given)}
    results = []
    for index, (prompt, own) in enumerate(requests):
        ours = found[index]
        assert isinstance(ours, Result), ours
        engine.reset()
        theirs = engine.generate(prompt, **{**options, **own, "method": "none", "draft_length": None})
        same_output(ours, theirs)
        check_counters(ours)
        if theirs.tokens and theirs.tokens[0].logprob is not None:
            close_logprobs(ours, theirs, within=0.0)
        results.append(ours)
    return results


def test_end_of_text_at_every_offset(models: TinyModels) -> None:
    """koboldcpp#1276, transformers#47912: rows whose text ends at each place of the block, beside rows that go on.

    The text of the first request is what the others copy from.
    """
    engine = models.engine("table")
    first: list[Asked] = [("a", {"ignore_eos": True, "max_tokens": 60})]
    rest: list[Asked] = [(chr(ord("z") - offset), {}) for offset in range(18)]
    results = rows(engine, first + rest, raw=True, method="ngram", draft_length=8, max_tokens=60)
    for offset, result in enumerate(results[1:]):
        assert result.token_ids == (*LOWER[len(LOWER) - offset :], TURN_END_ID)
        assert result.finish_reason == "stop"
    assert sum(result.speculation.accepted for result in results[1:]) > 30


def test_every_window_as_a_stop_string(models: TinyModels) -> None:
    """transformers#48039, vllm#3574: each run of 1 to 3 tokens of the text as a stop string, all in one batch."""
    engine = models.engine("tgt")
    options: dict[str, Any] = {"max_tokens": 30, **RAW}
    plain = engine.generate(PROMPT, method="none", **options)
    texts = [engine.tokenizer.decode([token]) for token in plain.token_ids]
    stops = {"".join(texts[start : start + length]) for length in (1, 2, 3) for start in range(len(texts) - length)}
    requests: list[Asked] = [(PROMPT, {"stop": stop}) for stop in sorted(stops) if stop and "\ufffd" not in stop]
    engine.generate(PROMPT, method="ngram", **options)  # copied from then
    results = rows(engine, requests, size=7, method="ngram", **options)
    assert len(results) > 20
    assert {result.finish_reason for result in results} == {"stop"}
    assert all(
        result.text == plain.text[: plain.text.index(own["stop"])]
        for result, (_, own) in zip(results, requests, strict=True)
    )
    assert sum(result.speculation.discarded for result in results) > 0


def test_limits_and_least_lengths(models: TinyModels) -> None:
    """lattice#245, transformers#46993, vllm#21987, sglang#31599: exact limits, one rule of min_tokens, row by row."""
    engine = models.engine("table")
    requests: list[Asked] = [
        *(("<", {"max_tokens": limit}) for limit in (0, 1, 2, 3, 5, 40)),
        *(("A", {"max_tokens": limit, "stop": "END"}) for limit in (4, 5, 6, 7)),
        *(("w", {"min_tokens": least, "max_tokens": 12}) for least in (0, 4, 5, 12)),
    ]
    results = rows(engine, requests, raw=True, method="ngram", draft_length=4)
    assert [result.usage.completion_tokens for result in results[:6]] == [0, 1, 2, 3, 5, 40]
    assert [result.finish_reason for result in results[6:10]] == ["length", "stop", "stop", "stop"]


@pytest.mark.parametrize(
    "penalty",
    [
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
    ],
    ids=repr,
)
def test_each_penalty_alone(models: TinyModels, penalty: dict[str, float]) -> None:
    """vllm#18902, TensorRT-LLM#17701: greedy and sampled rows beside rows without one."""
    engine = models.engine("tgt")
    requests: list[Asked] = []
    for index in range(4):
        requests += [(f"{PROMPT}{index} {index}", penalty), (f"{PROMPT}{index} {index}", {})]
        requests.append((f"{PROMPT}{index}", {**penalty, "temperature": 0.9, "seed": index}))
    results = rows(engine, requests, method="ngram", draft_length=5, max_tokens=30, logprobs=1, **RAW)
    assert any(results[place].token_ids != results[place + 1].token_ids for place in range(0, 12, 3))


def test_fifty_prompts_under_a_repetition_penalty(models: TinyModels) -> None:
    """vllm#22987."""
    requests: list[Asked] = [
        (f"{text_of(index % 9 + 1)} {index}", {"max_tokens": 10 + index % 20}) for index in range(50)
    ]
    rows(models.engine("tgt-int8"), requests, size=8, repetition_penalty=1.05, method="ngram", **RAW)


@pytest.mark.parametrize("name", ["real128", "real160"])
def test_padded_vocabularies(models: TinyModels, name: str) -> None:
    """vllm#7252: ids beyond the 120 real tokens never come, hot sampling included."""
    engine = models.engine(name)
    requests: list[Asked] = [("abcd" * (1 + index), {"temperature": 3.0, "seed": index}) for index in range(12)]
    results = rows(engine, requests, method="ngram", draft_length=4, max_tokens=40, **RAW)
    assert max(token for result in results for token in result.token_ids) < 120


def test_seeds_of_rows(models: TinyModels) -> None:
    """vllm#6038, vllm#9441, vllm#13196, tokenspeed#1613: equal seeds equal texts, whatever runs beside."""
    engine = models.engine("tgt")
    hot: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16, **RAW}
    requests: list[Asked] = [(PROMPT, {"seed": index // 2}) for index in range(20)]
    results = rows(engine, requests, size=6, method="ngram", **hot)
    assert all(results[2 * index].token_ids == results[2 * index + 1].token_ids for index in range(10))
    assert len({result.token_ids for result in results}) > 5
    samples: list[Asked] = [(PROMPT, {"seed": 4, "sample_index": index}) for index in range(8)]
    first = [result.token_ids for result in rows(engine, samples, size=8, **hot)]
    assert len(set(first)) == 8
    assert [result.token_ids for result in rows(engine, samples[::-1], size=3, **hot)] == first[::-1]


def test_an_exact_repeat_of_a_prompt(models: TinyModels) -> None:
    """mlx-lm#1215, sglang#19796: a prompt that a row holds whole, and two suffixes of one prefix."""
    engine = models.engine("tgt")
    prefix = text_of(300)
    requests: list[Asked] = [
        (prefix, {}),
        (prefix, {}),
        (f"{prefix}first", {}),
        (f"{prefix}second one", {}),
        (prefix, {}),
    ]
    for size in (2, 3, 5):
        results = rows(engine, requests, size=size, method="ngram", max_tokens=25, logprobs=0, **RAW)
        assert [result.usage.cached_tokens for result in results] == [0, 299, 300, 300, 299]


PROBE = """
import gc, sys
from specrun.runtime import BatchEngine, BatchRequest, Engine
from specrun.runtime.ngram_table import NgramTable


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


engine = Engine.load(sys.argv[1], threads=1)
# The table of earlier texts is bounded; a small bound is reached within the warm-up.
engine.drafting.table = NgramTable(eos_ids=(0, 2), earlier_tokens=400)
kinds = [
    {"method": "ngram"},
    {"temperature": 1.0, "seed": 3},
    {"regex": "[a-z]{1,20}", "ignore_eos": False},
    {"prediction": "abc" * 20},
    {"logprobs": 2},
    {"colour": "red"},
]


def requests():
    for index in range(700):
        prompt = "abcdefghij" * (1 + index * 7 % 9)
        yield BatchRequest(index, prompt, {"max_tokens": 8 + index % 24, "raw": True, **kinds[index % len(kinds)]})


before = objects = 0
for count, _ in enumerate(BatchEngine(engine, batch_size=6).run(requests())):
    if count == 200:
        before, objects = resident(), len(gc.get_objects())
    if count == 690:
        print(resident() - before, len(gc.get_objects()) - objects)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_memory_over_five_hundred_requests(models: TinyModels) -> None:
    """onnxruntime-genai#590: flat after the warm-up within one run of a batch; in a process of its own."""
    path = str(models.bundle("tgt").path)
    done = subprocess.run([sys.executable, "-c", PROBE, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, objects = map(int, done.stdout.split())
    # A row's KV buffers or logits kept a request would be 20 MB and more.
    assert grown < 4_000_000
    assert objects < 600
