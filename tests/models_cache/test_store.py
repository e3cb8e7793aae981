from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrun.models_cache import diskerrors, store
from specrun.models_cache.errors import CacheError, IntegrityError, ManifestError, ModelNotFoundError, UsageError
from specrun.models_cache.integrity import verify_bundle
from specrun.models_cache.layout import Bundle, find_bundle, list_bundles
from specrun.models_cache.manifest import MANIFEST_NAME, Manifest
from specrun.models_cache.store import bundle_or_build, hold_lock, new_bundle, remove_bundle

from .conftest import manifest_for, write_files

Build = Callable[[Path], Manifest]


def litter(home: Path) -> list[Path]:
    """What should not be there after the work: everything in the staging folder."""
    staging = home / "staging"
    return sorted(staging.rglob("*")) if staging.exists() else []


def test_a_new_bundle(home: Path) -> None:
    seen = []
    with new_bundle("my model", progress=lambda label, done, total: seen.append(label)) as staging:
        (staging.path / "parts" / "medusa").mkdir(parents=True)
        (staging.path / "parts" / "medusa" / "heads.onnx").write_bytes(b"heads")
        bundle = staging.finish(write_files(staging.path))
    assert bundle.path == home / "models" / "my model"
    assert bundle.manifest.name == "my model"
    assert sorted(bundle.manifest.files) == ["parts/medusa/heads.onnx", "target.onnx", "target.onnx.data"]
    assert verify_bundle(bundle) == []
    assert find_bundle("my model") == bundle
    assert "hashing target.onnx.data" in seen
    assert litter(home) == []


def test_the_same_files_give_the_same_digest(home: Path, build: Build) -> None:
    first = bundle_or_build("tiny", build)
    again = bundle_or_build("tiny", build, force=True)
    assert first.digest == again.digest


def test_without_finish_nothing_appears(home: Path) -> None:
    with new_bundle("tiny") as staging:
        write_files(staging.path)
    assert list_bundles() == []
    assert litter(home) == []


