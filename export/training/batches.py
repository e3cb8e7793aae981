"""Shards become batches: dialogues one after the other, cut into rows of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specrun.export.training.text_store import Shard


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of `length` positions; a row may hold several dialogues, one after the other.

    tokens     i64 [rows, length + 1]
    features   [rows, length + 1, taps * hidden], of those tokens
    positions  i64 [rows, length]: within the dialogue
    segments   i64 [rows, length + 1]: number of the dialogue
    answer     bool [rows, length + 1]: the token is the target's answer
    """

    tokens: Tensor
    features: Tensor
    positions: Tensor
    segments: Tensor
    answer: Tensor

    def mask(self) -> Tensor:
        """bool [rows, 1, length, length]: each position sees those before it in its dialogue, and itself."""
        segments = self.segments[:, :-1]
        same = segments[:, None, :, None] == segments[:, None, None, :]
        return same & torch.ones_like(same[:1]).tril()

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        if self.tokens.device == device:
            return self
        return Batch(*(getattr(self, item.name).to(device) for item in fields(self)))

    def ahead(self, places: int) -> Tensor:
        """i64 [rows, length]: the token `places` positions further; 0 beyond the row."""
        length = self.positions.shape[1]
        moved = self.tokens[:, places : places + length]
        return nn.functional.pad(moved, (0, length - moved.shape[1]))

    def scored(self, ahead: int) -> Tensor:
        """bool [rows, length]: the token `ahead` positions further is in the same dialogue's answer, and in the row."""
        length = self.positions.shape[1]
        result = torch.zeros_like(self.positions, dtype=torch.bool)
        if ahead <= length:
            inside = self.segments[:, ahead:] == self.segments[:, : length + 1 - ahead]
            result[:, : length + 1 - ahead] = (inside & self.answer[:, ahead:])[:, :length]
        return result


_Piece = tuple[Shard, slice, int]  # part of a dialogue in a shard, and the position of its first token there


class Batches:
    """The batches of all dialogues of some shards; each pass has an order of its own, which depends on `seed` alone.

    What fills no whole batch at the end of a pass is left out. columns: of the features, those to keep.
    """

    def __init__(
        self, shards: Sequence[Shard], *, rows: int, length: int, columns: NDArray[np.int64], seed: int
    ) -> None:
        self._shards = shards
        self._rows, self._length = rows, length
        self._columns = columns
        self._seed = seed
        self._pass: tuple[int, list[list[_Piece]]] = -1, []

    def __len__(self) -> int:
        """Batches of one pass."""
        return sum(len(shard.tokens) for shard in self._shards) // self._size

    def answers(self) -> int:
        """Tokens of the target's answers in one pass."""
        return sum(int(shard.answer.sum()) for shard in self._shards)

    def batch(self, step: int) -> Batch:
        """The batch of one step; steps beyond the first pass go on with the next."""
        number, index = divmod(step, len(self))
        if self._pass[0] != number:
            self._pass = number, self._plan(number)
        return self._make(self._pass[1][index])

    @property
    def _size(self) -> int:
        return self._rows * (self._length + 1)

    def _plan(self, number: int) -> list[list[_Piece]]:
        order = [(shard, index) for shard in self._shards for index in range(len(shard.starts) - 1)]
        np.random.default_rng([self._seed, number]).shuffle(order)
        plan: list[list[_Piece]] = [[]]
        room = self._size
        for shard, index in order:
            start, end = int(shard.starts[index]), int(shard.starts[index + 1])
            at = start
            while at < end:
                take = min(end - at, room)
                plan[-1].append((shard, slice(at, at + take), at - start))
                at, room = at + take, room - take
                if not room:
                    plan.append([])
                    room = self._size
        return plan

    def _make(self, pieces: list[_Piece]) -> Batch:
        rows, length = self._rows, self._length
        sizes = [part.stop - part.start for _, part, _ in pieces]
        positions = [np.arange(first, first + size) for (_, _, first), size in zip(pieces, sizes, strict=True)]
        features = np.concatenate([shard.features[part] for shard, part, _ in pieces])
        if self._columns.size != features.shape[1]:
            features = features[:, self._columns]

        def shaped(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).view(rows, length + 1, *array.shape[1:])

        return Batch(
            tokens=shaped(np.concatenate([shard.tokens[part] for shard, part, _ in pieces]).astype(np.int64)),
            features=shaped(features),
            positions=shaped(np.concatenate(positions))[:, :-1],
            segments=shaped(np.repeat(np.arange(len(pieces)), sizes)),
            answer=shaped(np.concatenate([shard.answer[part] for shard, part, _ in pieces])),
        )
