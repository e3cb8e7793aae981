"""Bundles and engines of the tiny models, built when first asked for and shared by all tests here.

tgt      small fp32 target with real attention      tgt-int8, tgt-int4, tgt-source: the same weights, quantised
self     a copy of tgt: everything is accepted      mix, mix-int8: tgt and noise, right about every second time
rnd      the same tokenizer, other weights: almost nothing is accepted
tgt-64   a context of 64 positions                  mix-48: a draft with a shorter context still
real128, real160, mix128   120 real tokens, padded vocabularies of 128 and 160
swapped  tgt with two tokens of its tokenizer swapped; other: another tokenizer
table    a fixed next-token table (see `TABLE`)     table-eos: another end-of-text id, in generation_config only
toy, toy-draft   eight tokens with known bigram probabilities
heads, heads-int8, heads40   tgt with random speculators (heads40: hidden size 40, so all in float32)
table-heads, toy-heads   table with speculators that are right, toy with speculators of known probabilities
tgt-cuda, tgt-cuda-int4, heads-cuda   the same, exported for the CUDA provider (which the CPU runs too)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from specrun.models_cache.layout import Bundle, find_bundle
from specrun.runtime import Engine
from specrun.runtime.device import Device

from . import tiny_bundles as tiny
from . import tiny_heads
from .toys import TABLE, TOY_DRAFT_LOGITS, TOY_LOGITS


class TinyModels:
    """The bundles by name, built on demand in a cache of their own, and engines over them."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        self._folders = root / "folders"
        self._engines: dict[tuple[object, ...], Engine] = {}

    def bundle(self, name: str) -> Bundle:
        """Build the bundle, or find it."""
        if not (self.home / "models" / name).exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SPECRUN_HOME", str(self.home))
                self._build(name)
        return find_bundle(name, root=self.home)

    def engine(self, name: str, draft: str | None = None, **options: int | str | Device) -> Engine:
        """A shared engine that has forgotten everything before."""
        key = (name, draft, *sorted(options.items()))
        if key not in self._engines:
            bundle = self.bundle(name)
            if draft is not None and not (bundle.path / "speculators" / draft).is_dir():
                self.bundle(draft)
            self._engines[key] = Engine.load(name, draft=draft, threads=1, **options)
        self._engines[key].reset()
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _build(self, name: str) -> None:
        folder = self._folders / name
        target = tiny.random_tensors(1)
        base, _, precision = name.partition("-int")
        base, dash, _ = base.partition("-cuda")
        device = "cuda" if dash else "cpu"
        precision = f"int{precision}" if precision else "fp16" if dash else "fp32"
        write: Callable[..., Path] = tiny.write_model
        if name == "tgt-source":
            folder.parent.mkdir(parents=True, exist_ok=True)
            tiny.write_gguf(folder.with_suffix(".gguf"), target)
            tiny.export_tiny(name, folder.with_suffix(".gguf"), "source")
            return
        if base in ("tgt", "self"):
            write(folder, target, vocabulary=288, hidden=64)
        elif base == "mix":
            write(folder, tiny.noisy(target, 0.05), vocabulary=288, hidden=64)
        elif base == "rnd":
            write(folder, tiny.random_tensors(2), vocabulary=288, hidden=64)
        elif base == "tgt-64":
            write(folder, target, vocabulary=288, hidden=64, context=64)
        elif base == "mix-48":
            write(folder, tiny.noisy(target, 0.05), vocabulary=288, hidden=64, context=48)
        elif base in ("real128", "real160", "mix128"):
            real = tiny.random_tensors(3, vocabulary=120)
            real = tiny.noisy(real, 0.05) if base == "mix128" else real
            size = int(base[-3:])
            tensors = tiny.padded_vocabulary(real, size)
            write(folder, tensors, vocabulary=size, hidden=64, tokenizer=tiny.tokenizer_json(tokens=120))
        elif base == "swapped":
            write(folder, target, vocabulary=288, hidden=64, tokenizer=tiny.tokenizer_json(swapped=(40, 77)))
        elif base == "other":
            write(folder, target, vocabulary=288, hidden=64, tokenizer=tiny.tokenizer_json(reverse=True))
        elif base == "heads":
            write(folder, target, vocabulary=288, hidden=64)
        elif base == "heads40":
            write(folder, tiny.random_tensors(1, hidden=40), vocabulary=288, hidden=40)
        elif base in ("table", "table-heads", "table-eos"):
            logits = tiny.table_logits(TABLE)
            eos = (0, tiny.token_id("!")) if base == "table-eos" else (0, 2)
            write(folder, tiny.bigram_tensors(logits), vocabulary=288, hidden=288, eos=eos)
        elif base in ("toy", "toy-heads", "toy-draft"):
            logits = TOY_DRAFT_LOGITS if base == "toy-draft" else TOY_LOGITS
            write(folder, tiny.bigram_tensors(logits), vocabulary=288, hidden=288)
        else:
            raise ValueError(name)
        bundle = tiny.export_tiny(name, folder, precision, device)
        if base.endswith("heads") or base == "heads40":
            attach = {"table-heads": tiny_heads.table_heads, "toy-heads": tiny_heads.toy_heads}
            attach.get(base, tiny_heads.random_heads)(bundle)


@pytest.fixture(scope="session")
def _models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModels]:
    models = TinyModels(tmp_path_factory.mktemp("tiny-models"))
    yield models
    models.close()


@pytest.fixture
def models(_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> TinyModels:
    """The tiny models; SPECRUN_HOME names their cache."""
    monkeypatch.setenv("SPECRUN_HOME", str(_models.home))
    return _models


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240229)
