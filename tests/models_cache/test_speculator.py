"""Speculators of a bundle: they come and go whole, are found by name, and belong to one export of one model."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.models_cache import (
    Bundle,
    CacheError,
    IntegrityError,
    ManifestError,
    ModelNotFoundError,
    SpeculatorManifest,
    UsageError,
    find_bundle,
    find_speculator,
    load_bundle,
    remove_bundle,
    remove_speculator,
    scan_speculators,
    verify_bundle,
)
from specrun.models_cache.speculator import VOCABULARY_NAME, load_speculator, speculator_or_build
from specrun.models_cache.store import bundle_or_build

from .conftest import write_files
from .speculator_files import write_speculator_files

ROOT = Path(__file__).parents[2]


def litter(home: Path) -> list[Path]:
    return sorted((home / "staging").rglob("*")) if (home / "staging").exists() else []


def test_a_speculator_comes_and_the_bundle_stays_what_it_is(bundle: Bundle, home: Path) -> None:
    assert bundle.speculators() == []
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    assert made.path == bundle.path / "speculators" / "heads"
    assert made.manifest.target_digest == bundle.target_digest
    assert sorted(made.manifest.files) == ["speculator.onnx", "speculator.onnx.data", VOCABULARY_NAME]
    again = find_bundle("tiny")
    assert (again.digest, again.target_digest) == (bundle.digest, bundle.target_digest)
    assert again.speculators() == [made]
    assert find_speculator(bundle, "heads") == made
    assert find_speculator(bundle, made.path) == made
    assert made.graph_path() == made.path / "speculator.onnx"
    assert made.weights_bytes == 6 * 64
    np.testing.assert_array_equal(made.vocabulary(), [0, 2, 3, 7])
    assert verify_bundle(bundle) == []
    assert litter(home) == []
    # A copy of the folder, elsewhere, has it too.
    shutil.copytree(bundle.path, home / "copy")
    assert [s.name for s in load_bundle(home / "copy").speculators()] == ["heads"]


def test_it_is_made_once(bundle: Bundle) -> None:
    first = speculator_or_build(bundle, "heads", write_speculator_files)

    def other(folder: Path) -> SpeculatorManifest:
        return write_speculator_files(folder, b"others")

    assert speculator_or_build(bundle, "heads", other) == first
    replaced = speculator_or_build(bundle, "heads", other, force=True)
    assert replaced.digest != first.digest
    # A broken one is made anew.
    (replaced.path / "speculator.onnx").unlink()
    assert speculator_or_build(bundle, "heads", write_speculator_files) == first


def test_it_is_removed_and_the_bundle_stays(bundle: Bundle, home: Path) -> None:
    for name in ("one", "two"):
        speculator_or_build(bundle, name, write_speculator_files)
    remove_speculator(bundle, "one")
    assert [s.name for s in bundle.speculators()] == ["two"]
    with pytest.raises(ModelNotFoundError, match=r"has no speculator 'one' \(the speculators here are: two"):
        remove_speculator(bundle, "one")
    (bundle.path / "speculators" / "two" / "manifest.json").write_text("{}")
    remove_speculator(bundle, "two")
    assert not (bundle.path / "speculators").exists()
    assert verify_bundle(find_bundle("tiny")) == []
    assert litter(home) == []


def test_one_that_was_made_for_another_export(bundle: Bundle) -> None:
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    kept = made.path.rename(made.path.parents[2] / "kept")
    other = bundle_or_build("tiny", lambda folder: write_files(folder, b"others"), force=True)
    (other.path / "speculators").mkdir()
    shutil.move(kept, other.path / "speculators" / "heads")
    with pytest.raises(ManifestError, match="heads was made for another export of tiny; attach it again with"):
        find_speculator(other, "heads")
    assert other.speculators() == []
    (entry,) = scan_speculators(other)
    assert entry.problem is not None
    assert entry.problem.startswith("heads was made for another export")
    assert [problem.file for problem in verify_bundle(other)] == ["speculators/heads"]
    # The same name is free for one that fits.
    assert speculator_or_build(other, "heads", write_speculator_files).manifest.target_digest == other.target_digest


def test_damage_is_found(bundle: Bundle) -> None:
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    data = made.path / "speculator.onnx.data"
    data.write_bytes(b"Heads " * 64)
    (problem,) = verify_bundle(bundle)
    assert problem.file == "speculators/heads/speculator.onnx.data"
    assert problem.message.startswith("is damaged")
    data.write_bytes(b"cut")
    with pytest.raises(IntegrityError, match=r"speculator\.onnx\.data is cut short"):
        find_speculator(bundle, "heads")
    assert find_speculator(bundle, "heads", check=False).name == "heads"


@pytest.mark.parametrize("name", ["", "..", "../tiny", "a/b", "/etc", "x\0", "heads "])
def test_names_do_not_leave_the_bundle(bundle: Bundle, name: str) -> None:
    with pytest.raises(UsageError):
        speculator_or_build(bundle, name, write_speculator_files)
    with pytest.raises(UsageError):
        remove_speculator(bundle, name)
    with pytest.raises(ModelNotFoundError):
        find_speculator(bundle, name)


def test_a_name_that_is_nearly_right(bundle: Bundle) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no speculator 'medusa' \(it has none yet"):
        find_speculator(bundle, "medusa")
    speculator_or_build(bundle, "medusa", write_speculator_files)
    with pytest.raises(ModelNotFoundError, match="did you mean 'medusa'"):
        find_speculator(bundle, "medusar")


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_do_not_leave_the_bundle(bundle: Bundle, tmp_path: Path) -> None:
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    outside = tmp_path / "outside"
    shutil.move(made.path, outside)
    made.path.symlink_to(outside)
    with pytest.raises(ManifestError, match="link that leaves the bundle"):
        find_speculator(bundle, "heads")
    made.path.unlink()
    shutil.move(outside, made.path)
    (made.path / "speculator.onnx").unlink()
    (tmp_path / "secret").write_bytes(b"graph")
    (made.path / "speculator.onnx").symlink_to(tmp_path / "secret")
    with pytest.raises(ManifestError, match="link that leaves"):
        find_speculator(bundle, "heads")


def test_a_folder_with_another_name(bundle: Bundle) -> None:
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    made.path.rename(made.path.with_name("renamed"))
    with pytest.raises(ManifestError, match="says that it is 'heads'"):
        find_speculator(bundle, "renamed")


Edit = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(schema_version=2), "update specrun"),
        (lambda d: d.update(schema_version="1"), "schema version"),
        (lambda d: d.update(surprise=1), "unknown key 'surprise'"),
        (lambda d: d.pop("taps"), "'taps' is missing"),
        (lambda d: d.update(name="../x"), "cannot name"),
        (lambda d: d.update(layout="eagle9"), "do not go together"),
        (lambda d: d.update(method="medusa"), "do not go together"),
        (lambda d: d["graphs"].clear(), "do not go together"),
        (lambda d: d.update(target_digest="x"), "sha256 of the target"),
        (lambda d: d["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}), "must be relative"),
        (lambda d: d["files"].pop("speculator.onnx"), "files does not list"),
        (lambda d: d["files"].pop("vocabulary.i32"), "go together"),
        (lambda d: d["files"]["vocabulary.i32"].update(size=12), "size of vocabulary.i32 is 12"),
        (lambda d: d["graphs"]["speculator"].update(file="/etc/passwd"), "must be relative"),
        (lambda d: d["sizes"].update(draft_vocabulary=9), "sizes.draft_vocabulary is 9"),
        (lambda d: d["sizes"].update(kv_heads=0), "sizes.kv_heads is 0"),
        (lambda d: d["sizes"].update(hidden=2**40), "sizes.hidden is"),
        (lambda d: d.update(taps=[1, 0]), "taps must be ascending"),
        (lambda d: d.update(taps=[]), "taps must be ascending"),
        (lambda d: d.update(acceptance=[[2]]), "outside 0 .. 1"),
        (lambda d: d.update(acceptance=[]), "acceptance is empty"),
        (lambda d: d.update(acceptance=[[0.5], []]), "acceptance is empty"),
    ],
)
def test_manifests_that_cannot_be(bundle: Bundle, edit: Edit, message: str) -> None:
    path = speculator_or_build(bundle, "heads", write_speculator_files).path
    data = json.loads((path / "manifest.json").read_text())
    edit(data)
    (path / "manifest.json").write_text(json.dumps(data))
    with pytest.raises(ManifestError) as caught:
        load_speculator(bundle, path)
    assert message in str(caught.value)


@pytest.mark.parametrize("ids", [[0, 2, 2, 7], [-1, 2, 3, 7], [0, 2, 3, 8]])
def test_a_vocabulary_that_cannot_be(bundle: Bundle, ids: list[int]) -> None:
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    np.array(ids, "<i4").tofile(made.path / VOCABULARY_NAME)
    with pytest.raises(IntegrityError, match="ascending token ids"):
        find_speculator(bundle, "heads").vocabulary()


def test_a_whole_vocabulary_needs_no_table(bundle: Bundle) -> None:
    def whole(folder: Path) -> SpeculatorManifest:
        manifest = write_speculator_files(folder, layout="medusa")
        (folder / VOCABULARY_NAME).unlink()
        sizes = dataclasses.replace(manifest.sizes, draft_vocabulary=8)
        return dataclasses.replace(manifest, sizes=sizes, taps=(1,))

    assert speculator_or_build(bundle, "heads", whole).vocabulary() is None


def test_a_draft_is_a_bundle_for_a_session(bundle: Bundle) -> None:
    made = speculator_or_build(bundle, "small", lambda folder: write_speculator_files(folder, layout="draft"))
    draft = made.draft_bundle(bundle)
    assert draft.path == made.path
    assert (draft.manifest.name, draft.manifest.features) == ("small", None)
    assert (draft.manifest.sizes.vocabulary, draft.manifest.sizes.tokens) == (4, 4)
    assert (draft.manifest.sizes.layers, draft.manifest.sizes.head_dim, draft.manifest.kv.positions) == (1, 16, 32)
    assert draft.manifest.special_ids == bundle.manifest.special_ids
    assert draft.weights_bytes == made.weights_bytes
    heads = speculator_or_build(bundle, "heads", write_speculator_files)
    with pytest.raises(UsageError, match="no draft model"):
        heads.draft_bundle(bundle)


def test_a_failed_build_leaves_nothing(bundle: Bundle, home: Path) -> None:
    def fails(folder: Path) -> SpeculatorManifest:
        write_speculator_files(folder)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        speculator_or_build(bundle, "heads", fails)

    def wrong(folder: Path) -> SpeculatorManifest:
        return dataclasses.replace(write_speculator_files(folder), taps=())

    with pytest.raises(ManifestError):
        speculator_or_build(bundle, "heads", wrong)
    assert not (bundle.path / "speculators").exists()
    assert litter(home) == []


def test_the_bundle_went_meanwhile(bundle: Bundle) -> None:
    bundle_or_build("tiny", lambda folder: write_files(folder, b"others"), force=True)
    with pytest.raises(CacheError, match="removed or replaced"):
        speculator_or_build(bundle, "heads", write_speculator_files)
    remove_bundle("tiny")
    with pytest.raises(CacheError, match="removed or replaced"):
        speculator_or_build(bundle, "heads", write_speculator_files)
    assert not bundle.path.exists()


def test_a_bundle_outside_the_cache(home: Path, tmp_path: Path) -> None:
    bundle_or_build("out", write_files, output=tmp_path / "out dir")
    bundle = load_bundle(tmp_path / "out dir")
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    assert made.path == tmp_path / "out dir" / "speculators" / "heads"
    assert not (home / "models").exists()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


_WORKER = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from specrun.models_cache import find_bundle
from specrun.models_cache.speculator import speculator_or_build
from tests.models_cache.speculator_files import write_speculator_files

def build(folder):
    manifest = write_speculator_files(folder)
    print("building", flush=True)
    time.sleep(float(sys.argv[1]))
    return manifest

print(speculator_or_build(find_bundle("tiny"), "heads", build).digest, flush=True)
"""


def _start(seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _WORKER.format(root=str(ROOT)), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))


def test_two_processes_at_once(bundle: Bundle, home: Path) -> None:
    workers = [_start(0.3), _start(0.3)]
    outputs = [worker.communicate(timeout=60)[0].split() for worker in workers]
    assert all(worker.returncode == 0 for worker in workers)
    assert sum(output.count("building") for output in outputs) == 1
    assert len({output[-1] for output in outputs}) == 1
    assert litter(home) == []


def test_killed_half_way(bundle: Bundle, home: Path) -> None:
    worker = _start(60)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "building\n"
    worker.kill()
    worker.communicate(timeout=60)
    assert find_bundle("tiny").speculators() == []
    assert litter(home) != []
    assert speculator_or_build(bundle, "heads", write_speculator_files).name == "heads"
    assert litter(home) == []
