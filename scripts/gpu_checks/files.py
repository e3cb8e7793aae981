"""Files that appear whole, and their digests."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

CHUNK = 1 << 22


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, sees the old or the new one and nothing between."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for a JSON value."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            digest.update(block)
    return digest.hexdigest()
