"""Best of N where one stored prompt does not do, so that rows copy it: samples are those of `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import KVSpec
from specrun.runtime import Engine
from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.best_of.run import BestOf
from specrun.runtime.device import CPU, Device
from specrun.runtime.session import PREFILL_CHUNK

from .checks import text_of
from .conftest import TinyModels
from .test_best_of import LONG, RAW, wide
from .tiny_bundles import PROMPT

__all__ = ["wide"]  # a fixture


@pytest.mark.parametrize("place", ["a sliding window", "a GPU", "a GPU with an old ONNX Runtime"])
def test_samples_with_copies_of_the_prompt(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None, place: str
) -> None:
    """Where one stored prompt does not do: the texts of `generate`, and what the rows take."""
    bundle = models.bundle("tgt" if place == "a sliding window" else "tgt-cuda")
    device = CPU
    if place == "a sliding window":
        slides = replace(bundle.manifest, kv=KVSpec("float32", bundle.manifest.kv.positions, 8))
        bundle = Bundle(bundle.path, slides, bundle.digest)
    else:
        device = Device("cpu", resident=True)
    if place == "a GPU with an old ONNX Runtime":
        monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset({"attention_bias"}))
    with Engine(bundle, threads=1, device=device) as engine:
        options = {"temperature": 0.5, **RAW}
        wanted = [engine.generate(LONG, method="none", sample_index=n, **options).token_ids for n in range(6)]
        assert len(set(wanted)) > 1
        for method in ("none", "ngram", "auto"):
            found = engine.best_of(LONG, n=6, method=method, **options)
            assert [candidate.token_ids for candidate in found.candidates] == wanted
            lone = place == "a GPU with an old ONNX Runtime"
            assert found.exactness == ("rounding" if lone else "bitwise")
            assert found.memory.kv_prefix_bytes == 0
            kv, sizes = bundle.manifest.kv, bundle.manifest.sizes
            position = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * np.dtype(kv.dtype).itemsize
            assert found.memory.kv_rows_bytes == found.memory.kv_copied_bytes
            assert found.memory.kv_rows_bytes >= 6 * position * (found.usage.prompt_tokens + 24)
            assert found.memory.kv_saved == 0.0
            assert found.timings.prefill_s > 0.0
            assert found.to_json()["graph"] == "target"
            assert "generate" in found.to_json()["exact_to"]
        short = engine.best_of(LONG, n=6, method="none", **(options | {"max_tokens": 1}))
        assert short.memory.kv_rows_bytes >= 6 * position * found.usage.prompt_tokens
        cut = engine.best_of(LONG, n=6, method="none", budget_tokens=12, **options)
        assert cut.cut
        assert engine.generate(LONG, method="ngram", sample_index=2, **options).token_ids == wanted[2]


def test_cancelling_while_a_prompt_is_read_that_rows_copy(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run that is under way is the last one."""
    engine = models.engine("tgt-cuda", device=Device("cpu", resident=True))
    lengths: list[int] = []
    read = RowPool.run

    def watched(self: RowPool, first: int, tokens: Sequence[list[int]], *, rows: int) -> Any:
        lengths.append(len(tokens[0]))
        run.cancel()
        return read(self, first, tokens, rows=rows)

    monkeypatch.setattr(RowPool, "run", watched)
    run = BestOf(engine, text_of(400), RAW, n=4)  # type: ignore[arg-type]
    found = run.run()
    assert lengths == [PREFILL_CHUNK]
    assert (found.winner, found.candidates) == (None, ())
    monkeypatch.undo()
    monkeypatch.setenv("SPECRUN_HOME", str(models.home))
    found = engine.best_of(text_of(400), n=2, **RAW)
    wanted = [engine.generate(text_of(400), temperature=0.8, sample_index=n, **RAW).token_ids for n in range(2)]
    assert [candidate.token_ids for candidate in found.candidates] == wanted


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_that_copy_a_prompt_fit_into_the_memory(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Buffers grow in steps, far beyond a short prompt and answer."""
    engine = models.engine("tgt-cuda", device=Device("cpu", resident=True))
    sizes = engine.bundle.manifest.sizes
    row = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * 2 * engine.target.positions  # under a step here
    monkeypatch.setattr("specrun.runtime.best_of.run.memory_for_rows", lambda device: rows * row + row // 2)
    found = engine.best_of(PROMPT, n=5, **RAW)
    assert len(found.candidates) == 5
    assert found.memory.kv_rows_bytes == max(1, rows) * row
