"""The loop: checkpoints that go on where they were, that are refused where they do not fit, and what they weigh."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specrun.export.training import trainer as trainer_module
from specrun.export.training.eagle import EagleModel
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.text_store import TextStore
from specrun.export.training.trainer import Trainer, TrainingOptions
from specrun.models_cache.errors import IntegrityError, SpecrunError, UsageError

from .conftest import HIDDEN, TAPS

OPTIONS = TrainingOptions(passes=2, learning_rate=1e-3, rows=2, length=20)
DEPTH = 2


@pytest.fixture(autouse=True)
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "fastest_dtype", lambda device: torch.float32)


class Stop:
    """Progress that ends the training after some steps, as Ctrl-C does."""

    def __init__(self, after: int | None = None) -> None:
        self.after, self.steps = after, []  # type: ignore[var-annotated]

    def __call__(self, label: str, done: int, total: int | None) -> None:
        self.steps.append(done)
        if done == self.after:
            raise KeyboardInterrupt


def make(
    parts: TargetParts,
    store: TextStore,
    folder: Path,
    *,
    options: TrainingOptions = OPTIONS,
    progress: Callable[[str, int, int | None], None] | None = None,
    taps: int = TAPS,
) -> Trainer:
    torch.manual_seed(0)
    model = EagleModel(parts, taps)

    def measure(batch: Any) -> Scores:
        scores = Scores(DEPTH)
        model.losses(batch, DEPTH, scores)
        return scores

    columns = np.arange((TAPS - taps) * HIDDEN, TAPS * HIDDEN)
    return Trainer(
        model, lambda batch: model.losses(batch, DEPTH), measure, store, options, columns, folder, progress or Stop()
    )


def test_ctrl_c_and_on_from_there(
    parts: TargetParts, store: TextStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(parts, store, tmp_path / "whole")
    whole.run()
    cut = make(parts, store, tmp_path / "cut", progress=Stop(5))
    with pytest.raises(KeyboardInterrupt):
        cut.run()
    asked: list[int] = []
    progress = Stop()
    again = make(parts, store, tmp_path / "cut", progress=progress)
    batch = again._batches.batch
    monkeypatch.setattr(again._batches, "batch", lambda step: asked.append(step) or batch(step))
    again.run()
    assert asked == list(range(5, again.steps))
    assert progress.steps == list(range(6, again.steps + 1))
    assert again.state.step == whole.state.step == whole.steps
    assert [point[0] for point in again.state.curve] == [point[0] for point in whole.state.curve]
    assert again.state.curve[: len(cut.state.curve)] == cut.state.curve != []
    assert again.state.seconds > cut.state.seconds > 0
    # Half precision and a second warm-up are all the difference.
    assert again.state.curve[-1][1] == pytest.approx(whole.state.curve[-1][1], rel=0.1)


def test_killed_between_two_checkpoints(
    parts: TargetParts, store: TextStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "CHECKPOINT_S", 0.0)

    class Killed(BaseException):
        pass

    def end(label: str, done: int, total: int | None) -> None:
        if done == 4:
            raise Killed

    with pytest.raises(Killed):
        make(parts, store, tmp_path, progress=end).run()
    (tmp_path / "checkpoint.part").write_bytes(b"half a checkpoint")
    progress = Stop()
    make(parts, store, tmp_path, progress=progress).run()
    assert progress.steps[0] == 5


def test_a_finished_training_is_not_run_again(parts: TargetParts, store: TextStore, tmp_path: Path) -> None:
    first = make(parts, store, tmp_path)
    first.run()
    progress = Stop()
    again = make(parts, store, tmp_path, progress=progress)
    again.run()
    assert progress.steps == []
    assert again.state.curve == first.state.curve
    assert (again.measure().counts - first.measure().counts).abs().max() <= 3


def test_training_learns(parts: TargetParts, store: TextStore, tmp_path: Path) -> None:
    options = TrainingOptions(passes=10, learning_rate=4e-3, rows=2, length=20)
    trainer = make(parts, store, tmp_path, options=options)
    trainer.run()
    losses = [point[1] for point in trainer.state.curve]
    assert losses[-1] < 0.9 * losses[0]


def test_a_loss_that_is_no_number(parts: TargetParts, store: TextStore, tmp_path: Path) -> None:
    trainer = make(parts, store, tmp_path)
    with torch.no_grad():
        next(iter(trainer._model.parameters())).fill_(torch.nan)
    with pytest.raises(SpecrunError, match="the loss of step 1 is no number"):
        trainer.run()
    assert not trainer.checkpoint.exists()


@pytest.mark.parametrize(
    "change", ["passes", "learning_rate", "rows", "length", "seed", "text", "model"]
)  # fmt: skip
def test_a_checkpoint_of_other_settings(parts: TargetParts, store: TextStore, tmp_path: Path, change: str) -> None:
    folder = tmp_path / "training"
    make(parts, store, folder).save()
    options, taps = OPTIONS, TAPS
    if change == "text":
        (store.folder / "0-00002.npz").unlink()
    elif change == "model":
        taps = 1
    else:
        other = {"passes": 5.0, "learning_rate": 2e-3, "rows": 1, "length": 19, "seed": 1}[change]
        fields = {name: getattr(OPTIONS, name) for name in ("passes", "learning_rate", "rows", "length", "seed")}
        options = TrainingOptions(**(fields | {change: other}))
    trainer = make(parts, store, folder, options=options, taps=taps)
    with pytest.raises(UsageError, match=r"checkpoint\.safetensors is of a training with other .*--restart"):
        trainer.run()
    trainer.forget()
    assert list(folder.iterdir()) == []


def _tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object], **metadata: str) -> None:
    with safe_open(path, framework="pt") as file:
        kept = dict(file.metadata())
    tensors = _loaded(path)
    change(tensors)
    save_file(tensors, path, metadata=kept | metadata)


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _state(**changes: Any) -> str:
    return json.dumps({"step": 3, "seconds": 1.0, "curve": []} | changes)


HARMS: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "pickle": lambda path: torch.save({"step": 1}, path),
    "no metadata": lambda path: save_file({"x": torch.zeros(2)}, path),
    "shape": lambda path: _tensors(path, lambda tensors: tensors.update({"fc.weight": torch.zeros(1)})),
    "missing": lambda path: _tensors(path, lambda tensors: tensors.pop("fc.weight")),
    "not a number": lambda path: _tensors(path, lambda tensors: tensors["fc.weight"].fill_(torch.nan)),
    "step": lambda path: _tensors(path, lambda tensors: None, state=_state(step=10**9)),
    "seconds": lambda path: _tensors(path, lambda tensors: None, state=_state(seconds="soon")),
    "curve": lambda path: _tensors(path, lambda tensors: None, state=_state(curve=[[1, 2]])),
    "endless step": lambda path: _tensors(path, lambda tensors: None, state=_state(step=1).replace("1,", "1e400,", 1)),
    "long seconds": lambda path: _tensors(path, lambda tensors: None, state=_state(seconds=10**400)),
    "nested": lambda path: _tensors(path, lambda tensors: None, state="[" * 100_000),
    "curve of no numbers": lambda path: _tensors(path, lambda tensors: None, state=_state(curve=[[1, math.nan, 1.0]])),
    "no identity": lambda path: save_file(_loaded(path), path, metadata={"state": _state()}),
    "no object": lambda path: _tensors(path, lambda tensors: None, state="[1"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_damaged_checkpoints(
    parts: TargetParts, store: TextStore, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    trainer = make(parts, store, tmp_path / "training")
    trainer.save()
    harm(trainer.checkpoint)
    before = [value.clone() for value in trainer._model.parameters()]
    with pytest.raises(IntegrityError, match=r"checkpoint\.safetensors is damaged \(.*\): pass --restart"):
        trainer.run()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer._model.parameters(), strict=True))


def test_a_checkpoint_of_the_default_model_is_small(tmp_path: Path, store: TextStore) -> None:
    """SmolLM2-135M: 5.5 million parameters, two bytes each."""
    hidden = 576
    parts = TargetParts(
        torch.zeros(10, hidden), torch.zeros(8, hidden), torch.ones(hidden), torch.arange(8), 1e-5, 1e4, 9, 3, 64, 1536
    )
    model = EagleModel(parts, 4)
    columns = np.arange(4 * hidden)
    trainer = Trainer(model, lambda _: torch.zeros(()), lambda _: Scores(1), store, OPTIONS, columns, tmp_path, Stop())
    trainer.save()
    assert 5.4e6 < sum(value.numel() for value in model.parameters()) < 5.6e6
    assert trainer.checkpoint.stat().st_size < 12e6
    assert [path.name for path in tmp_path.glob("checkpoint*")] == ["checkpoint.safetensors"]


@pytest.mark.parametrize(
    ("options", "shards", "why"),
    [
        (OPTIONS, 1, "to hold some out"),
        (TrainingOptions(passes=1, learning_rate=1e-3, rows=40, length=40), 3, "for one batch"),
    ],
)
def test_too_little_text(
    parts: TargetParts, store: TextStore, tmp_path: Path, options: TrainingOptions, shards: int, why: str
) -> None:
    for name in store.names()[shards:]:
        (store.folder / f"{name}.npz").unlink()
    with pytest.raises(SpecrunError, match=f"too little text {why}: train on more tokens"):
        make(parts, store, tmp_path, options=options)


def test_text_without_answers(parts: TargetParts, store: TextStore, tmp_path: Path) -> None:
    for name in store.names():
        shard = store.load(name)
        path = store.folder / f"{name}.npz"
        np.savez_compressed(path, tokens=shard.tokens, answer=np.zeros_like(shard.answer), starts=shard.starts)
    with pytest.raises(UsageError, match="the model answered nothing"):
        make(parts, store, tmp_path)
