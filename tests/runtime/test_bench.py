"""`bench` resumes, keeps settings apart, and adds up."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.export.speculator_config import EagleConfig
from specrun.export.speculators import attach_speculator
from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.models_cache.layout import find_bundle
from specrun.models_cache.speculator import find_speculator
from specrun.runtime import Engine, bench_runs
from specrun.runtime.bench import BASELINE, load_prompts, run_bench
from specrun.runtime.bench_axes import method_axes, training_cost
from specrun.runtime.bench_environment import Sitting, machine_facts, peak_memory, processor_name, reset_peak_memory
from specrun.runtime.bench_summary import ratio_interval, summarise, totals

from .bench_values import BENCH_PROMPTS, run
from .conftest import TinyModels
from .tiny_heads import SIZES, speculator


@pytest.fixture
def engine(models: TinyModels) -> Engine:
    return models.engine("tgt", "mix")


def test_bench_resumes(engine: Engine, tmp_path: Path) -> None:
    """An interrupted run goes on where it ended, also when its file was cut in the middle of a line."""
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none", "ngram:3", "draft"], "max_tokens": 12, "repeats": 2}
    first = run_bench(engine, BENCH_PROMPTS, output=output, **options)
    whole = first.runs
    assert len(whole) == 2 * 2 * 4
    assert {run.method for run in whole} == {"baseline", "none", "ngram:3", "draft"}
    assert all(run.model == "tgt" and run.tokens == 12 and run.decode_s > 0 and run.prefill_s > 0 for run in whole)
    assert all(0 < run.onnx_s <= run.decode_s for run in whole)
    assert all(run.draft_s + run.verify_s < run.decode_s for run in whole)
    assert len(first.sittings) == 1
    lines = output.read_text().splitlines()
    assert len(lines) == 17
    for kept in (1, 6, 16):
        output.write_text("\n".join(lines[:kept]) + "\n" + lines[kept][:20])
        found = run_bench(engine, BENCH_PROMPTS, output=output, **options)
        keys = {(r.id, r.method, r.repeat) for r in whole}
        assert {(r.id, r.method, r.repeat) for r in found.runs} == keys
        assert len(found.runs) == 16
        assert found.runs[: kept - 1] == whole[: kept - 1]
        assert len(found.sittings) == 2
        assert found.sittings[0] == first.sittings[0]
        records = [json.loads(line) for line in output.read_text().splitlines()]
        assert ["settings" in record for record in records] == [n in (0, kept) for n in range(18)]
    text = output.read_text()
    assert run_bench(engine, BENCH_PROMPTS, output=output, **options) == found
    assert output.read_text() == text  # a sitting without runs is none


def test_more_methods_and_repeats_join_what_was_timed(engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "runs.jsonl"
    run_bench(engine, BENCH_PROMPTS[:1], methods=["none"], max_tokens=8, repeats=1, output=output)
    found = run_bench(engine, BENCH_PROMPTS[:1], methods=["ngram"], max_tokens=8, repeats=2, output=output)
    assert [(r.method, r.repeat) for r in found.runs] == [
        ("baseline", 0),
        ("none", 0),
        ("ngram", 0),
        ("ngram", 1),
        ("baseline", 1),
    ]


def test_models_share_a_file(models: TinyModels, tmp_path: Path) -> None:
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 8, "repeats": 1, "output": output}
    first = run_bench(models.engine("tgt"), BENCH_PROMPTS, **options)
    second = run_bench(models.engine("tgt-int8"), BENCH_PROMPTS, **options)
    assert {r.model for r in first.runs} == {"tgt"}
    assert {r.model for r in second.runs} == {"tgt-int8"}
    assert (first.model["precision"], second.model["precision"]) == ("fp32", "int8")
    assert run_bench(models.engine("tgt"), BENCH_PROMPTS, **options) == first
    with pytest.raises(UsageError, match="other settings"):  # those of the other model count too
        run_bench(models.engine("rnd"), BENCH_PROMPTS, **(options | {"max_tokens": 9}))


def test_every_method_is_warmed_up_and_only_once(engine: Engine, tmp_path: Path) -> None:
    timed: list[tuple[str, str, int | None]] = []

    def record(prompt: bench_runs.BenchPrompt, label: str, repeat: int, tokens: int | None) -> bench_runs.Run:
        timed.append((prompt.id, label, tokens))
        return run(model="tgt", id=prompt.id, prompt_digest=prompt.digest, method=label, repeat=repeat)

    def call() -> bench_runs.Bench:
        output = tmp_path / "runs.jsonl"
        return bench_runs.time_in_turn(engine, BENCH_PROMPTS, ["a", "b"], 2, record, settings={}, output=output)

    call()
    assert timed[:2] == [("1", "a", 16), ("1", "b", 16)]
    assert [entry[1] for entry in timed[2:]] == ["a", "b", "b", "a"] * 2  # the order turns from repeat to repeat
    assert all(tokens is None for _, _, tokens in timed[2:])
    timed.clear()
    call()
    assert not timed


def test_bench_texts_are_those_of_plain_decoding(engine: Engine) -> None:
    found = run_bench(engine, BENCH_PROMPTS, methods=["none", "ngram", "draft:4"], max_tokens=30, repeats=1)
    rows = summarise(found.runs)
    assert {(row.category, row.method) for row in rows} == {
        (category, method) for category in ("qa", "code", "all") for method in ("baseline", "none", "ngram", "draft:4")
    }
    assert all(row.equal for row in rows if row.method != "baseline")
    assert all(row.ratio == 1.0 for row in rows if row.method == "baseline")
    assert engine.target.width_rule.padded


def test_bench_files_of_other_settings_and_of_other_kinds(engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none"], "max_tokens": 4, "repeats": 1, "output": output}
    run_bench(engine, BENCH_PROMPTS[:1], **options)
    text = output.read_text()
    for change in ({"max_tokens": 5}, {"draft_length": 2}):
        with pytest.raises(UsageError, match="other settings"):
            run_bench(engine, BENCH_PROMPTS[:1], **(options | change))
    head, *rest = text.split("\n")
    for key in ("specrun", "processor", "onnxruntime"):
        other = json.loads(head)
        other["settings"]["machine"][key] = "another"
        output.write_text("\n".join([json.dumps(other), *rest]))
        with pytest.raises(UsageError, match="other settings"):
            run_bench(engine, BENCH_PROMPTS[:1], **options)
    old = json.dumps({"settings": {"model": "tgt", "max_tokens": 4}, "started": "2026-11-29 10:00"})
    for content in ("something else\n", "some", "3\n", "[]\n", "\n", rest[0] + "\n", f"{head}\n3\n", old + "\n"):
        output.write_text(content)
        with pytest.raises(IntegrityError, match=r"runs\.jsonl"):
            run_bench(engine, BENCH_PROMPTS[:1], **options)
        assert output.read_text() == content
    output.write_bytes(b"\xff\n")
    with pytest.raises(IntegrityError, match=r"runs\.jsonl"):
        run_bench(engine, BENCH_PROMPTS[:1], **options)


def test_bench_leaves_a_true_cache(engine: Engine) -> None:
    """After the inexact baseline nothing of its KV is taken for exact."""
    run_bench(engine, BENCH_PROMPTS[:1], methods=[BASELINE], max_tokens=12, repeats=1)
    prompt = BENCH_PROMPTS[0].prompt
    assert engine.generate(prompt, method="none", max_tokens=12).usage.cached_tokens == 0


def test_memory_is_that_of_the_method(models: TinyModels) -> None:
    """What another method's head holds in the same engine does not count."""
    models.bundle("heads")
    methods = ["none", "eagle", "medusa", "draft", "eagle+ngram"]
    with Engine.load("heads", threads=1) as engine:
        found = run_bench(engine, BENCH_PROMPTS[:1], methods=methods, max_tokens=8, repeats=1)
        by_method = {r.method: r for r in found.runs}
        sizes = {name: find_speculator(engine.bundle, name).weights_bytes for name in ("eagle", "medusa", "draft")}
        total = engine.memory()
    own = engine.bundle.weights_bytes
    for method in ("baseline", "none"):
        assert (by_method[method].weights_bytes, by_method[method].kv_draft_bytes) == (own, 0)
    for method, size in sizes.items():
        assert by_method[method].weights_bytes == own + size
    assert by_method["eagle+ngram"].weights_bytes == by_method["eagle"].weights_bytes
    assert by_method["medusa"].kv_draft_bytes == 0
    assert by_method["eagle"].kv_draft_bytes > 0
    assert total.weights_bytes == own + sum(sizes.values())
    assert total.kv_draft_bytes == by_method["eagle"].kv_draft_bytes + by_method["draft"].kv_draft_bytes
    assert found.peak_bytes is None or found.peak_bytes > total.weights_bytes


