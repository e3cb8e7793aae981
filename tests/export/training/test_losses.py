"""Losses and counts of every method against drafting slot by slot in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specrun.export.training.batches import Batch, Batches
from specrun.export.training.distil import distil, ranks
from specrun.export.training.draft import DraftModel
from specrun.export.training.eagle import STEP_WEIGHT, EagleModel
from specrun.export.training.medusa import MedusaModel
from specrun.export.training.scores import Scores, rank_of_best
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.text_store import TextStore

from ..speculator_reference import reference_draft, reference_eagle, reference_medusa
from .conftest import HIDDEN, TAPS
from .naive import Key, Recorded, answered, check, count, ends_of, loss_of, pieces, speculator_of

LENGTH, STEPS = 21, 4


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


@pytest.fixture
def batch(store: TextStore) -> Batch:
    """Three rows with several dialogues each, some of which go on in the next row."""
    shards = [store.load(name) for name in store.names()]
    columns = np.arange(TAPS * HIDDEN)
    batch = Batches(shards, rows=3, length=LENGTH, columns=columns, seed=5).batch(0)
    assert batch.segments[:, -1].max() >= 4
    assert batch.positions[1:, 0].max() > 0
    return batch


def shaken(model: torch.nn.Module) -> None:
    """Random weights everywhere, norms and what begins as 0 included."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * (0.3 if value.ndim == 1 else value.shape[-1] ** -0.5))


def test_eagle_is_drafting_slot_by_slot(parts: TargetParts, batch: Batch, recorded: Recorded) -> None:
    model = EagleModel(parts, TAPS)
    shaken(model)
    scores = Scores(STEPS)
    loss = float(model.losses(batch, STEPS, scores).detach())
    speculator, ends = speculator_of(model), ends_of(parts)
    features = batch.features.float().numpy()
    logits: dict[Key, np.ndarray] = {}
    for row, places in pieces(batch):
        tokens = batch.tokens[row].tolist()
        for start in places[:-1]:
            slots = range(places.start, start + 1)
            recycled = np.zeros((0, HIDDEN))
            for step in range(min(STEPS, places.stop - 1 - start)):
                ahead = tokens[places.start + 1 : start + step + 2]
                rows, hidden = reference_eagle(speculator, ends, features[row, list(slots)], recycled, ahead)
                logits[row, start + step, step] = rows[-1]
                recycled = np.concatenate([recycled, hidden[-1:]])
    # A step after the first stands one slot further than the step before, in the same dialogue.
    wanted = [
        [
            (row, slot)
            for row, places in pieces(batch)
            for slot in places
            if slot - step in places and answered(batch, row, places, slot + 2)
        ]
        for step in range(STEPS)
    ]
    check(recorded, wanted, logits)
    assert loss == pytest.approx(loss_of(recorded, STEP_WEIGHT), rel=1e-4)
    known = parts.vocabulary.tolist()
    found = count(recorded, wanted, lambda row, slot, _: int(batch.tokens[row, slot + 2]), lambda slot: slot - 1, known)
    np.testing.assert_array_equal(scores.counts, found)


def test_medusa(parts: TargetParts, batch: Batch, recorded: Recorded) -> None:
    model = MedusaModel(parts, TAPS, STEPS, 2)
    shaken(model)
    scores = Scores(STEPS)
    loss = float(model.losses(batch, scores).detach())
    speculator, ends = speculator_of(model), ends_of(parts)
    features = batch.features.float().numpy()
    logits: dict[Key, np.ndarray] = {}
    wanted: list[list[tuple[int, int]]] = [[] for _ in range(STEPS)]
    for row, places in pieces(batch):
        for place in places[:-1]:
            token = int(batch.tokens[row, place + 1])
            rows = reference_medusa(speculator, ends, features[row, place : place + 1], token)
            for head in range(STEPS):
                if answered(batch, row, places, place + head + 2):
                    wanted[head].append((row, place))
                    logits[row, place, head] = rows[head]
    check(recorded, wanted, logits)
    assert loss == pytest.approx(loss_of(recorded, 0.8), rel=1e-4)
    known = parts.vocabulary.tolist()
    found = count(
        recorded, wanted, lambda row, place, head: int(batch.tokens[row, place + head + 2]), lambda place: place, known
    )
    np.testing.assert_array_equal(scores.counts, found)