def test_an_interruption_leaves_nothing(home: Path) -> None:
    def interrupted(folder: Path) -> Manifest:
        write_files(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundle_or_build("tiny", interrupted)
    assert list_bundles() == []
    assert litter(home) == []


def test_a_failed_replacement_keeps_the_old_bundle(bundle: Bundle, home: Path) -> None:
    def fail(folder: Path) -> Manifest:
        write_files(folder, b"new")
        raise RuntimeError("the exporter broke")

    with pytest.raises(RuntimeError, match="the exporter broke"):
        bundle_or_build("tiny", fail, force=True)
    assert find_bundle("tiny") == bundle
    assert verify_bundle(bundle) == []
    assert litter(home) == []


def only_a_graph(folder: Path) -> Manifest:
    (folder / "target.onnx").write_bytes(b"x")
    return manifest_for()


def a_link(folder: Path) -> Manifest:
    os.symlink(folder.parent, folder / "x")
    return write_files(folder)


def an_empty_file(folder: Path) -> Manifest:
    (folder / "empty").touch()
    return write_files(folder)


@pytest.mark.parametrize(
    ("broken", "error", "said"),
    [
        (only_a_graph, ManifestError, "files does not list"),
        (a_link, IntegrityError, "x is a link or special file"),
        (an_empty_file, IntegrityError, "empty is empty"),
    ],
)
def test_what_is_no_bundle_is_refused(home: Path, broken: Build, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        bundle_or_build("tiny", broken)
    assert list_bundles() == []
    assert litter(home) == []


def test_build_only_once(home: Path, build: Build) -> None:
    first = bundle_or_build("tiny", build)
    assert bundle_or_build("tiny", lambda _: pytest.fail("built again")) == first
    changed = bundle_or_build("tiny", lambda folder: write_files(folder, b"new"), force=True)
    assert changed.digest != first.digest
    assert find_bundle("tiny") == changed
    assert verify_bundle(changed) == []
    assert litter(home) == []


def test_a_broken_bundle_is_built_anew(bundle: Bundle, build: Build) -> None:
    (bundle.path / "target.onnx").unlink()
    again = bundle_or_build("tiny", build)
    assert verify_bundle(again) == []
    (bundle.path / MANIFEST_NAME).write_text("{")
    assert verify_bundle(bundle_or_build("tiny", build)) == []


def test_threads_build_once(home: Path) -> None:
    built: list[int] = []
    inside = threading.Event()
    results: list[Bundle] = []
    waits: list[str] = []

    def slow(folder: Path) -> Manifest:
        built.append(1)
        inside.set()
        # The other thread reports that it waits for the lock; only then go on.
        assert waiting.wait(10)
        return write_files(folder)

    waiting = threading.Event()

    def report(label: str, done: int, total: int | None) -> None:
        waits.append(label)
        if label.startswith("waiting for another specrun that works on tiny"):
            waiting.set()

    first = threading.Thread(target=lambda: results.append(bundle_or_build("tiny", slow)))
    first.start()
    assert inside.wait(10)
    results.append(bundle_or_build("tiny", slow, progress=report))
    first.join()
    assert built == [1]
    assert results[0] == results[1]
    assert waiting.is_set()


def test_a_held_lock_can_time_out(home: Path, build: Build) -> None:
    with (
        hold_lock(home / "locks" / "tiny.lock"),
        pytest.raises(CacheError, match=r"tiny.lock is held by another specrun"),
    ):
        bundle_or_build("tiny", build, lock_timeout=0.05)
    assert bundle_or_build("tiny", build).manifest.name == "tiny"


def test_litter_of_the_dead_is_cleared_and_of_the_living_is_not(home: Path, build: Build) -> None:
    for name in ("dead", "living", "tiny"):
        (home / "staging" / name / "x").mkdir(parents=True)
    with hold_lock(home / "locks" / "living.lock"):
        bundle_or_build("tiny", build)
    assert litter(home) == [home / "staging" / "living", home / "staging" / "living" / "x"]


def test_a_bundle_that_was_moved_aside_comes_back(bundle: Bundle, home: Path, build: Build) -> None:
    aside = home / "staging" / "tiny" / "replaced"
    aside.parent.mkdir(parents=True)
    bundle.path.rename(aside)
    assert find_bundle("tiny") == bundle
    aside.parent.mkdir(exist_ok=True)
    bundle.path.rename(aside)
    bundle_or_build("other", build)
    assert [found.path.name for found in list_bundles()] == ["other", "tiny"]
    assert litter(home) == []


def test_remove(bundle: Bundle, home: Path) -> None:
    remove_bundle("tiny")
    assert not bundle.path.exists()
    assert litter(home) == []
    with pytest.raises(ModelNotFoundError, match="no model 'tiny' to remove"):
        remove_bundle("tiny")
    with pytest.raises(UsageError):
        remove_bundle("../tiny")


def test_remove_a_broken_bundle(bundle: Bundle) -> None:
    (bundle.path / MANIFEST_NAME).unlink()
    remove_bundle("tiny")
    assert not bundle.path.exists()


def test_publish_outside_the_cache(home: Path, tmp_path: Path, build: Build) -> None:
    output = tmp_path / "aus gabe" / "mein Modell"
    bundle = bundle_or_build("tiny", build, output=output)
    assert bundle.path == output
    assert bundle.manifest.name == "tiny"
    assert verify_bundle(bundle) == []
    assert list(output.parent.iterdir()) == [output]
    assert list_bundles() == []
    with pytest.raises(UsageError, match="holds a bundle already; choose another output folder or pass --force"):
        bundle_or_build("tiny", build, output=output)
    changed = bundle_or_build("tiny", lambda folder: write_files(folder, b"new"), output=output, force=True)
    assert changed.digest != bundle.digest
    assert list(output.parent.iterdir()) == [output]


def test_other_things_at_the_output_are_not_replaced(tmp_path: Path, build: Build) -> None:
    output = tmp_path / "out"
    output.mkdir()
    assert bundle_or_build("tiny", build, output=output).path == output
    for path in (tmp_path / "folder" / "thesis.txt", tmp_path / "file"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
        target = path.parent if path.parent != tmp_path else path
        with pytest.raises(CacheError, match="exists and is no bundle, so it is not replaced"):
            bundle_or_build("tiny", build, output=target, force=True)
        assert path.read_text() == "precious"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "rename", "build"])
def test_a_full_disk(
    bundle: Bundle, home: Path, build: Build, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def full(*args: object, **kwargs: object) -> Manifest:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if call != "build":
            patch.setattr(os, call, full)
        with pytest.raises(CacheError, match=r"disk of .* is full \(\d+ MB free, .*SPECRUN_HOME") as caught:
            bundle_or_build("tiny", full if call == "build" else build, force=True)
    assert str(home) in str(caught.value)
    assert find_bundle("tiny") == bundle
    assert verify_bundle(bundle) == []
    bundle_or_build("tiny", build, force=True)
    assert litter(home) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_cache_that_cannot_be_written(
    home: Path, build: Build, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def refuse(path: str, *args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(CacheError, match=r"cannot be written .*make the folder writable or set SPECRUN_HOME"):
        bundle_or_build("tiny", build)


def test_other_errors_pass_unchanged(home: Path, tmp_path: Path) -> None:
    def unreadable(folder: Path) -> Manifest:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "weights.gguf"))

    with pytest.raises(PermissionError):
        bundle_or_build("tiny", unreadable)
    with pytest.raises(FileNotFoundError), diskerrors.cache_errors(home):
        raise FileNotFoundError(errno.ENOENT, "No such file", str(home / "x"))


def test_somebody_who_keeps_writing_the_target(home: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.rename

    def taken(source: Path, target: Path) -> None:
        if Path(target) == home / "models" / "tiny":
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(source), None, str(target))
        real(source, target)

    monkeypatch.setattr(store.os, "rename", taken)
    with pytest.raises(CacheError, match="keeps being written by somebody else"):
        bundle_or_build("tiny", build)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a tmpfs here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_really_full_disk(small_disk: Path, build: Build) -> None:
    root = small_disk / "cache"
    with pytest.raises(CacheError, match=r"disk of .*cache is full"):
        bundle_or_build("tiny", lambda folder: write_files(folder, b"x" * 1_000_000), root=root)
    assert list_bundles(root) == []
    assert litter(root) == []
    assert verify_bundle(bundle_or_build("tiny", build, root=root)) == []


def test_a_really_read_only_cache(small_disk: Path, build: Build, tmp_path: Path) -> None:
    root = small_disk / "cache"
    bundle = bundle_or_build("tiny", build, root=root)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert find_bundle("tiny", root=root) == bundle
    assert verify_bundle(bundle) == []
    assert bundle_or_build("tiny", build, root=root) == bundle
    for change in (
        lambda: bundle_or_build("tiny", build, root=root, force=True),
        lambda: bundle_or_build("other", build, root=root),
        lambda: remove_bundle("tiny", root=root),
        lambda: bundle_or_build("tiny", build, root=small_disk / "elsewhere"),
    ):
        with pytest.raises(CacheError, match="cannot be written"):
            change()
    with pytest.raises(ModelNotFoundError):
        find_bundle("other", root=root)
    # Only the cache is read-only: an output folder elsewhere works.
    assert bundle_or_build("tiny", build, root=root, output=tmp_path / "out").digest == bundle.digest
