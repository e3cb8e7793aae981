"""A folder in parts and back: nothing that is missing, cut or changed goes unseen, and nothing is half joined."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from gpu_checks.errors import CheckError
from gpu_checks.main import main
from gpu_checks.packing import INDEX, SUMS, check_sums, join, pack, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of many sizes, one of them empty, one exactly a part long."""
    root = tmp_path / "folder"
    (root / "wheels").mkdir(parents=True)
    rng = random.Random(1)
    for name, size in (("wheels/a.whl", 2500), ("wheels/b c.whl", 1000), ("empty", 0), ("m.gguf", 4321)):
        (root / name).write_bytes(rng.randbytes(size))
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("part_bytes", [500, 1000, 2500, 7821, 10**9])
def test_there_and_back(folder: Path, tmp_path: Path, part_bytes: int) -> None:
    count = pack(folder, tmp_path / "parts", part_bytes=part_bytes)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "parts").glob("part-*"))]
    assert len(sizes) == count
    assert all(size == part_bytes for size in sizes[:-1])
    assert 0 < sizes[-1] <= part_bytes
    assert join(tmp_path / "parts", tmp_path / "joined") == 4
    assert contents(tmp_path / "joined") == contents(folder)


def test_parts_stay_below_60_mb() -> None:
    from gpu_checks.packing import PART_BYTES

    assert PART_BYTES < 60_000_000


@pytest.mark.parametrize(
    ("harm", "says"),
    [("flip", "part-001 is damaged"), ("cut", "part-001 has 999 bytes"), ("remove", "part-001 is missing")],
)
def test_a_corrupt_part(folder: Path, tmp_path: Path, harm: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts, joined = tmp_path / "parts", tmp_path / "joined"
    pack(folder, parts, part_bytes=1000)
    part = parts / "part-001"
    data = bytearray(part.read_bytes())
    if harm == "flip":
        data[500] ^= 1
        part.write_bytes(data)
    elif harm == "cut":
        part.write_bytes(data[:-1])
    else:
        part.unlink()
    assert main(["join", str(joined), "--parts", str(parts)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert says in error
    assert "copy this part" in error
    assert not joined.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_is_not_written_over(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "parts")
    with pytest.raises(CheckError, match="is not empty"):
        join(tmp_path / "parts", folder)
    with pytest.raises(CheckError, match="is not empty"):
        pack(folder, tmp_path / "parts")
    with pytest.raises(CheckError, match="holds no files"):
        pack(tmp_path / "nothing", tmp_path / "other")


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", ""])
def test_an_index_that_leaves_the_folder(folder: Path, tmp_path: Path, name: str) -> None:
    parts = tmp_path / "parts"
    pack(folder, parts)
    index = json.loads((parts / INDEX).read_text())
    index["files"][0]["path"] = name
    (parts / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckError, match="inside the folder"):
        join(parts, tmp_path / "joined")


@pytest.mark.parametrize("text", ["", "[]", '{"files": [], "parts": [{}]}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckError, match="cannot be read"):
        join(tmp_path, tmp_path / "joined")


def test_an_index_of_other_files(folder: Path, tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    pack(folder, parts)
    index = json.loads((parts / INDEX).read_text())
    index["files"][-1]["size"] += 1
    (parts / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckError, match="end before"):
        join(parts, tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_the_sums_of_a_folder(folder: Path) -> None:
    check_sums(folder)  # without any there is nothing to compare
    write_sums(folder)
    check_sums(folder)
    assert len((folder / SUMS).read_text().splitlines()) == 4
    wheel = folder / "wheels" / "b c.whl"
    wheel.write_bytes(wheel.read_bytes()[::-1])
    with pytest.raises(CheckError, match=r"wheels/b c\.whl in .* is damaged"):
        check_sums(folder)
    wheel.unlink()
    with pytest.raises(CheckError, match="is missing"):
        check_sums(folder)


def test_sums_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "SHA256SUMS").write_bytes(b"\xff\xfe  m.gguf\n")
    with pytest.raises(CheckError, match=r"m\.gguf in .* is damaged"):
        check_sums(tmp_path)