def test_draft(parts: TargetParts, batch: Batch, recorded: Recorded) -> None:
    model = DraftModel(parts, 2)
    shaken(model)
    scores = Scores(STEPS)
    loss = float(model.losses(batch, STEPS, scores).detach())
    speculator, ends = speculator_of(model), ends_of(parts)
    logits: dict[Key, np.ndarray] = {}
    wanted: list[tuple[int, int]] = []
    for row, places in pieces(batch):
        rows = reference_draft(speculator, ends, batch.tokens[row, list(places)].tolist())
        for index, place in enumerate(places):
            if answered(batch, row, places, place + 1):
                wanted.append((row, place))
                logits[row, place, 0] = rows[index]
    check(recorded, [wanted], logits)
    assert loss == pytest.approx(loss_of(recorded, 1.0), rel=1e-4)
    recorded.logits *= STEPS
    recorded.targets *= STEPS
    known = parts.vocabulary.tolist()
    found = count(
        recorded, [wanted] * STEPS, lambda row, place, _: int(batch.tokens[row, place + 1]), lambda p: p - 1, known
    )
    np.testing.assert_array_equal(scores.counts, found)


def test_the_targets_distribution_is_that_of_its_feature(parts: TargetParts, batch: Batch, recorded: Recorded) -> None:
    """Slot i guesses token i + 2, which the target gives after its token i + 1."""
    EagleModel(parts, TAPS).losses(batch, 1)
    residual = batch.features[..., -HIDDEN:].double()
    normed = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + parts.epsilon) * parts.final_norm
    target = torch.softmax(normed @ parts.head.T.double(), -1)
    np.testing.assert_allclose(recorded.targets[0], target[:, 1:][batch.scored(2)], atol=1e-5)


def test_a_batch_without_answers_gives_no_loss(parts: TargetParts, batch: Batch) -> None:
    batch.answer[:] = False
    for model in (EagleModel(parts, TAPS), MedusaModel(parts, TAPS, STEPS, 2), DraftModel(parts, 2)):
        scores = Scores(STEPS)
        arguments = () if isinstance(model, MedusaModel) else (STEPS,)
        loss = model.losses(batch, *arguments, scores)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert scores.mean_accepted_tokens() == 1.0
        assert all(value.grad is None or torch.isfinite(value.grad).all() for value in model.parameters())


def test_nothing_is_made_on_another_device(parts: TargetParts, batch: Batch) -> None:
    """What losses make without saying where lands on the default device: here one that nothing can be mixed with."""
    models = (EagleModel(parts, TAPS), MedusaModel(parts, TAPS, STEPS, 2), DraftModel(parts, 2))
    scores = Scores(STEPS)
    with torch.device("meta"):
        for model in models:
            arguments = () if isinstance(model, MedusaModel) else (STEPS,)
            assert model.losses(batch, *arguments, scores).device == batch.tokens.device
    assert scores.counts.device == batch.tokens.device


def test_equal_logits_rank_as_the_graphs_take_them() -> None:
    scores = Scores(1)
    wanted = torch.ones(1, 4, dtype=torch.bool)
    logits = torch.tensor([[1.0, 1.0, 0.0]] * 4)
    # The target's best is 0; then 1; then 0 and 1 alike, of which the text has 1; then one that the text has not.
    target = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1], [0.4, 0.4, 0.2], [0.6, 0.3, 0.1]])
    right = scores.add(0, wanted, rank_of_best(logits, target, torch.tensor([0, 1, 1, -1])), None)
    assert right.tolist() == [[True, False, False, False]]
    assert scores.counts[0].tolist()[:3] == [4, 1, 2]


@pytest.mark.parametrize("rows", [0, 1, 5, 256, 600])
def test_the_gradient_is_that_of_cross_entropy(parts: TargetParts, rows: int) -> None:
    hidden = torch.randn(rows, parts.hidden).requires_grad_()
    residual = torch.randn(rows, parts.hidden)
    loss = 3.0 * distil(parts, hidden, residual)
    loss.backward()
    other = hidden.detach().clone().requires_grad_()
    if not rows:
        assert float(loss.detach()) == 0.0
        return
    target = torch.softmax(parts.logits(residual).float(), -1)
    expected = 3.0 * torch.nn.functional.cross_entropy(parts.guess(other).float(), target)
    expected.backward()
    near = {"rtol": 2e-2, "atol": 1e-3} if parts.head.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
    torch.testing.assert_close(hidden.grad, other.grad, **near)
    written = torch.randint(-1, len(parts.vocabulary), (rows,))
    found = rank_of_best(parts.guess(hidden.detach()), parts.logits(residual), written)
    assert torch.equal(ranks(parts, hidden.detach(), residual, written), found)
