"""Dialogues on disk: shards of text, small enough to keep, and beside each the features, which are large."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrun.export.training.self_text import Dialogue


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
    """The shards of one folder; one that is there is whole."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def names(self) -> list[str]:
        """The names of the shards, in the order they were written."""
        return sorted(path.stem for path in self._folder.glob("*.npz") if path.with_suffix(".npy").is_file())

    def dialogues(self) -> int:
        """How many dialogues there are."""
        return sum(len(self._text(name)["starts"]) - 1 for name in self.names())

    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(len(self._text(name)["tokens"]) for name in self.names())

    def add(self, dialogues: Sequence[Dialogue]) -> None:
        """Write a shard; the text, whose presence makes it count, comes last."""
        names = self.names()
        path = self._folder / f"{int(names[-1]) + 1 if names else 0:05d}"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.save(file, np.concatenate([dialogue.features for dialogue in dialogues]))
        os.replace(part, path.with_suffix(".npy"))
        lengths = [len(dialogue.tokens) for dialogue in dialogues]
        with part.open("wb") as file:
            np.savez_compressed(
                file,
                tokens=np.concatenate([dialogue.tokens for dialogue in dialogues]),
                answer=np.concatenate([dialogue.answer for dialogue in dialogues]),
                starts=np.cumsum([0, *lengths]),
            )
        os.replace(part, path.with_suffix(".npz"))

    def load(self, name: str) -> Shard:
        """One shard; its features stay on disk."""
        text = self._text(name)
        features = np.load((self._folder / name).with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
        return Shard(text["tokens"], text["answer"], text["starts"], features)

    def _text(self, name: str) -> dict[str, NDArray[np.generic]]:
        with np.load((self._folder / name).with_suffix(".npz"), allow_pickle=False) as file:
            return {key: file[key] for key in ("tokens", "answer", "starts")}
