"""Best of N on real weights: SmolLM2-135M in 8 bits and in fp32, exported once a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specrun.export.bundle import export_bundle
from specrun.runtime import Engine
from specrun.runtime.best_of.prefix_session import Prefix
from specrun.runtime.kv_cache import KVCache

from ..weights import smollm2_gguf
from .checks import text_of

pytestmark = pytest.mark.weights

TALE = "The tide rises and falls twice a day, because the moon pulls at the sea. "


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """The bundle of a precision."""
    home = tmp_path_factory.mktemp("smollm2")

    def get(precision: str) -> Path:
        if not (home / precision).exists():
            export_bundle(str(smollm2_gguf()), name=precision, precision=precision, output=home / precision)
        return home / precision

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRUN_HOME", str(home / "cache"))
        yield get


@pytest.mark.parametrize(("precision", "threads"), [("int8", 2), ("fp32", 2), ("fp32", 5)])
def test_the_bits_of_a_sample(folder_of: Callable[[str], Path], precision: str, threads: int) -> None:
    """Behind 600 tokens, with and without speculation, alone and among others; 5 threads are more than KV heads."""
    with Engine.load(folder_of(precision), threads=threads) as engine:
        prompt = TALE * 34 + "Sum that up in one sentence."
        plain = engine.best_of(prompt, n=4, method="none", max_tokens=10, seed=3, certainties=True)
        assert plain.usage.prompt_tokens > 600
        assert plain.exactness == "bitwise"
        for n, options in ((4, {}), (2, {"draft_length": 4}), (1, {"draft_length": 2}), (1, {"method": "none"})):
            found = engine.best_of(
                prompt, n=n, max_tokens=10, seed=3, certainties=True, **({"method": "ngram"} | options)
            )
            assert found.candidates == plain.candidates[:n]


def test_logits_equal_those_of_copies(folder_of: Callable[[str], Path]) -> None:
    """Rows of an ordinary batch that hold the whole text, against rows behind the stored prompt."""
    with Engine.load(folder_of("fp32"), threads=2) as engine:
        prompt, target = engine.encode(text_of(300), raw=True), engine.target
        sizes, rows = target.sizes, 3
        engine.logits(prompt)
        copies = KVCache(
            layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, capacity=400, limit=400, batch=rows
        )
        for row in range(rows):
            copies.restore(target.cache.copy_of(len(prompt)), len(prompt), row)
        ordinary = target.over(copies)
        target.fit(len(prompt))
        shared = engine.prefix_graph().session(Prefix.of_cache(target.cache), rows, 64)
        shared.cache.lengths[:] = [1] * rows
        worst = 0.0
        for counts in ((1, 1, 1), (3, 1, 5), (2, 4, 1)):
            tokens = [prompt[7 * row : 7 * row + count] for row, count in enumerate(counts)]
            expected = ordinary.run_batch(tokens, rows=max(counts))
            found = shared.run_batch(tokens, rows=max(counts))
            for row, count in enumerate(counts):
                worst = max(worst, float(np.abs(found[row, -count:] - expected[row, -count:]).max()))
        assert worst <= 1e-4


def test_the_memory_of_keys_and_values(folder_of: Callable[[str], Path]) -> None:
    """768 tokens, 16 samples of up to 512: at least 55 % less than with copies."""
    with Engine.load(folder_of("int8"), threads=2) as engine:
        found = engine.best_of(text_of(768), raw=True, n=16, max_tokens=512, budget_tokens=1, seed=1)
        assert found.usage.prompt_tokens == 768
        assert found.memory.kv_saved >= 0.55
        assert found.memory.kv_prefix_bytes == engine.memory().kv_target_bytes
