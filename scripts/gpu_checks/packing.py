"""A folder as numbered parts of limited size, and back: for places that take only small files.

    parts.json   {"files": [{path, size, sha256}], "parts": [{name, size, sha256}]}
    part-000 ..  the bytes of all files behind each other, cut wherever a part is full

SHA256SUMS in the folder itself, in the form that `sha256sum -c` reads, says what must be in it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

from gpu_checks.errors import CheckError
from gpu_checks.files import CHUNK, sha256_of, write_json, write_whole

INDEX: Final = "parts.json"
SUMS: Final = "SHA256SUMS"
PART_BYTES: Final = 59_000_000  # of a part, below 60 MB


def pack(folder: Path, parts: Path, *, part_bytes: int = PART_BYTES) -> int:
    """Write the files below `folder` as parts of at most `part_bytes` into `parts`, new or empty; how many there are.

    Raises CheckError: nothing to pack, or a folder of parts that holds something.
    """
    paths = _files(folder)
    if not paths:
        raise CheckError(f"{folder} holds no files to pack: collect some with `gpu_check collect {folder}`.")
    if parts.exists() and any(parts.iterdir()):
        raise CheckError(f"{parts} is not empty: give a new folder for the parts.")
    parts.mkdir(parents=True, exist_ok=True)
    files = [
        {"path": p.relative_to(folder).as_posix(), "size": p.stat().st_size, "sha256": sha256_of(p)} for p in paths
    ]
    written: list[dict[str, Any]] = []
    for name, blocks in _parts(paths, part_bytes):
        digest, size = hashlib.sha256(), 0
        with (parts / name).open("wb") as out:
            for block in blocks:
                out.write(block)
                digest.update(block)
                size += len(block)
        written.append({"name": name, "size": size, "sha256": digest.hexdigest()})
    write_json(parts / INDEX, {"files": files, "parts": written})
    return len(written)


def join(parts: Path, folder: Path) -> int:
    """Make `folder`, new or empty, from its parts, whole or not at all; how many files it has.

    Raises CheckError naming the part that is missing, cut or changed, or the folder that holds something.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckError(f"{folder} is not empty: give a new folder for the files.")
    files, listed = _index(parts)
    for part in listed:
        _check_part(parts / part["name"], part)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.absolute().parent, prefix=f".{folder.name}.") as name:
        whole = Path(name) / "whole"
        whole.mkdir()
        blocks = _blocks([parts / part["name"] for part in listed])
        rest = b""
        for file in files:
            path = whole / file["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            digest, missing = hashlib.sha256(), int(file["size"])
            with path.open("wb") as out:
                while missing:
                    rest = rest or next(blocks, b"")
                    if not rest:
                        raise CheckError(f"The parts in {parts} end before {file['path']} does: pack the folder again.")
                    piece, rest = rest[:missing], rest[missing:]
                    out.write(piece)
                    digest.update(piece)
                    missing -= len(piece)
            if digest.hexdigest() != file["sha256"]:
                raise CheckError(f"{file['path']} is not what was packed: pack the folder again.")
        if folder.exists():
            folder.rmdir()
        shutil.move(whole, folder)
    return len(files)


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS for the files below `folder`."""
    paths = [path for path in _files(folder) if path.name != SUMS]
    write_whole(folder / SUMS, "".join(f"{sha256_of(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths))


def check_sums(folder: Path) -> None:
    """Compare the files of `folder` with its SHA256SUMS, where it has one; CheckError names the first that differs."""
    sums = folder / SUMS
    if not sums.is_file():
        return
    for line in sums.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        path = folder / _inside(name)
        if not path.is_file():
            raise CheckError(f"{name} is missing from {folder}: join the parts again, or collect the files anew.")
        if sha256_of(path) != digest:
            raise CheckError(f"{name} in {folder} is damaged: join the parts again, or collect the files anew.")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _parts(paths: list[Path], part_bytes: int) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(name, its blocks) of each part; the blocks must be taken before the next part."""
    blocks, rest = _blocks(paths), [b""]

    def fill() -> Iterator[bytes]:
        room = part_bytes
        while room:
            block = rest[0] or next(blocks, b"")
            if not block:
                return
            rest[0] = block[room:]
            yield block[:room]
            room -= min(room, len(block))

    total = sum(path.stat().st_size for path in paths)
    for number in range(max(1, -(-total // part_bytes))):
        yield f"part-{number:03}", fill()


def _blocks(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(CHUNK):
                yield block


def _index(parts: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        index = json.loads((parts / INDEX).read_text(encoding="utf-8"))
        files = [{**file, "path": _inside(file["path"]), "size": int(file["size"])} for file in index["files"]]
        listed = [{**part, "name": _inside(part["name"]), "size": int(part["size"])} for part in index["parts"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckError(f"{parts / INDEX} cannot be read ({error}): copy it again.") from error
    return files, listed


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts:
        raise CheckError(f"{name!r} does not name a file inside the folder: pack the folder again.")
    return name


def _check_part(path: Path, part: dict[str, Any]) -> None:
    if not path.is_file():
        raise CheckError(f"{path} is missing: copy this part.")
    if path.stat().st_size != part["size"]:
        raise CheckError(f"{path} has {path.stat().st_size} bytes instead of {part['size']}: copy this part again.")
    if sha256_of(path) != part["sha256"]:
        raise CheckError(f"{path} is damaged (its sha256 differs): copy this part again.")
