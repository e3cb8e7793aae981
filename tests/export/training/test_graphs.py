"""A model in torch and the graph of its weights compute the same, slot by slot, drafted steps included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specrun.export import speculator_parts
from specrun.export.graph import build_target, feature_taps
from specrun.export.quantize import FloatMatrix, Matrix, dequantize_matrix
from specrun.export.speculator_config import DraftConfig
from specrun.export.speculator_parts import SpeculatorParts, model_config
from specrun.export.speculator_weights import Speculator
from specrun.export.training.batches import Batch
from specrun.export.training.draft import DraftModel
from specrun.export.training.eagle import EagleModel
from specrun.export.training.medusa import MedusaModel
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.train import Method, _stored_tensors
from specrun.export.weight_file import WeightFile

from ..graph_runner import GraphRunner, open_session
from ..speculator_reference import EagleRunner, plain_choice, write_graph
from .conftest import HIDDEN, TAPS, VOCABULARY
from .naive import Recorded, ends_of, speculator_of
from .test_losses import shaken

Model = MedusaModel | EagleModel | DraftModel
LENGTH, STEPS = 24, 4


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


@pytest.fixture
def batch() -> Batch:
    """One dialogue, all of it an answer."""
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH + 1))
    features = torch.randn(1, LENGTH + 1, TAPS * HIDDEN).half()
    zeros = torch.zeros(1, LENGTH + 1, dtype=torch.int64)
    return Batch(tokens, features, torch.arange(LENGTH)[None], zeros, torch.ones_like(zeros, dtype=torch.bool))


@pytest.fixture(params=["float32", "int8"])
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Model], Speculator]:
    """The speculator of a model, whose weights become what is stored; graphs compute in the fixture's arithmetic."""

    def make(model: Model) -> Speculator:
        method: Any = SimpleNamespace(model=model)
        return speculator_of(model, _stored_tensors(method, model.parts))

    def rows(matrix: Matrix, ids: np.ndarray | None = None) -> FloatMatrix:
        return FloatMatrix(dequantize_matrix(matrix, slice(None) if ids is None else ids))

    if request.param == "float32":
        monkeypatch.setattr(speculator_parts, "_matrix", lambda speculator, name: FloatMatrix(speculator.tensor(name)))
        monkeypatch.setattr(speculator_parts, "rows_8bit", rows)
        make.tight = True  # type: ignore[attr-defined]
    return make


def check(stored: Callable[[Model], Speculator], found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Equal but for the rounding of vectors to half precision, or of activations to 8 bits."""
    a, b = np.array(found), np.array(expected)
    assert a.shape == b.shape
    error = np.sqrt(np.mean((a - b) ** 2)) / b.std()
    assert error < (2e-3 if hasattr(stored, "tight") else 0.06)


def test_eagle(
    stored: Callable[[Model], Speculator], parts: TargetParts, batch: Batch, recorded: Recorded, tmp_path: Path
) -> None:
    model = EagleModel(parts, TAPS)
    shaken(model)
    speculator = stored(model)
    model.losses(batch, STEPS)
    runner = EagleRunner(write_graph(speculator, ends_of(parts), tmp_path / "graph"), speculator)
    features, tokens = batch.features[0].float().numpy(), batch.tokens[0].tolist()
    found, expected = [], []
    for start in range(LENGTH - 1 - STEPS):
        runner.length = start  # the slots before stay; drafted ones are dropped
        out = runner.run(features[start : start + 1], None, [tokens[start + 1]])
        for step in range(STEPS):
            found.append(out["logits"][-1])
            expected.append(recorded.logits[step][start])  # its place of step s: slot start + s, counted from slot s
            out = runner.run(None, out["hidden"][-1:], [tokens[start + step + 2]])
    check(stored, found, expected)


def test_medusa(
    stored: Callable[[Model], Speculator], parts: TargetParts, batch: Batch, recorded: Recorded, tmp_path: Path
) -> None:
    model = MedusaModel(parts, TAPS, STEPS, 2)
    shaken(model)
    speculator = stored(model)
    model.losses(batch)
    session = open_session(write_graph(speculator, ends_of(parts), tmp_path / "graph"))
    choice = plain_choice(speculator.draft_vocabulary)
    found, expected = [], []
    for place in range(LENGTH - STEPS):
        feature = batch.features[0, place : place + 1].float().numpy()
        token = batch.tokens[0, place + 1 : place + 2].numpy()
        _, _, logits = session.run(None, {"features": feature, "input_ids": token, **choice})
        found.append(logits)
        expected.append(np.stack([recorded.logits[head][place] for head in range(STEPS)]))
    check(stored, found, expected)


def test_draft(
    stored: Callable[[Model], Speculator], parts: TargetParts, batch: Batch, recorded: Recorded, tmp_path: Path
) -> None:
    model = DraftModel(parts, 2)
    shaken(model)
    speculator = stored(model)
    model.losses(batch)
    config = speculator.config
    assert isinstance(config, DraftConfig)
    llama = model_config(speculator, config, 64)
    with WeightFile(tmp_path / "draft.onnx.data") as file:
        weights = SpeculatorParts(speculator, ends_of(parts), file, 64 + 320).draft(config)
        ir.save(build_target(llama, weights, file, ragged=True, taps=feature_taps(2)), tmp_path / "draft.onnx")
    runner: Any = SimpleNamespace(config=llama)
    logits = GraphRunner(tmp_path / "draft.onnx", runner).chain(batch.tokens[0, :LENGTH].tolist(), [LENGTH - 3, 1, 2])
    check(stored, [logits], [recorded.logits[0]])


def test_what_is_stored_is_what_is_measured(parts: TargetParts) -> None:
    """Weights are rounded to 8 bits in the model too."""
    model = EagleModel(parts, TAPS)
    shaken(model)
    before = model.fc.weight.detach().clone()
    tensors = _stored_tensors(Method(model, model.losses, model.losses, ()), parts)  # type: ignore[arg-type]
    speculator = speculator_of(model, tensors)
    assert not torch.equal(model.fc.weight, before)
    for name, tensor in model.tensors().items():
        np.testing.assert_allclose(speculator.tensor(name), tensor.detach().numpy(), atol=1e-3)
    np.testing.assert_array_equal(speculator.vocabulary, parts.vocabulary)