# arithmetic


def test_summary_arithmetic() -> None:
    """Medians over repeats, prompts weigh the same, ratio = baseline's time a token / the method's."""
    runs = [run(repeat=index, decode_s=value) for index, value in enumerate((1.0, 9.0, 1.2))]  # median 0.12 a token
    runs += [run(id="2", decode_s=2.8, tokens=15)]  # 0.2
    fast = {"method": "ngram", "mean_accepted_tokens": 2.0, "acceptance_rate": 0.5, "draft_s": 0.1, "verify_s": 0.4}
    runs += [run(decode_s=0.6, rounds=5, onnx_s=0.5, **fast)]  # 0.06
    runs += [run(id="2", decode_s=1.4, tokens=15, rounds=10, onnx_s=1.2, **{**fast, "acceptance_rate": 0.7})]  # 0.1
    base, ngram = summarise(runs)
    assert (base.model, base.category, base.method, base.prompts, base.ratio) == ("m", "qa", "baseline", 2, 1.0)
    assert (base.ratio_low, base.ratio_high) == (1.0, 1.0)
    assert ngram.method == "ngram"
    assert ngram.prompts == 2
    assert ngram.ratio == pytest.approx((0.12 + 0.2) / (0.06 + 0.1))
    assert (ngram.ratio_low, ngram.ratio_high) == (pytest.approx(2.0), pytest.approx(2.0))
    assert ngram.tokens_per_s == pytest.approx(2 / 0.16)
    assert ngram.mean_accepted_tokens == pytest.approx(2.0)
    assert ngram.acceptance_rate == pytest.approx(0.6)
    assert ngram.prefill_ms == pytest.approx(1e3 * 0.2 / 15)
    assert ngram.draft_ms == pytest.approx(1e3 * 0.2 / 15)
    assert ngram.verify_ms == pytest.approx(1e3 * 0.8 / 15)
    assert ngram.rest_ms == pytest.approx(1e3 * 1.0 / 15)
    assert ngram.overhead_ms == pytest.approx(1e3 * (0.1 + 0.2) / 15)
    assert ngram.equal is None  # "none" was not run
    plain = [run(method="none"), run(id="2", method="none")]
    assert {row.method: row.equal for row in summarise([*runs, *plain])}["ngram"] is True
    other = [run(method="none", ids_digest="y"), run(id="2", method="none")]
    assert {row.method: row.equal for row in summarise([*runs, *other])}["ngram"] is False


