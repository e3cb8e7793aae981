"""Small targets in torch and stores of random text, for tests that need no bundle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from specrun.export.bundle import export_bundle
from specrun.export.training.self_text import Dialogue
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.text_store import TextStore
from specrun.export.training.text_writer import write_text
from specrun.models_cache.layout import Bundle
from specrun.models_cache.progress import no_progress

from ...conftest import write_tiny_source

VOCABULARY, HIDDEN, TAPS = 60, 64, 2
TOKENS = 5000  # of the text of `written`


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch on one thread, with the same random numbers for every test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def parts() -> TargetParts:
    """A random target in float32 whose draft vocabulary lacks some tokens."""
    kept = torch.tensor([token for token in range(VOCABULARY) if token % 7])
    return TargetParts(
        embedding=torch.randn(VOCABULARY, HIDDEN) * 0.5,
        head=torch.randn(len(kept), HIDDEN) * 0.3,
        final_norm=1 + 0.3 * torch.rand(HIDDEN),
        vocabulary=kept,
        epsilon=1e-5,
        rope_theta=10_000.0,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=96,
    )


@pytest.fixture
def store(tmp_path: Path) -> TextStore:
    """Three shards of short random dialogues, each with a user's part and an answer, some with two."""
    rng = np.random.default_rng(3)
    store = TextStore(tmp_path / "text")
    for _ in range(3):
        store.add([random_dialogue(rng) for _ in range(12)])
    return store


def random_dialogue(rng: np.random.Generator) -> Dialogue:
    length = int(rng.integers(5, 24))
    answer = np.zeros(length, bool)
    answer[int(rng.integers(1, 4)) :] = True
    if length > 14:
        answer[8:11] = False
    features = rng.standard_normal((length, TAPS * HIDDEN)).astype(np.float16)
    return Dialogue(rng.integers(0, VOCABULARY, length).astype(np.int32), answer, features)


@pytest.fixture(scope="session")
def tiny_fp32(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The random model of `tests.conftest` in float32, which has a chat template."""
    folder = tmp_path_factory.mktemp("tiny fp32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRUN_HOME", str(folder / "home"))
        return export_bundle(str(write_tiny_source(folder / "tiny")), precision="fp32")


@pytest.fixture(scope="session")
def written(tiny_fp32: Bundle, tmp_path_factory: pytest.TempPathFactory) -> TextStore:
    """Text of that model, by two processes; copy it, do not change it."""
    folder = tmp_path_factory.mktemp("written") / "text"
    return write_text(tiny_fp32, folder, TOKENS, seed=0, threads=2, prompts=None, progress=no_progress)
