"""Bundles as files: paths with spaces and other scripts, cut files, moved folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specrun.models_cache.errors import SpecrunError
from specrun.runtime import Engine

from .conftest import TinyModels
from .tiny_bundles import PROMPT, export_tiny, random_tensors, write_model

NAME = "modèle 日本語 пример"


def test_spaces_and_other_scripts_in_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp#5802, ollama#16493: non-ASCII and spaces in source, model and cache paths: loads, named right."""
    home = tmp_path / "Кэш of ü"
    monkeypatch.setenv("SPECRUN_HOME", str(home))
    source = write_model(tmp_path / "poids 重み", random_tensors(1), vocabulary=288, hidden=64)
    bundle = export_tiny(NAME, source)
    assert bundle.path == home / "models" / NAME
    with Engine.load(NAME, draft=bundle.path, threads=1) as engine:
        result = engine.generate(PROMPT, max_tokens=8, draft_length=3, raw=True, ignore_eos=True)
        assert result.model == NAME
        assert result.usage.completion_tokens == 8
        engine.save_ngrams(tmp_path / "表.npz")
    assert list((home / "calibration").iterdir())


@pytest.mark.parametrize("kept", [0.5, 0.99, -1])
@pytest.mark.parametrize("file", ["target.onnx.data", "target.onnx", "tokenizer.json"])
def test_a_truncated_draft(models: TinyModels, tmp_path: Path, file: str, kept: float) -> None:
    """lucebox#438: a cut file of the draft is an error at load that names the file."""
    models.bundle("tgt")
    draft = tmp_path / "draft"
    shutil.copytree(models.bundle("mix").path, draft)
    data = (draft / file).read_bytes()
    (draft / file).write_bytes(data[: int(len(data) * kept) if kept > 0 else -1])
    with pytest.raises(SpecrunError, match=file):
        Engine.load("tgt", draft=draft, threads=1)
    (draft / file).unlink()
    with pytest.raises(SpecrunError, match=file):
        Engine.load("tgt", draft=draft, threads=1)


def test_a_moved_bundle(models: TinyModels, tmp_path: Path) -> None:
    """A bundle names nothing outside its folder: a copy elsewhere gives the same text."""
    expected = models.engine("tgt").generate(PROMPT, max_tokens=12, raw=True)
    moved = tmp_path / "elsewhere"
    shutil.copytree(models.bundle("tgt").path, moved)
    with Engine.load(moved, threads=1) as engine:
        assert engine.generate(PROMPT, max_tokens=12, raw=True).token_ids == expected.token_ids
