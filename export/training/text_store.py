"""Dialogues on disk: shards of text, small enough to keep, and beside each the features, which are large."""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.export.training.self_text import Dialogue
from specrun.models_cache.errors import IntegrityError

SHARD_TOKENS = 32_768
_NAME = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True)
class Shard:
    """Dialogues one after the other.

    tokens i32 [n], answer bool [n]; starts i64 [dialogues + 1], with n at the end
    """

    tokens: NDArray[np.int32]
    answer: NDArray[np.bool_]
    starts: NDArray[np.int64]
    features_file: Path

    @property
    def features(self) -> NDArray[np.float16]:
        """f16 [n, taps * hidden], a memory map; opened anew each time, as there may be more shards than open files.

        Raises IntegrityError where they are missing or damaged.
        """
        found = _read_features(self.features_file)
        if found is None or len(found) != len(self.tokens):
            raise IntegrityError(
                f"{self.features_file} does not hold the features of its text: delete it, and it is computed again."
            )
        return found


class TextStore:
    """The shards of one folder, named WRITER-NUMBER, as several processes write.

    A shard counts by its text (.npz), which is written last. Its features (.npy) may be deleted: they can be computed
    from the text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sizes: dict[str, int] = {}

    def names(self, writer: int | None = None) -> list[str]:
        """The names of the shards, of one writer or of all, those of equal number together."""
        found = [path.stem for path in self.folder.glob("*-*.npz") if _NAME.fullmatch(path.stem)]
        pairs = sorted((int(number), int(by)) for by, number in (name.split("-") for name in found))
        return [f"{by}-{number:05d}" for number, by in pairs if writer is None or by == writer]

    def tokens(self, names: Sequence[str] | None = None) -> int:
        """How many tokens there are, in all shards or in those of these names."""
        return sum(map(self._size, self.names() if names is None else names))

    def lacking(self, width: int | None = None) -> list[str]:
        """The shards without features. width: of the features; those that do not fit their text are looked for too."""
        names = self.names()
        if width is None:
            return [name for name in names if not self._path(name, ".npy").is_file()]
        shapes = {name: getattr(_read_features(self._path(name, ".npy")), "shape", None) for name in names}
        return [name for name in names if shapes[name] != (self._size(name), width)]

    def add(self, dialogues: Sequence[Dialogue], writer: int = 0) -> None:
        """Write a shard; the text, whose presence makes it count, comes last."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = self.names(writer)
        name = f"{writer}-{int(names[-1].split('-')[1]) + 1 if names else 0:05d}"
        self.add_features(name, np.concatenate([dialogue.features for dialogue in dialogues]))
        part = self._path(name, ".part")
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate([dialogue.tokens for dialogue in dialogues]),
                answer=np.concatenate([dialogue.answer for dialogue in dialogues]),
                starts=np.cumsum([0, *(len(dialogue.tokens) for dialogue in dialogues)]),
            )
        os.replace(part, self._path(name, ".npz"))

    def add_features(self, name: str, features: NDArray[np.float16]) -> None:
        """Write the features of a shard."""
        part = self._path(name, ".part")
        rows = np.ascontiguousarray(features)
        with part.open("wb") as file:
            # Not by `np.save`, whose error on a full disk does not say so.
            np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(rows))
            file.write(rows.data)
        os.replace(part, self._path(name, ".npy"))

    def load(self, name: str) -> Shard:
        """One shard; its features stay on disk. Raises IntegrityError for a file that is not what `add` writes."""
        path = self._path(name, ".npz")
        try:
            if not zipfile.is_zipfile(path):
                raise ValueError("it is no npz file")
            with np.load(path, allow_pickle=False) as file:
                tokens, answer, starts = (_array(file[key]) for key in ("tokens", "answer", "starts"))
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
            raise _no_text(path, str(error)) from None
        if tokens.dtype != np.int32 or answer.dtype != np.bool_ or starts.dtype != np.int64:
            raise _no_text(path, f"types {tokens.dtype}, {answer.dtype}, {starts.dtype}")
        whole = starts.size > 1 and starts[0] == 0 and (np.diff(starts) > 0).all() and starts[-1] == len(tokens)
        if not whole or answer.shape != tokens.shape or tokens.min() < 0:
            raise _no_text(path, "its parts do not fit together")
        return Shard(tokens, answer, starts, self._path(name, ".npy"))

    def features_bytes(self) -> int:
        """What the features take on disk."""
        return sum(path.stat().st_size for path in self.folder.glob("*-*.npy"))

    def drop_features(self) -> None:
        """Delete the features; the text stays."""
        for path in self.folder.glob("*-*.npy"):
            path.unlink()

    def clean(self) -> None:
        """Delete what a killed writer left; nobody may be writing."""
        whole = set(self.names())
        for path in (*self.folder.glob("*-*.part"), *self.folder.glob("*-*.npy")):
            if path.suffix == ".part" or path.stem not in whole:
                path.unlink()

    def _path(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}{suffix}"

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            self._sizes[name] = len(self.load(name).tokens)
        return self._sizes[name]


def _read_features(path: Path) -> NDArray[np.float16] | None:
    """A memory map of a features file; None where there is no sound one."""
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    sound = isinstance(found, np.ndarray) and found.dtype == np.float16 and found.ndim == 2
    return found if sound else None


def _array(value: NDArray[Any]) -> NDArray[Any]:
    if value.ndim != 1:
        raise ValueError(f"an array of {value.ndim} dimensions")
    return value


def _no_text(path: Path, why: str) -> IntegrityError:
    return IntegrityError(f"{path} is no training text ({why}): delete it, and the text is written again.")
