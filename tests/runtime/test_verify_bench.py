"""`verify` finds planted faults, `bench` resumes and adds up."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.runtime import Engine, bench
from specrun.runtime.bench import BenchPrompt, Run, load_prompts, run_bench, summarise
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.loop import speculate
from specrun.runtime.session import ModelSession
from specrun.runtime.verify import DRAFT_LENGTHS, VerifyCase, describe_difference, verify

from .conftest import TinyModels
from .tiny_bundles import PROMPT

PROMPTS = (PROMPT, "red blue red blue red blue", "a")


@pytest.fixture
def engine(models: TinyModels) -> Engine:
    return models.engine("tgt", "mix")


def cases(engine: Engine, **options: Any) -> list[VerifyCase]:
    return list(verify(engine, PROMPTS, max_tokens=24, **options))


def test_verify_proves_a_sound_engine(engine: Engine) -> None:
    found = cases(engine)
    assert all(case.equal and case.difference is None for case in found)
    assert {(case.method, case.draft_length, case.sampling) for case in found} == {
        (method, draft_length, sampling)
        for method in ("draft", "ngram", "lookahead", "draft+ngram")
        for draft_length in (*DRAFT_LENGTHS, None)
        for sampling in ("greedy", "coupled")
    }
    assert all(case.prompts == 3 and case.tokens > 24 for case in found)


def test_verify_without_a_draft(models: TinyModels) -> None:
    assert {case.method for case in cases(models.engine("tgt"), draft_lengths=(3,))} == {"ngram", "lookahead"}


FAULT = re.compile(
    r"prompt \d: token (\d+) is .* in plain decoding and .* here \(their logits differ by ([0-9.e+-]+)\)"
)


def test_verify_finds_a_cache_that_does_not_rewind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollback that leaves rejected draft tokens standing: found, with position and gap."""
    keep = KVCache.keep_path

    def lazy(self: KVCache, row: int, start: int, nodes: Sequence[int]) -> None:
        before = self.lengths[row]
        keep(self, row, start, nodes)
        length = self.lengths[row]
        if 60 < length < before:  # the rejected token's entry stays in place of the right one
            for value in self.values:
                value.numpy()[row, :, length - 1] = value.numpy()[row, :, length]

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "keep_path", lazy)
        found = [case for case in cases(engine, draft_lengths=(4,)) if not case.equal]
    assert found
    for case in found:
        assert case.difference is not None
    matched = [FAULT.match(str(case.difference)) for case in found]
    assert any(match and 1 <= int(match[1]) <= 24 for match in matched)
    assert all(case.equal for case in cases(engine, draft_lengths=(4,)))


