"""Builds of ONNX Runtime whose attention takes several rows only with one token each, as onnxruntime-gpu 1.31 does."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime import Engine
from specrun.runtime.batch import BatchEngine, BatchRequest
from specrun.runtime.calibration import probe
from specrun.runtime.session import ModelSession, WidthRule, choose_graph, session_opener

from .checks import text_of
from .conftest import TinyModels
from .test_device_engine import DEVICE, Pinned, opener
from .tiny_bundles import PROMPT

OLD_BUILD = {"attention_bias", "position_ids"}  # what onnxruntime-gpu 1.31 has


def test_the_variant_is_chosen_by_what_the_build_knows(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = models.bundle("tgt-cuda")
    assert choose_graph(bundle).file == "target.onnx"
    wanted = models.engine("tgt-cuda", device="cpu").generate(PROMPT, max_tokens=16, raw=True).token_ids
    monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset({"attention_bias"}))
    assert choose_graph(bundle).file == "target_batch1.onnx"
    with closing(Engine.load("tgt-cuda", device=DEVICE, threads=1)) as engine:
        assert not engine.target.ragged
        assert BatchEngine(engine, batch_size=8).batch_size == 8
        got = engine.generate(PROMPT, max_tokens=16, raw=True, method="ngram", draft_length=3).token_ids
    assert got == wanted


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 11}])
def test_rows_of_a_build_without_ragged_runs(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, rows: int, sampling: dict[str, Any]
) -> None:
    """Rows with one token each run together, others one after another; the texts are those of each alone."""
    models.bundle("heads-cuda")
    monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset(OLD_BUILD))
    shapes: set[tuple[int, int]] = set()
    with closing(Engine.load("heads-cuda", device=DEVICE, threads=1)) as engine:
        run = ModelSession.run_batch

        def watched(self: ModelSession, tokens: Any, **how: Any) -> Any:
            if self.bundle.path == engine.bundle.path:
                shapes.add((sum(map(bool, tokens)), max(map(len, tokens))))
            return run(self, tokens, **how)

        prompts = ["a", PROMPT, "a b a b a b a b", text_of(70), PROMPT[:9], "b a"]
        how = {"max_tokens": 30, "raw": True, **sampling}
        wanted = [engine.generate(prompt, method="none", **how).token_ids for prompt in prompts]
        monkeypatch.setattr(ModelSession, "run_batch", watched)
        for method, draft_length in (("none", None), ("ngram", None), ("ngram", 3), ("auto", None)):
            requests = [
                BatchRequest(index, prompt, {**how, "method": method, "draft_length": draft_length})
                for index, prompt in enumerate(prompts)
            ]
            shapes.clear()
            answers = {answer.index: answer.result for answer in BatchEngine(engine, batch_size=rows).run(requests)}
            assert [answers[index].token_ids for index in range(len(prompts))] == wanted
            if method == "none":
                assert (rows, 1) in shapes
            elif draft_length is not None:
                assert any(width > 1 for count, width in shapes if count > 1)
        refused = list(BatchEngine(engine, batch_size=2).run([BatchRequest(0, "a", {**how, "method": "eagle"})]))
    assert isinstance(refused[0].result, UsageError)
    assert "one request at a time on this ONNX Runtime" in str(refused[0].result)


def test_best_of_says_what_drafts_alone_there(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = models.bundle("heads-cuda")
    monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset(OLD_BUILD))
    with closing(Engine(bundle, threads=1, device=DEVICE)) as engine:
        for method, where in (("eagle", " on this ONNX Runtime"), ("lookahead", "")):
            with pytest.raises(UsageError, match=f"one request at a time{where}, and best-of runs several"):
                engine.best_of(PROMPT, n=2, method=method)


def test_a_row_that_idles_keeps_what_it_holds(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lengths of queries an idle row runs a token too, which is not kept."""
    monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset(OLD_BUILD))
    open_session = session_opener(models.bundle("tgt-cuda"), 1, DEVICE)
    alone, batch = open_session(1, WidthRule()), open_session(3, WidthRule())
    texts = [[(7 * index + row) % 280 for index in range(40)] for row in range(3)]
    batch.run_batch([texts[0][:20], texts[1][:9], []], rows=1)
    for new in range(4):
        batch.run_batch([texts[0][20 + new : 21 + new], [], []], rows=1)
    batch.run_batch([[], texts[1][9:12], texts[2][:1]], rows=1)
    assert batch.cache.lengths == [24, 12, 1]
    got = batch.run_batch([texts[0][24:25], texts[1][12:13], texts[2][1:2]], rows=1)
    features = batch.batch_features
    for row, pieces in enumerate(((20, 1, 1, 1, 1, 1), (9, 3, 1), (1, 1))):
        alone.rewind_to(0)
        for width in pieces:
            wanted = np.array(alone.run(texts[row][alone.length : alone.length + width], rows=1))
        assert np.array_equal(np.array(got[row]), wanted)
        assert np.array_equal(features[row, 0], alone.features[-1])


def test_the_bits_of_rows_that_run_together_are_probed(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset(OLD_BUILD))

    class Together(Pinned):
        def run_batch(self, tokens: Any, *, rows: int, parents: Any = None) -> Any:
            found = ModelSession.run_batch(self, tokens, rows=rows, parents=parents)
            if self.cache.batch == 1:
                return found
            return [np.array(row) + np.float32(1e-2) for row in found]

    found = probe(opener(models, Together))
    assert (found.width_multiple, found.pinned, found.batches) == (2, False, False)
    assert 0.01 < found.batch_bound < 0.03
    found = probe(session_opener(models.bundle("tgt-cuda"), 1, DEVICE))
    assert (found.exactness, found.batch_exactness) == ("bitwise", "rounding")  # a lone row is one of those that differ
    assert 0.0 < found.batch_bound < 0.02


def test_the_sums_of_lone_rows_are_found_where_they_seldom_show(models: TinyModels) -> None:
    """Of 16 bits few are others, but one of them may turn a text."""
    found = probe(session_opener(models.bundle("tgt-cuda"), 1, DEVICE))
    assert (found.width_multiple, found.exactness, found.batch_exactness) == (2, "bitwise", "bitwise")
