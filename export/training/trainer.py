"""The training loop of every method: batches, optimiser, measurement on held-out text, and a checkpoint."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specrun.export.training.batches import Batch, Batches
from specrun.export.training.scores import Scores
from specrun.export.training.text_store import TextStore
from specrun.models_cache.errors import UsageError
from specrun.models_cache.progress import Progress

Losses = Callable[[Batch], tuple[Tensor, Scores]]

HELD_OUT_SHARDS = 1
HELD_OUT_BATCHES = 12
MEASURES = 24  # on held-out text, over the whole training
WARMUP_STEPS = 40
LAST_RATE = 0.05  # of the learning rate, at the end
CHECKPOINT_S = 120.0


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """passes: over the text. rows x length: positions of a batch. learning_rate: the highest, after the warm-up."""

    passes: float
    learning_rate: float
    rows: int = 4
    length: int = 512
    seed: int = 0


@dataclass(slots=True)
class Progressed:
    """How far a training is. curve: (tokens trained on, loss, MAT of a chain on held-out text)."""

    step: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


class Trainer:
    """Trains `model`, whose `losses` are given, on the text of `store`; the first shard is held out.

    folder: where the checkpoint is kept: the weights in half precision and a few numbers; the optimiser's state is not
    kept, so a resumed training warms up again. columns: of the features, those that the model reads. `state` says how
    far it is.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        measure: Losses,
        store: TextStore,
        options: TrainingOptions,
        columns: NDArray[np.int64],
        folder: Path,
        progress: Progress,
    ) -> None:
        names = store.names()
        if len(names) <= HELD_OUT_SHARDS:
            raise UsageError("There is too little text to hold some out: train on more tokens (--tokens).")
        self._model = model
        self._losses, self._measure = losses, measure
        self._held_out, self._batches = (
            Batches(
                [store.load(name) for name in part],
                rows=options.rows,
                length=options.length,
                columns=columns,
                seed=options.seed,
            )
            for part in (names[:HELD_OUT_SHARDS], names[HELD_OUT_SHARDS:])
        )
        if not len(self._held_out) or not len(self._batches):
            raise UsageError("There is too little text for one batch: train on more tokens (--tokens).")
        self.options = options
        self._folder = folder
        self._progress = progress
        self._device = next(model.parameters()).device
        self._dtype = fastest_dtype(self._device)
        self._batch_tokens = options.rows * options.length
        self.steps = max(1, round(options.passes * len(self._batches)))
        identity = [asdict(options), names, [(name, tuple(p.shape)) for name, p in model.named_parameters()]]
        self._identity = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        self.state = Progressed()

    def run(self) -> Scores:
        """Train to the end, from the checkpoint if there is one; the counts on held-out text at the end."""
        self._resume()
        optimiser = torch.optim.AdamW(self._model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        began = self.state.step
        every = max(1, self.steps // MEASURES)
        saved = started = time.monotonic()
        before = self.state.seconds
        average: float | None = None
        try:
            for step in range(began, self.steps):
                rate = self._rate(step, step - began)
                for group in optimiser.param_groups:
                    group["lr"] = rate
                loss = self._step(self._batches.batch(step), optimiser)
                average = loss if average is None else 0.95 * average + 0.05 * loss
                self.state.step = step + 1
                self.state.seconds = before + time.monotonic() - started
                if self.state.step % every == 0 or self.state.step == self.steps:
                    scores = self.measure()
                    tokens = self.state.step * self._batch_tokens
                    self.state.curve.append((tokens, round(average, 4), round(scores.mean_accepted_tokens(), 4)))
                if time.monotonic() - saved > CHECKPOINT_S:
                    self.save()
                    saved = time.monotonic()
                self._progress(self._label(), self.state.step, self.steps)
        except KeyboardInterrupt:
            self.save()
            raise
        self.save()
        return self.measure()

    @torch.no_grad()
    def measure(self) -> Scores:
        """Counts on held-out text."""
        total: Scores | None = None
        for step in range(min(HELD_OUT_BATCHES, len(self._held_out))):
            with torch.autocast(self._device.type, dtype=self._dtype):
                _, scores = self._measure(self._held_out.batch(step).to(self._device))
            if total is None:
                total = scores
            else:
                total.merge(scores)
        assert total is not None
        return total

    def save(self) -> None:
        """Write the checkpoint: weights in half precision, and how far it is."""
        from safetensors.torch import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        part = self._folder / "checkpoint.part"
        weights = {name: value.detach().half().contiguous().cpu() for name, value in self._model.named_parameters()}
        state = {"identity": self._identity, "state": json.dumps(asdict(self.state))}
        save_file(weights, part, metadata=state)
        os.replace(part, self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self._folder / "checkpoint.safetensors"

    def _resume(self) -> None:
        from safetensors import safe_open

        if not self._checkpoint.is_file():
            return
        with safe_open(self._checkpoint, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("identity") != self._identity:
                raise UsageError(
                    f"{self._checkpoint} is of a training with other settings or other text: "
                    "repeat its settings, or pass --restart to begin anew."
                )
            raw = json.loads(metadata["state"])
            with torch.no_grad():
                for name, value in self._model.named_parameters():
                    value.copy_(file.get_tensor(name))
        self.state = Progressed(raw["step"], raw["seconds"], [tuple(point) for point in raw["curve"]])

    def _step(self, batch: Batch, optimiser: torch.optim.Optimizer) -> float:
        with torch.autocast(self._device.type, dtype=self._dtype):
            loss, _ = self._losses(batch.to(self._device))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        optimiser.step()
        return float(loss.detach())

    def _rate(self, step: int, since: int) -> float:
        """A warm-up after each start, then a cosine to LAST_RATE."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return (
            self.options.learning_rate * min(1.0, (since + 1) / WARMUP_STEPS) * (LAST_RATE + (1 - LAST_RATE) * cosine)
        )

    def _label(self) -> str:
        """What is shown; it changes only with a measurement."""
        state = self.state
        if not state.curve:
            return "Training"
        _, loss, rate = state.curve[-1]
        return f"Training ({rate:.2f} tokens a round on held-out text, loss {loss:.3f})"


def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where this machine multiplies matrices faster in it than in float32."""
    if device.type == "cuda":
        return torch.bfloat16
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 576, dtype=dtype), torch.ones(2048, 576, dtype=dtype)
        best = math.inf
        for _ in range(4):
            start = time.perf_counter()
            nn.functional.linear(a, b)
            best = min(best, time.perf_counter() - start)
        times[dtype] = best
    return min(times, key=times.__getitem__)
