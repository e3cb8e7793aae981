"""Dialogues on disk: shards of text, small enough to keep, and beside each the features, which are large."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.export.training.self_text import Dialogue

SHARD_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Shard:
    """Dialogues one after the other.

    tokens i32 [n], answer bool [n]; starts i64 [dialogues + 1]; features f16 [n, taps * hidden], a memory map
    """

    tokens: NDArray[np.int32]
    answer: NDArray[np.bool_]
    starts: NDArray[np.int64]
    features: NDArray[np.float16]


class TextStore:
    """The shards of one folder, named WRITER-NUMBER, as several processes write. One that is there is whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, writer: int | None = None) -> list[str]:
        """The names of the shards, of one writer or of all, those of equal number together."""
        found = [path.stem for path in self._folder.glob("*-*.npz") if path.with_suffix(".npy").is_file()]
        mine = [name for name in found if writer is None or name.startswith(f"{writer}-")]
        return sorted(mine, key=lambda name: (name.split("-")[1], int(name.split("-")[0])))

    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(int(self._text(name)["starts"][-1]) for name in self.names())

    def add(self, dialogues: Sequence[Dialogue], writer: int = 0) -> None:
        """Write a shard; the text, whose presence makes it count, comes last."""
        self._folder.mkdir(parents=True, exist_ok=True)
        names = self.names(writer)
        number = int(names[-1].split("-")[1]) + 1 if names else 0
        path = self._folder / f"{writer}-{number:05d}"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.save(file, np.concatenate([dialogue.features for dialogue in dialogues]))
        os.replace(part, path.with_suffix(".npy"))
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate([dialogue.tokens for dialogue in dialogues]),
                answer=np.concatenate([dialogue.answer for dialogue in dialogues]),
                starts=np.cumsum([0, *(len(dialogue.tokens) for dialogue in dialogues)]),
            )
        os.replace(part, path.with_suffix(".npz"))

    def load(self, name: str) -> Shard:
        """One shard; its features stay on disk."""
        text = self._text(name)
        features = np.load(self._folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return Shard(text["tokens"], text["answer"], text["starts"], features)

    def _text(self, name: str) -> dict[str, NDArray[Any]]:
        with np.load(self._folder / f"{name}.npz", allow_pickle=False) as file:
            return {key: file[key] for key in ("tokens", "answer", "starts")}
