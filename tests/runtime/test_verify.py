"""`verify` proves sound engines and finds planted faults."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime import Engine
from specrun.runtime.batching.row_pool import RowPool
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
    wanted = {
        (method, draft_length, batch, sampling)
        for method in ("draft", "ngram", "lookahead", "draft+ngram")
        for draft_length in (*DRAFT_LENGTHS, None)
        for batch in (1, 3)
        for sampling in ("greedy", "coupled")
        if batch == 1 or method != "lookahead"
    }
    wanted |= {("none", None, 3, sampling) for sampling in ("greedy", "coupled")}
    assert {(case.method, case.draft_length, case.batch, case.sampling) for case in found} == wanted
    assert len(found) == len(wanted)
    assert all(case.prompts == 3 and case.tokens > 24 for case in found)


def test_verify_without_a_draft(models: TinyModels) -> None:
    found = cases(models.engine("tgt"), draft_lengths=(3,))
    assert {case.method for case in found} == {"none", "ngram", "lookahead"}


def test_verify_with_heads(models: TinyModels) -> None:
    """Every method of a bundle with speculators, alone and in batches."""
    found = cases(models.engine("heads"), draft_lengths=(2,), batch_sizes=(1, 2))
    assert all(case.equal for case in found)
    heads = {"medusa", "eagle", "draft", "medusa+ngram", "eagle+ngram", "draft+ngram"}
    assert {case.method for case in found if case.batch == 2} == {"none", "ngram"} | heads
    assert {case.method for case in found if case.batch == 1} == {"ngram", "lookahead"} | heads


def test_verify_finds_rows_that_disturb_each_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's KV that another row's rollback spoils is found in batches, and only there."""
    rewind = RowPool.move

    def careless(self: RowPool, source: int, slot: int) -> None:
        rewind(self, source, slot)
        for value in self.cache.values[:2]:
            value.numpy()[slot, :, 3] += 1.0

    monkeypatch.setattr(RowPool, "move", careless)
    found = cases(engine, methods=["ngram"], draft_lengths=(4,))
    assert all(case.equal for case in found if case.batch == 1)
    assert not all(case.equal for case in found if case.batch == 3)


def test_verify_on_a_build_of_one_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.target, "ragged", False)
    assert {case.batch for case in cases(engine, methods=["ngram"], draft_lengths=(2,))} == {1}


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
        if self.bundle is target.bundle and rows > 1:
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
    from specrun.runtime import running

    assert running.speculate is speculate


def test_where_rows_are_equal_only_up_to_rounding_near_tokens_may_change_places(
    models: TinyModels,
) -> None:
    """Runs of several positions lose a little; what follows from that is said, and is no failure within the bound."""
    engine = models.engine("tgt")
    run = ModelSession.run_batch

    def rounded(self: ModelSession, tokens: Any, *, rows: int, parents: Any = None) -> Any:
        logits = run(self, tokens, rows=rows, parents=parents)
        if len(tokens[0]) > 1:
            logits = logits.copy()
            logits[:, :, 1::2] += self.lift  # type: ignore[attr-defined]
        return logits

    def outcome(patch: pytest.MonkeyPatch, lift: float) -> list[VerifyCase]:
        patch.setattr(ModelSession, "lift", np.float32(lift), raising=False)
        return list(verify(engine, PROMPTS[:2], methods=["ngram"], draft_lengths=(3,), max_tokens=40))

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelSession, "run_batch", rounded)
            found = outcome(patch, 0.5)
            assert engine.calibration.exactness == "rounding"
            assert 0.49 < engine.calibration.bound < 0.51
            assert any(not case.equal for case in found if case.sampling == "greedy")
            assert all(case.holds for case in found if case.sampling == "greedy")
            patch.setattr("specrun.runtime.calibration._bound", lambda session, tokens: 1e-6)
            assert any(not case.holds for case in outcome(patch, 0.5))
    finally:
        engine.recalibrate()
    assert engine.calibration.bound == 0.0
