"""Timed runs of one model: made in turn, and kept in a file from which a later call goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.models_cache.progress import Progress, no_progress
from specrun.runtime.bench_environment import Sitting, machine_facts, model_facts, reset_peak_memory
from specrun.runtime.engine import Engine, Prompt

BASELINE: Final = "baseline"
WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt with the id and category that results are paired and grouped by."""

    id: str
    category: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of `method`, which may carry its K ("ngram:4"), a synthetic acceptance ("draft:4@0.7") or a shape.

    decode_s: seconds after the prefill; of these draft_s went into drafting, verify_s into the target's runs, and
    onnx_s were spent inside ONNX Runtime. Bytes are those of the method: all weights that it uses, and its KV buffers;
    peak_bytes is the most RAM that the process held so far, None where the system does not tell.
    """

    model: str
    id: str
    category: str
    method: str
    repeat: int
    tokens: int
    rounds: int
    evaluated: int
    accepted: int
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    onnx_s: float
    mean_accepted_tokens: float
    acceptance_rate: float
    weights_bytes: int
    kv_target_bytes: int
    kv_draft_bytes: int
    peak_bytes: int | None
    ids_digest: str

    @property
    def seconds_per_token(self) -> float:
        """Decoding only."""
        return self.decode_s / max(1, self.tokens - 1)

    @property
    def seconds_per_round(self) -> float:
        """Decoding only."""
        return self.decode_s / max(1, self.rounds)


@dataclass(frozen=True, slots=True)
class Bench:
    """What was timed of one model: its facts, each call that timed some of the runs, and the runs."""

    model: dict[str, Any]
    sittings: tuple[Sitting, ...]
    runs: tuple[Run, ...]

    @property
    def peak_bytes(self) -> int | None:
        """The most RAM that the process held while this model ran."""
        return max((run.peak_bytes for run in self.runs if run.peak_bytes is not None), default=None)


Timed = Callable[[BenchPrompt, str, int, int | None], Run]
"""Times (prompt, label, repeat, tokens); tokens: a shorter text than the settings ask for, None: as they ask."""


def time_in_turn(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    labels: Sequence[str],
    repeats: int,
    timed: Timed,
    *,
    settings: dict[str, Any],
    output: Path | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Time every label on every prompt, in turn, `repeats` times, after a short run of each that does not count.

    settings: what the figures depend on beside model and machine. output: a JSONL file of runs; those of this model
    already in it, of the same settings, are not run again and belong to the result. Raises UsageError for a file of
    other settings, IntegrityError for one of another kind.
    """
    report = progress or no_progress
    facts = model_facts(engine)
    file = RunFile(output, {"machine": machine_facts(), "bench": settings, "model": facts})
    order = list(_order(prompts, repeats, labels))
    runs = {(run.id, run.method, run.repeat): run for run in file.runs}
    missing = [entry for entry in order if (entry[0].id, entry[2], entry[1]) not in runs]
    if missing:
        file.begin(Sitting.now())
        reset_peak_memory()
        for label in dict.fromkeys(label for _, _, label in missing):
            report(f"Warming up {label}", 0, None)
            timed(missing[0][0], label, 0, WARM_UP_TOKENS)
    for count, (prompt, repeat, label) in enumerate(missing, len(order) - len(missing)):
        report(f"Timing {facts['model']}", count, len(order))
        run = timed(prompt, label, repeat, None)
        runs[run.id, run.method, run.repeat] = run
        file.add(run)
    return Bench(facts, tuple(file.sittings), tuple(runs.values()))


def _order(
    prompts: Sequence[BenchPrompt], repeats: int, labels: Sequence[str]
) -> Iterator[tuple[BenchPrompt, int, str]]:
    """Methods alternate within a prompt, and their order turns from repeat to repeat."""
    for prompt in prompts:
        for repeat in range(repeats):
            shift = repeat % len(labels)
            for label in (*labels[shift:], *labels[:shift]):
                yield prompt, repeat, label


class RunFile:
    """Lines of JSON: before the runs of each sitting its settings, then a run a line. Without a path: in memory only.

    `runs` and `sittings` are those of this model that were there; runs of several models may share a file.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.runs: list[Run] = []
        self.sittings: list[Sitting] = []
        self._path = path
        self._settings = settings
        if path is not None and path.exists():
            self._read(path)

    def begin(self, sitting: Sitting) -> None:
        """Runs that are added from now on belong to this sitting."""
        self.sittings.append(sitting)
        self._write({"settings": self._settings, "sitting": asdict(sitting)})

    def add(self, run: Run) -> None:
        """Keep a run."""
        self._write(asdict(run))

    def _write(self, value: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")

    def _read(self, path: Path) -> None:
        model = self._settings["model"]["model"]
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            values = [json.loads(line) for line in lines[:-1]]
            heads = [value for value in values if "settings" in value]
            runs = [Run(**value) for value in values if "settings" not in value]
            sittings = [(head["settings"], Sitting(**head["sitting"])) for head in heads]
            owners = [settings["model"]["model"] for settings, _ in sittings]
            sound = values[0] is heads[0]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise IntegrityError(f"{path.name} is no file of bench runs: choose another --output.") from error
        if not sound:
            raise IntegrityError(f"{path.name} is no file of bench runs: choose another --output.")
        for (settings, sitting), owner in zip(sittings, owners, strict=True):
            if settings != (self._settings if owner == model else self._settings | {"model": settings["model"]}):
                raise UsageError(f"{path.name} holds runs of other settings: choose another --output, or delete it.")
            if owner == model:
                self.sittings.append(sitting)
        if lines[-1]:  # cut in the middle of a line
            path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
        self.runs = [run for run in runs if run.model == model]
