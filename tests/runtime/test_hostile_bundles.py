"""Bundles whose manifest lies about its graph, or whose files it does not vouch for, are refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache.errors import ManifestError
from specrun.models_cache.layout import load_bundle
from specrun.runtime import Engine

from .conftest import TinyModels


@pytest.fixture
def edited(models: TinyModels, tmp_path: Path) -> Callable[[Callable[[dict[str, Any]], None]], Path]:
    """A copy of a sound bundle whose manifest an edit has changed."""

    def build(edit: Callable[[dict[str, Any]], None]) -> Path:
        folder = tmp_path / "bundle"
        shutil.copytree(models.bundle("tgt").path, folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        edit(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return build


CHANGES = [("layers", 1), ("layers", -1), ("kv_heads", 1), ("heads", 2), ("head_dim", 2), ("vocabulary", 8)]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_sizes_that_are_not_the_graphs(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path], name: str, change: int
) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["sizes"][name] += change

    with pytest.raises(ManifestError, match=r"does not describe its graph|features.taps"):
        Engine(load_bundle(edited(edit)), threads=1)


@pytest.mark.parametrize(
    ("path", "value"),
    [("sizes/tokens", 10**6), ("kv/positions", 1), ("name", "../../x"), ("name", "a\x1b[31m\nb")],
)
def test_numbers_and_names_that_cannot_be(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path], path: str, value: object
) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for parent in parents:
            manifest = manifest[parent]
        manifest[last] = value

    with pytest.raises(ManifestError):
        load_bundle(edited(edit))


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_files_that_the_manifest_does_not_list_are_not_read(
    edited: Callable[[Callable[[dict[str, Any]], None]], Path], tmp_path: Path, name: str
) -> None:
    folder = edited(lambda manifest: manifest["files"].pop(name))
    outside = tmp_path / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(ManifestError, match=f"does not list {name}"):
        Engine(load_bundle(folder), threads=1)


@pytest.mark.parametrize(
    ("speculator", "name", "change"),
    [
        ("medusa", "depth", -1),
        ("medusa", "depth", 1),
        ("medusa", "depth", 10**9),
        ("eagle", "kv_heads", 1),
        ("eagle", "head_dim", 2),
    ],
)
def test_sizes_that_are_not_those_of_a_speculators_graph(
    models: TinyModels, tmp_path: Path, speculator: str, name: str, change: int
) -> None:
    """Found when it is loaded, before anything runs."""
    folder = tmp_path / "bundle"
    shutil.copytree(models.bundle("heads").path, folder)
    file = folder / "speculators" / speculator / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["sizes"][name] += change
    file.write_text(json.dumps(manifest))
    with Engine(load_bundle(folder), threads=1) as engine, pytest.raises(ManifestError, match="does not describe its"):
        engine.generate("x", method=speculator, max_tokens=4)
