from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specrun.models_cache.errors import IntegrityError, ManifestError, ModelNotFoundError, UsageError
from specrun.models_cache.layout import (
    Bundle,
    cache_root,
    check_bundle_name,
    find_bundle,
    list_bundles,
    models_dir,
    scan_bundles,
)
from specrun.models_cache.manifest import MANIFEST_NAME


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECRUN_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECRUN_HOME", "relative")
    assert cache_root() == tmp_path / "relative"
    monkeypatch.setenv("SPECRUN_HOME", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_root().name in ("specrun", "Cache")


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5", "a b", "Überschrift", "模型", "a" * 128])
def test_good_names(name: str) -> None:
    assert check_bundle_name(name) == name


def test_names_are_normalised() -> None:
    assert check_bundle_name("u\u0308") == "\u00fc"


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a:b", "a\0", "a\n", "-x", "a.", " a", "a ", "a*", "a" * 129]
)
def test_bad_names(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a model"):
        check_bundle_name(name)


def test_find_by_name_and_by_path(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundle.path == models_dir() / "tiny"
    assert bundle.digest == hashlib.sha256((bundle.path / MANIFEST_NAME).read_bytes()).hexdigest()
    assert find_bundle("tiny") == bundle
    assert find_bundle(bundle.path) == bundle
    assert find_bundle(str(bundle.path)) == bundle
    moved = tmp_path / "Ünïcode dir" / "moved"
    shutil.copytree(bundle.path, moved)
    monkeypatch.chdir(moved.parent)
    found = find_bundle("moved")
    assert (found.path, found.digest) == (moved, bundle.digest)
    assert find_bundle("./moved") == found
    assert find_bundle(Path("moved")) == found


def test_the_cache_goes_before_a_folder_here(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(bundle.path, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert find_bundle("tiny").path == bundle.path
    assert find_bundle("./tiny").path == tmp_path / "tiny"


def test_not_found_says_what_to_run(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"specrun models pull smollm2-135m` to get it.*no model is here yet"):
        find_bundle("smollm2-135m")
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2-135m'\?.*pull smollm2-135m`.*export SOURCE"):
        find_bundle("smollm2")
    assert not home.exists()


def test_not_found_lists_what_is_there(bundle: Bundle, tmp_path: Path) -> None:
    for name, guess in (("other", ""), ("tinny", ", did you mean 'tiny'?")):
        with pytest.raises(ModelNotFoundError) as caught:
            find_bundle(name)
        assert str(caught.value) == (
            f"there is no model {name!r}{guess} (the models here are: tiny); "
            "make one of your own weights with `specrun export SOURCE`"
        )
    with pytest.raises(ModelNotFoundError, match=r"holds no manifest.json, so it is no bundle; .*specrun export"):
        find_bundle(tmp_path)
    for odd in ("", "../x", "a\0b", "x" * 5000, "/" + "x" * 5000, "~no-such-user/x"):
        with pytest.raises(ModelNotFoundError):
            find_bundle(odd)


def test_lists(bundle: Bundle, home: Path) -> None:
    broken = home / "models" / "broken"
    broken.mkdir()
    (home / "models" / ".hidden").mkdir()
    (home / "models" / "file").write_text("x")
    assert list_bundles() == [bundle]
    entries = scan_bundles()
    assert [(entry.name, entry.bundle is None) for entry in entries] == [("broken", True), ("tiny", False)]
    assert "holds no manifest.json" in str(entries[0].problem)
    with pytest.raises(ManifestError):
        find_bundle("broken")


def test_a_cut_file_is_seen_at_load(bundle: Bundle) -> None:
    with (bundle.path / "target.onnx.data").open("ab") as stream:
        stream.truncate(100)
    with pytest.raises(IntegrityError, match=r"target.onnx.data is cut short: 100 bytes instead of 512"):
        find_bundle("tiny")


def test_reading_never_writes(bundle: Bundle, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync"):
        monkeypatch.setattr(os, name, lambda *args, name=name, **kw: pytest.fail(f"os.{name} was called"))
    before = sorted(home.rglob("*"))
    assert find_bundle("tiny") == bundle
    assert list_bundles() == [bundle]
    assert sorted(home.rglob("*")) == before


def test_import_is_light() -> None:
    heavy = ["huggingface_hub", "filelock", "numpy", "onnx", "onnxruntime", "click", "httpx", "httpx2", "tqdm", "torch"]
    code = f"import sys, specrun.models_cache.sources; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