def test_categories_and_totals() -> None:
    runs = [run(), run(method="none", decode_s=2.0), run(id="2", category="code", decode_s=3.0)]
    runs += [run(id="2", category="code", method="none", decode_s=3.0), run(id="3", category="alone", method="none")]
    rows = summarise(runs)
    assert [(row.category, row.method) for row in rows] == [
        (category, method) for category in ("qa", "code", "all") for method in ("baseline", "none")
    ]  # nothing can be said of a prompt without a baseline
    assert [(row.category, row.prompts) for row in totals(rows)] == [("all", 2), ("all", 2)]
    assert totals(rows)[1].ratio == pytest.approx(4.0 / 5.0)
    assert [row.category for row in totals(summarise(runs[:2]))] == ["qa", "qa"]


def test_the_interval_is_that_of_a_bootstrap() -> None:
    """Against plain Python with its own draws, and against the normal approximation where there are many prompts."""
    rng = np.random.default_rng(5)
    base = rng.uniform(0.8, 1.2, 200)
    own = base / rng.normal(1.5, 0.2, 200)
    found = ratio_interval(base.tolist(), own.tolist())
    assert found is not None
    assert found == ratio_interval(base.tolist(), own.tolist())  # the same each time
    assert found != ratio_interval(base.tolist(), own.tolist(), seed=1)
    ratio = base.sum() / own.sum()
    deviation = np.std(base - ratio * own) / own.mean() / np.sqrt(200)  # of a ratio of sums, by linearisation
    assert found[0] < ratio < found[1]
    assert found == pytest.approx((ratio - 1.96 * deviation, ratio + 1.96 * deviation), abs=0.15 * deviation)
    ratios = []
    for _ in range(4000):
        places = [int(place) for place in rng.integers(200, size=200)]
        ratios.append(sum(base[place] for place in places) / sum(own[place] for place in places))
    ratios.sort()
    assert found == pytest.approx((ratios[100], ratios[-101]), abs=0.15 * deviation)


def test_the_interval_covers_the_true_ratio() -> None:
    """Of 300 samples of 30 prompts about 95 % hold the ratio of the means."""
    rng = np.random.default_rng(11)
    held = 0
    for _ in range(300):
        base = rng.uniform(0.5, 1.5, 30)
        own = base * 0.5 + rng.uniform(0.0, 0.5, 30)
        found = ratio_interval(base.tolist(), own.tolist(), resamples=1000)
        assert found is not None
        held += found[0] <= 1.0 / 0.75 <= found[1]
    assert 0.90 * 300 < held < 0.985 * 300


def test_no_interval_of_one_prompt() -> None:
    assert ratio_interval([1.0], [2.0]) is None
    (row,) = summarise([run()])
    assert (row.ratio_low, row.ratio_high) == (None, None)


# axes


