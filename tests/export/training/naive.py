"""What training computes, slot by slot in plain numpy: the places that count, drafts, losses and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specrun.export.quantize import FloatMatrix
from specrun.export.speculator_config import DraftConfig, EagleConfig, MedusaConfig, SpeculatorConfig, SpeculatorTarget
from specrun.export.speculator_weights import Speculator
from specrun.export.target_ends import TargetEnds
from specrun.export.training import draft, eagle, medusa
from specrun.export.training.batches import Batch
from specrun.export.training.distil import distil
from specrun.export.training.scores import RANKS
from specrun.export.training.target_parts import TargetParts

Piece = tuple[int, range]  # row, its places: of one dialogue
Key = tuple[int, int, int]  # row, place, step


class Recorded:
    """The logits and the target's distributions that a model's losses are made of, step by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        for module in (medusa, eagle, draft):
            monkeypatch.setattr(module, "distil", self._record)

    def _record(self, parts: TargetParts, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        self.logits.append(parts.guess(hidden.detach()).double().numpy())
        self.targets.append(torch.softmax(parts.logits(residual).float(), -1).double().numpy())
        return distil(parts, hidden, residual)


def sizes_of(parts: TargetParts) -> dict[str, Any]:
    names = ("heads", "kv_heads", "head_dim", "intermediate", "rope_theta")
    return {name: getattr(parts, name) for name in names} | {"norm_epsilon": parts.epsilon}


def config_of(model: medusa.MedusaModel | eagle.EagleModel | draft.DraftModel) -> SpeculatorConfig:
    if isinstance(model, medusa.MedusaModel):
        return MedusaConfig(len(model.heads), len(model.heads[0]), "medusa-joined", model.parts.epsilon)
    sizes = sizes_of(model.parts)
    return EagleConfig("joined", **sizes) if isinstance(model, eagle.EagleModel) else DraftConfig(2, **sizes)


def speculator_of(
    model: medusa.MedusaModel | eagle.EagleModel | draft.DraftModel, tensors: dict[str, Any] | None = None
) -> Speculator:
    """The speculator with a model's weights as they are, f32, or with `tensors`."""
    parts = model.parts
    config = config_of(model)
    taps = {"MedusaConfig": (0, 1), "EagleConfig": (0, 1), "DraftConfig": ()}[type(config).__name__]
    if tensors is None:
        tensors = {name: tensor.detach().numpy() for name, tensor in model.tensors().items()}
        tensors["vocabulary"] = parts.vocabulary.numpy().astype(np.int32)
    method = {MedusaConfig: "medusa", EagleConfig: "eagle", DraftConfig: "draft"}[type(config)]
    target = SpeculatorTarget("tiny", parts.hidden, 1, len(parts.embedding), {})
    return Speculator(method, method, None, target, taps, config, ((0.5,),), {}, tensors)


def ends_of(parts: TargetParts) -> TargetEnds:
    """The target's ends; rows of the head outside the draft vocabulary are 0."""
    head = np.zeros(tuple(parts.embedding.shape), np.float32)
    head[parts.vocabulary.numpy()] = parts.head.numpy()
    embedding = FloatMatrix(parts.embedding.numpy())
    return TargetEnds(embedding, FloatMatrix(head), parts.final_norm.numpy(), parts.epsilon, parts.rope_theta)


def pieces(batch: Batch) -> Iterator[Piece]:
    """The stretches of each row that belong to one dialogue."""
    for row, numbers in enumerate(batch.segments.tolist()):
        start = 0
        for place in range(1, len(numbers) + 1):
            if place == len(numbers) or numbers[place] != numbers[start]:
                yield row, range(start, place)
                start = place


def answered(batch: Batch, row: int, places: range, place: int) -> bool:
    """Whether the token at a place is in this stretch, and the target's answer."""
    return place in places and bool(batch.answer[row, place])


def check(
    recorded: Recorded, wanted: list[list[tuple[int, int]]], logits: dict[Key, np.ndarray], atol: float = 2e-4
) -> None:
    """The recorded logits are those of the places (row, place) of each step, in order."""
    assert len(recorded.logits) == len(wanted)
    for step, places in enumerate(wanted):
        assert len(recorded.logits[step]) == len(places) > 0
        for found, (row, place) in zip(recorded.logits[step], places, strict=True):
            np.testing.assert_allclose(found, logits[row, place, step], atol=atol, rtol=1e-3)


def loss_of(recorded: Recorded, weight: float) -> float:
    """The sum over the steps of the mean cross-entropy."""
    total = 0.0
    for step, (logits, target) in enumerate(zip(recorded.logits, recorded.targets, strict=True)):
        rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total += weight**step * float(-(target * rows).sum(-1).mean())
    return total


def count(
    recorded: Recorded,
    wanted: list[list[tuple[int, int]]],
    written: Callable[[int, int, int], int],
    before: Callable[[int], int],
    vocabulary: list[int],
) -> np.ndarray:
    """The counts of `Scores`. written: the token at (row, place, step); before: the path's place one step before."""
    counts = np.zeros((len(wanted), 1 + RANKS))
    right: set[Key] = set()
    for step, places in enumerate(wanted):
        for index, (row, place) in enumerate(places):
            if step and (row, before(place), step - 1) not in right:
                continue
            counts[step, 0] += 1
            token = written(row, place, step)
            if token not in vocabulary:
                continue
            best = int(recorded.targets[step][index].argmax())
            rank = int((-recorded.logits[step][index]).argsort(kind="stable").tolist().index(best))
            if rank < RANKS:
                counts[step, 1 + rank] += 1
            if rank == 0:
                right.add((row, place, step))
    return counts
