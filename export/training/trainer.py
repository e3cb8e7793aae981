"""The training loop of every method: batches, optimiser, measurement on held-out text, and a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specrun.export.training.batches import Batch, Batches
from specrun.export.training.scores import Scores
from specrun.export.training.text_store import TextStore
from specrun.models_cache.diskerrors import cache_errors
from specrun.models_cache.errors import IntegrityError, SpecrunError, UsageError
from specrun.models_cache.progress import Progress

Losses = Callable[[Batch], Tensor]
Measure = Callable[[Batch], Scores]

TOO_LITTLE = "train on more tokens (--tokens), or on more prompts (--prompts)."
HELD_OUT_SHARDS = 1
HELD_OUT_BATCHES = 12
MEASURES = 24  # on held-out text, over the whole training
WARMUP_STEPS = 40
LAST_RATE = 0.05  # of the learning rate, at the end
CHECKPOINT_S = 120.0


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """passes: over the text. rows x length: positions of a batch. learning_rate: the highest, after the warm-up.

    start: a digest of the weights that the training goes on from, empty for fresh ones.
    """

    passes: float
    learning_rate: float
    rows: int = 4
    length: int = 512
    seed: int = 0
    start: str = ""


@dataclass(slots=True)
class Progressed:
    """How far a training is. curve: (tokens trained on, loss, MAT of a chain on held-out text)."""

    step: int = 0
    seconds: float = 0.0
    curve: list[tuple[int, float, float]] = field(default_factory=list)


class Trainer:
    """Trains `model` by its `losses` on the text of `store`; `measure` counts on the first shard, which is held out.

    folder: where the checkpoint is kept: the weights in half precision and a few numbers; the optimiser's state is not
    kept, so a resumed training warms up again. columns: of the features, those that the model reads. `state` says how
    far it is.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        measure: Measure,
        store: TextStore,
        options: TrainingOptions,
        columns: NDArray[np.int64],
        folder: Path,
        progress: Progress,
    ) -> None:
        names = store.names()
        if len(names) <= HELD_OUT_SHARDS:
            raise UsageError(f"There is too little text to hold some out: {TOO_LITTLE}")
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
            raise UsageError(f"There is too little text for one batch: {TOO_LITTLE}")
        if not all(part.answers() for part in (self._held_out, self._batches)):
            raise UsageError(f"There is too little text: the model answered nothing in it; {TOO_LITTLE}")
        self.options = options
        self._folder = folder
        self._progress = progress
        self._device = next(model.parameters()).device
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
                if not math.isfinite(loss):
                    raise SpecrunError(f"the training failed: the loss of step {step + 1} is no number")
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
            with computing(self._device):
                scores = self._measure(self._held_out.batch(step).to(self._device))
            if total is None:
                total = scores
            else:
                total.merge(scores)
        assert total is not None
        return total

    def save(self) -> None:
        """Write the checkpoint: weights in half precision, and how far it is."""
        from safetensors.torch import save_file

        with cache_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / "checkpoint.part"
            weights = {name: value.detach().half().contiguous().cpu() for name, value in self._model.named_parameters()}
            state = {"identity": self._identity, "state": json.dumps(asdict(self.state))}
            save_file(weights, part, metadata=state)
            os.replace(part, self.checkpoint)

    def forget(self) -> None:
        """Delete the checkpoint: the next training begins anew."""
        self.checkpoint.unlink(missing_ok=True)

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint is kept."""
        return self._folder / "checkpoint.safetensors"

    def _resume(self) -> None:
        """Raises UsageError for the checkpoint of another training, IntegrityError for one that is damaged."""
        from safetensors import SafetensorError, safe_open

        if not self.checkpoint.is_file():
            return
        parameters = dict(self._model.named_parameters())
        try:
            with safe_open(self.checkpoint, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata["identity"] != self._identity:
                    raise UsageError(
                        f"{self.checkpoint} is of a training with other settings or other text: "
                        "repeat its settings, or pass --restart to begin anew."
                    )
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                if shapes != {name: tuple(value.shape) for name, value in parameters.items()}:
                    raise ValueError("its tensors are not those of the model")
                weights = {name: file.get_tensor(name) for name in parameters}
                if not all(torch.isfinite(value).all() for value in weights.values()):
                    raise ValueError("its tensors hold values that are not finite")
                self.state = self._read_state(metadata["state"])
        except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RecursionError, OSError) as error:
            if isinstance(error, UsageError):
                raise
            raise IntegrityError(
                f"{self.checkpoint} is damaged ({error}): pass --restart to begin the training anew."
            ) from None
        with torch.no_grad():
            for name, value in parameters.items():
                value.copy_(weights[name])

    def _read_state(self, text: str) -> Progressed:
        raw = json.loads(text)
        step, seconds = int(raw["step"]), float(raw["seconds"])
        curve = [(int(tokens), float(loss), float(rate)) for tokens, loss, rate in raw["curve"]]
        if not all(map(math.isfinite, itertools.chain(*curve))):
            raise ValueError("its curve holds values that are not finite")
        if not 0 <= step <= self.steps or not 0 <= seconds < math.inf:
            raise ValueError(f"it stands at step {step} of {self.steps}")
        return Progressed(step, seconds, curve)

    def _step(self, batch: Batch, optimiser: torch.optim.Optimizer) -> float:
        with computing(self._device):
            loss = self._losses(batch.to(self._device))
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


def computing(device: torch.device) -> AbstractContextManager[object]:
    """Matrices are multiplied in `fastest_dtype` inside."""
    dtype = fastest_dtype(device)
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


@functools.cache
def fastest_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where this machine multiplies matrices faster in it than in float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
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