def test_axes(models: TinyModels, tmp_path: Path) -> None:
    shutil.copytree(models.bundle("tgt").path, tmp_path / "tgt")
    bundle = find_bundle(tmp_path / "tgt")
    for name, seed, report in (("a", 1, {"tokens_seen": 4_000_000, "minutes": 65.5}), ("b", 2, {})):
        made = speculator(bundle, name, EagleConfig("eagle3", **SIZES), taps=(0, 1), seed=seed)
        attach_speculator(bundle, dataclasses.replace(made, report=report))
    own = bundle.weights_bytes
    runs = [run(weights_bytes=own)]
    runs += [run(method="none", weights_bytes=own), run(method="ngram:4", weights_bytes=own, decode_s=0.5)]
    runs += [run(method="eagle+ngram", weights_bytes=own + 70, kv_draft_bytes=30, mean_accepted_tokens=2.5)]
    runs += [run(method="draft:2", weights_bytes=own + 90, kv_draft_bytes=40)]
    none, ngram, eagle, draft = method_axes(summarise(runs), bundle)
    assert [row.method for row in (none, ngram, eagle, draft)] == ["none", "ngram:4", "eagle+ngram", "draft:2"]
    assert (none.weights_bytes, none.kv_bytes, none.training_tokens, none.training_minutes) == (0, 0, 0, 0.0)
    assert (ngram.weights_bytes, ngram.training_tokens, ngram.ratio) == (0, 0, pytest.approx(2.0))
    assert (eagle.weights_bytes, eagle.kv_bytes, eagle.mean_accepted_tokens) == (70, 30, 2.5)
    assert (eagle.training_tokens, eagle.training_minutes) == (4_000_000, 65.5)
    assert (draft.weights_bytes, draft.training_tokens, draft.training_minutes) == (90, None, None)
    chosen = method_axes(summarise(runs), bundle, find_speculator(bundle, "b"))[2]
    assert (chosen.training_tokens, chosen.training_minutes) == (None, None)
    model = method_axes(summarise(runs), bundle, models.bundle("mix"))[3]
    assert (model.training_tokens, model.training_minutes) == (None, None)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"report": 3}',
        '{"report": {"tokens_seen": "x", "minutes": []}}',
        '{"report": {"tokens_seen": -1, "minutes": 1' + "0" * 400 + "}}",
        '{"report": {"minutes": NaN}}',
        "[" * 100_000,
    ],
)
def test_a_report_that_says_nothing(models: TinyModels, tmp_path: Path, content: str) -> None:
    found = dataclasses.replace(find_speculator(models.bundle("heads"), "eagle"), path=tmp_path)
    assert training_cost(found) == (None, None)
    (tmp_path / "speculator.json").write_text(content)
    assert training_cost(found) == (None, None)


# environment


def test_machine_facts() -> None:
    import onnxruntime

    facts = machine_facts()
    assert facts["onnxruntime"] == onnxruntime.__version__
    assert facts["cores"] >= 1
    assert facts["processor"] == processor_name()
    assert facts["processor"]
    json.dumps(facts)


def test_sitting() -> None:
    sitting = Sitting.now()
    assert len(sitting.load_average) in (0, 3)
    assert len(sitting.started) == len("2026-11-30 10:00")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory() -> None:
    reset_peak_memory()
    before = peak_memory()
    block = np.ones(64 << 20, np.uint8)
    after = peak_memory()
    assert before is not None
    assert after is not None
    assert after - before > 0.8 * block.nbytes
    del block
    reset_peak_memory()
    assert (peak_memory() or 0) < after - (32 << 20)


# prompts


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"question_id": 7, "category": "qa", "turns": ["first", "second"]}\n\n'
        '{"id": "b", "prompt": "second"}\r\n'
        '{"messages": [{"role": "user", "content": "third"}], "category": "qa"}',
        encoding="utf-8",
    )
    prompts = load_prompts(path)
    assert [(prompt.id, prompt.category) for prompt in prompts] == [("7", "qa"), ("b", "all"), ("4", "qa")]
    assert [prompt.prompt for prompt in prompts] == ["first", "second", [{"role": "user", "content": "third"}]]
    assert [prompt.id for prompt in load_prompts(path, per_category=1)] == ["7", "b"]
    deep = "[" * 100_000
    for bad in ("[1, 2]", "null", '"x"', "{}", '{"turns": []}', '{"messages": []}', '{"prompt": 3}', "{", deep):
        path.write_text('{"prompt": "fine"}\n' + bad + "\n")
        with pytest.raises(UsageError, match="line 2"):
            load_prompts(path)
    path.write_text("\n\n")
    with pytest.raises(UsageError, match="no prompts"):
        load_prompts(path)
