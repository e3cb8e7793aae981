"""Speculators that come with specrun find their target by the digests of its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specrun.export import shipped_speculators as shipped
from specrun.export.bundle import export_bundle
from specrun.export.shipped_speculators import SHIPPED, ensure_shipped, shipped_speculators
from specrun.export.speculator_weights import JSON_NAME, TENSORS_NAME, read_speculator, write_speculator
from specrun.export.speculators import attach_speculator
from specrun.models_cache import Bundle, IntegrityError, find_bundle, remove_speculator, sha256_file

from .tiny_speculators import tiny_speculator, tiny_target


@pytest.fixture
def folder(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two speculators for the tiny model and one for another, as the package would have them."""
    weights = "model.safetensors"
    ours = tiny_target(**{weights: sha256_file(tiny_source / weights)})
    theirs = tiny_target(**{weights: "0" * 64})
    root = tmp_path / "shipped"
    for target, path, layout in (
        (ours, "tiny/eagle", "eagle3"),
        (ours, "tiny/medusa", "medusa"),
        (theirs, "other/medusa", "medusa"),
        (tiny_target(), "none/medusa", "medusa"),
    ):
        write_speculator(root / path, tiny_speculator(layout, target))
    monkeypatch.setattr(shipped, "SHIPPED", root)
    return root


@pytest.fixture
def bundle(tiny: str) -> Bundle:
    return find_bundle(tiny)


def test_they_are_found_by_the_weights(folder: Path, bundle: Bundle) -> None:
    assert shipped_speculators(bundle.manifest) == [folder / "tiny" / "eagle", folder / "tiny" / "medusa"]
    assert shipped_speculators(bundle.manifest, folder.parent / "nothing") == []


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_an_export_attaches_them(precision: str, folder: Path, tiny_source: Path) -> None:
    bundle = export_bundle(str(tiny_source), precision=precision)
    assert [(s.name, s.manifest.shipped) for s in bundle.speculators()] == [
        ("tiny-eagle3", True),
        ("tiny-medusa", True),
    ]
    digests = [s.digest for s in bundle.speculators()]
    again = export_bundle(str(tiny_source), precision=precision, force=True)
    assert [s.digest for s in again.speculators()] == digests


def test_a_bundle_without_them_gets_them_later(folder: Path, bundle: Bundle) -> None:
    assert [s.name for s in ensure_shipped(bundle)] == ["tiny-eagle3", "tiny-medusa"]
    assert ensure_shipped(bundle) == []
    remove_speculator(bundle, "tiny-medusa")
    assert [s.name for s in ensure_shipped(bundle)] == ["tiny-medusa"]


def test_a_newer_one_replaces_what_was_shipped_only(folder: Path, bundle: Bundle) -> None:
    mine = attach_speculator(bundle, tiny_speculator("eagle3", seed=9))
    ensure_shipped(bundle)
    for path in ("tiny/eagle", "tiny/medusa"):
        speculator = read_speculator(folder / path)
        newer = tiny_speculator(speculator.layout, speculator.target, seed=10)
        write_speculator(folder / path, newer)
    assert [s.name for s in ensure_shipped(bundle)] == ["tiny-medusa"]
    assert ensure_shipped(bundle) == []
    assert bundle.speculators()[0] == mine


def test_a_bundle_without_features_gets_none(folder: Path, bundle: Bundle) -> None:
    old = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, features=None))
    assert ensure_shipped(old) == []


def test_a_damaged_one_is_an_error(folder: Path, bundle: Bundle) -> None:
    (folder / "tiny" / "eagle" / TENSORS_NAME).write_bytes(b"")
    with pytest.raises(IntegrityError, match="no sound safetensors"):
        ensure_shipped(bundle)
    (folder / "tiny" / "eagle" / JSON_NAME).write_text("")
    with pytest.raises(IntegrityError, match="is not valid"):
        ensure_shipped(bundle)


def test_what_the_package_ships_is_sound() -> None:
    for path in SHIPPED.glob("*/*/speculator.json"):
        speculator = read_speculator(path.parent)
        assert speculator.target.source_files
        assert (path.parent.parent.name, path.parent.name) == (speculator.target.name, speculator.method)