def test_verify_finds_logits_that_depend_on_the_width(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelSession.run_batch
    target = engine.target
    bias = np.random.default_rng(1).standard_normal(288).astype(np.float32)

    def faulty(self: ModelSession, tokens: Sequence[Sequence[int]], *, rows: int, parents: Any = None) -> np.ndarray:
        logits = run(self, tokens, rows=rows, parents=parents)
        if self is target and rows > 1:
            logits[..., :] += bias
        return logits

    monkeypatch.setattr(ModelSession, "run_batch", faulty)
    found = cases(engine, methods=["draft"], draft_lengths=(2,))
    assert not any(case.equal for case in found if case.draft_length == 2)
    assert all(FAULT.match(str(case.difference)) for case in found if case.draft_length == 2)


def test_verify_finds_a_loop_that_accepts_everything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrun.runtime import chooser
    from specrun.runtime.acceptance import Outcome
    from specrun.runtime.proposal import Proposal

    def gullible(proposal: Proposal, step: Any, ends: Any) -> Outcome:
        return Outcome(tuple(range(len(proposal))), step(len(proposal) - 1, ()).token, "bonus")

    monkeypatch.setattr(chooser, "accept_tree", gullible)
    found = [case for case in cases(engine, draft_lengths=(4,)) if case.sampling == "greedy" and case.draft_length]
    assert not any(case.equal for case in found if case.method == "draft")


def test_the_end_of_a_text_is_a_difference(engine: Engine) -> None:
    ids = engine.generate(PROMPT, method="none", max_tokens=5).token_ids
    assert "the end" in describe_difference(engine, PROMPT, ids, ids[:3])
    assert describe_difference(engine, PROMPT, ids, ids[:3]).startswith("token 4 ")
    changed = (*ids[:2], 77, *ids[3:])
    text = describe_difference(engine, PROMPT, ids, changed)
    assert text.startswith("token 3 is ")
    gap = float(text.rsplit(" ", 1)[1].rstrip(")"))
    logits = engine.logits([*engine.encode(PROMPT), *ids[:2]])
    assert gap == pytest.approx(float(logits[ids[2]] - logits[77]), rel=1e-2)
    assert gap > 0


def test_verify_refuses_what_it_cannot_do(engine: Engine) -> None:
    with pytest.raises(UsageError, match="medusa"):
        cases(engine, methods=["medusa"])
    with pytest.raises(UsageError, match="no prompt"):
        list(verify(engine, []))


def test_verify_runs_the_real_loop() -> None:
    """What `verify` checks is what requests run."""
    from specrun.runtime import stream

    assert stream.speculate is speculate


# bench

BENCH_PROMPTS = [BenchPrompt("1", "qa", "What is a tide?"), BenchPrompt("2", "code", "def add(a, b):")]


def test_bench_resumes(engine: Engine, tmp_path: Path) -> None:
    """An interrupted run goes on where it ended, also when its file was cut in the middle of a line."""
    output = tmp_path / "runs.jsonl"
    options: dict[str, Any] = {"methods": ["none", "ngram:3", "draft"], "max_tokens": 12, "repeats": 2}
    whole = run_bench(engine, BENCH_PROMPTS, output=output, **options)
    assert len(whole) == 2 * 2 * 4
    assert {run.method for run in whole} == {"baseline", "none", "ngram:3", "draft"}
    assert all(run.tokens == 12 and run.decode_s > 0 and run.prefill_s > 0 for run in whole)
    assert all(0 < run.onnx_s <= run.decode_s for run in whole)
    lines = output.read_text().splitlines()
    assert len(lines) == 17
    for kept in (1, 6, 16):
        output.write_text("\n".join(lines[:kept]) + "\n" + lines[kept][:20])
        runs = run_bench(engine, BENCH_PROMPTS, output=output, **options)
        assert {(r.id, r.method, r.repeat) for r in runs} == {(r.id, r.method, r.repeat) for r in whole}
        assert len(runs) == 16
        assert runs[: kept - 1] == whole[: kept - 1]
        records = [json.loads(line) for line in output.read_text().splitlines()]
        assert len(records) == 17
        assert "settings" in records[0]
    assert run_bench(engine, BENCH_PROMPTS, output=output, **options) == runs


def test_bench_texts_are_those_of_plain_decoding(engine: Engine) -> None:
    runs = run_bench(engine, BENCH_PROMPTS, methods=["none", "ngram", "draft:4"], max_tokens=30, repeats=1)
    rows = summarise(runs)
    assert {(row.category, row.method) for row in rows} == {
        (category, method) for category in ("qa", "code", "all") for method in ("baseline", "none", "ngram", "draft:4")
    }
    assert all(row.equal for row in rows if row.method != "baseline")
    assert all(row.ratio == 1.0 for row in rows if row.method == "baseline")
    assert engine.target.width_rule.padded


def test_bench_files_of_other_settings_and_of_other_kinds(engine: Engine, tmp_path: Path) -> None:
    output = tmp_path / "runs.jsonl"
    run_bench(engine, BENCH_PROMPTS[:1], methods=["none"], max_tokens=4, repeats=1, output=output)
    with pytest.raises(UsageError, match="other settings"):
        run_bench(engine, BENCH_PROMPTS[:1], methods=["none"], max_tokens=5, repeats=1, output=output)
    output.write_text("something else\n")
    with pytest.raises(IntegrityError, match=r"runs\.jsonl"):
        run_bench(engine, BENCH_PROMPTS[:1], methods=["none"], max_tokens=4, repeats=1, output=output)


def run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "id": "1",
        "category": "qa",
        "method": "baseline",
        "repeat": 0,
        "tokens": 11,
        "rounds": 10,
        "decode_s": 1.0,
        "onnx_s": 0.9,
        "prefill_s": 0.1,
        "mean_accepted_tokens": 1.0,
        "acceptance_rate": 0.0,
        "ids_digest": "x",
    }
    return Run(**(values | changes))


def test_summary_arithmetic() -> None:
    """Medians over repeats, prompts weigh the same, ratio = baseline's time a token / the method's."""
    runs = [run(repeat=index, decode_s=value) for index, value in enumerate((1.0, 9.0, 1.2))]  # median 0.12 a token
    runs += [run(id="2", decode_s=2.8, tokens=15)]  # 0.2
    fast = {"method": "ngram", "mean_accepted_tokens": 2.0, "acceptance_rate": 0.5}
    runs += [run(decode_s=0.6, rounds=5, onnx_s=0.5, **fast)]  # 0.06
    runs += [run(id="2", decode_s=1.4, tokens=15, rounds=10, onnx_s=1.2, **{**fast, "acceptance_rate": 0.7})]  # 0.1
    base, ngram = summarise(runs)
    assert (base.category, base.method, base.prompts, base.ratio) == ("qa", "baseline", 2, 1.0)
    assert ngram.method == "ngram"
    assert ngram.prompts == 2
    assert ngram.ratio == pytest.approx((0.12 + 0.2) / (0.06 + 0.1))
    assert ngram.tokens_per_s == pytest.approx(2 / 0.16)
    assert ngram.mean_accepted_tokens == pytest.approx(2.0)
    assert ngram.acceptance_rate == pytest.approx(0.6)
    assert ngram.overhead_ms == pytest.approx(1e3 * (0.1 + 0.2) / 15)
    assert ngram.equal is None  # "none" was not run
    plain = [run(method="none"), run(id="2", method="none")]
    assert {row.method: row.equal for row in summarise([*runs, *plain])}["ngram"] is True
    other = [run(method="none", ids_digest="y"), run(id="2", method="none")]
    assert {row.method: row.equal for row in summarise([*runs, *other])}["ngram"] is False


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


def test_bench_leaves_a_true_cache(engine: Engine) -> None:
    """After the inexact baseline nothing of its KV is taken for exact."""
    run_bench(engine, BENCH_PROMPTS[:1], methods=[bench.BASELINE], max_tokens=12, repeats=1)
    prompt = BENCH_PROMPTS[0].prompt
    assert engine.generate(prompt, method="none", max_tokens=12).usage.cached_tokens == 0
