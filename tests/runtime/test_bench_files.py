"""Files of bench runs: which runs are taken from them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.runtime import Engine
from specrun.runtime.bench import BenchPrompt, run_bench
from specrun.runtime.bench_summary import summarise

from .bench_values import BENCH_PROMPTS
from .conftest import TinyModels


@pytest.fixture
def engine(models: TinyModels) -> Engine:
    return models.engine("tgt", "mix")


def test_another_prompt_of_the_same_id_is_another_run(engine: Engine, tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 8, "repeats": 1, "output": tmp_path / "runs.jsonl"}
    first = run_bench(engine, BENCH_PROMPTS, **options)
    others = [BenchPrompt(prompt.id, prompt.category, f"{prompt.prompt} And why?") for prompt in BENCH_PROMPTS]
    second = run_bench(engine, others, **options)
    assert [r.id for r in second.runs] == [r.id for r in first.runs]
    assert not {r.ids_digest for r in first.runs} & {r.ids_digest for r in second.runs}
    assert run_bench(engine, BENCH_PROMPTS, **options).runs == first.runs  # both are kept
    both = run_bench(engine, [*BENCH_PROMPTS, *others], **options)
    assert {row.category: row.prompts for row in summarise(both.runs)} == {"qa": 2, "code": 2, "all": 4}
    renamed = [dataclasses.replace(BENCH_PROMPTS[0], category="new")]
    assert {r.category for r in run_bench(engine, renamed, **options).runs} == {"new"}
    with pytest.raises(UsageError, match="Prompt 2 is there twice"):
        run_bench(engine, [*BENCH_PROMPTS, BENCH_PROMPTS[1]], **options)


def test_another_speculator_is_another_setting(models: TinyModels, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "repeats": 1, "output": tmp_path / "runs.jsonl"}
    run_bench(models.engine("tgt", "mix"), BENCH_PROMPTS[:1], methods=["none", "draft"], **options)
    with pytest.raises(UsageError, match="other settings"):
        run_bench(models.engine("tgt", "rnd"), BENCH_PROMPTS[:1], methods=["draft"], **options)
    found = run_bench(models.engine("tgt", "rnd"), BENCH_PROMPTS[:1], methods=["ngram"], **options)
    assert {r.method for r in found.runs} == {"baseline", "none", "draft", "ngram"}
    with pytest.raises(UsageError, match="other settings"):
        run_bench(models.engine("tgt", "rnd"), BENCH_PROMPTS[:1], methods=["auto"], **options)


def test_files_without_digests_are_of_other_settings(engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 4, "repeats": 1, "output": output}
    run_bench(engine, BENCH_PROMPTS[:1], **options)
    head, *rest = map(json.loads, output.read_text().splitlines())
    del head["settings"]["model"]["speculators"]
    old = [{key: value for key, value in line.items() if key != "prompt_digest"} for line in rest]
    for lines in ([head, *rest], [head, *old], [json.loads(output.read_text().splitlines()[0]), *old]):
        output.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(UsageError, match="other settings"):
            run_bench(engine, BENCH_PROMPTS[:1], **options)


def test_an_empty_file_and_one_cut_in_its_first_line(engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 4, "repeats": 1, "output": output}
    run_bench(engine, BENCH_PROMPTS[:1], **options)
    head = output.read_text().split("\n")[0]
    for content in ("", head[:9], head[:60], head):
        output.write_text(content)
        assert len(run_bench(engine, BENCH_PROMPTS[:1], **options).runs) == 2
        assert len(output.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": "x"},
        {"tokens": 10**400},
        {"method": ["none"]},
        {"id": {}},
        {"category": "\ud800"},
        {"peak_bytes": "x"},
        {"weights_bytes": None},
        {"decode_s": float("nan")},
        {"decode_s": 1e308},
        {"rounds": -5},
        {"repeat": True},
        {"more": 1},
    ],
)
def test_runs_with_fields_that_cannot_be(engine: Engine, tmp_path: Path, changes: dict[str, Any]) -> None:
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 4, "repeats": 1, "output": output}
    run_bench(engine, BENCH_PROMPTS[:1], **options)
    head, first, second = output.read_text().splitlines()
    output.write_text("\n".join([head, json.dumps(json.loads(first) | changes), second, ""]))
    with pytest.raises(IntegrityError, match=r"runs\.jsonl is no file of bench runs: choose another --output\."):
        run_bench(engine, BENCH_PROMPTS[:1], **options)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"load_average": [', '"load_average": "x", "y": ['),
        ('"started": ', '"started": 5, "y": '),
        ('"sitting": ', '"sitting": ' + "[" * 100_000 + ', "y": '),
        ('"sitting": ', '"x": ' + "[" * 500 + "]" * 500 + ', "sitting": '),
        ('"speculators": {', '"speculators": [], "y": {'),
        ('"model": {', '"model": [], "y": {'),
        ('"cores": ', '"cores": NaN, "y": '),
    ],
)
def test_settings_that_cannot_be(engine: Engine, tmp_path: Path, old: str, new: str) -> None:
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 4, "repeats": 1, "output": output}
    run_bench(engine, BENCH_PROMPTS[:1], **options)
    text = output.read_text()
    assert old in text
    output.write_text(text.replace(old, new, 1))
    with pytest.raises((IntegrityError, UsageError), match=r"runs\.jsonl (is no file|holds runs of other)"):
        run_bench(engine, BENCH_PROMPTS[:1], **options)
