"""Timed runs of one model: made in turn, and kept in a file from which a later call goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.strictjson import decode, parse_object
from specrun.runtime.bench_environment import Sitting, machine_facts, model_facts, reset_peak_memory
from specrun.runtime.engine import Engine, Prompt

BASELINE: Final = "baseline"
WARM_UP_TOKENS: Final = 16
_MOST: Final = 1e18  # of any number of a run
_BEGINNING: Final = b'{"settings": {"machine": {"processor": '  # of a file of runs


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt with the id and category that results are paired and grouped by."""

    id: str
    category: str
    prompt: Prompt

    @property
    def digest(self) -> str:
        """Of the prompt itself: an id may stand for another one in another file."""
        return hashlib.sha256(json.dumps(self.prompt, sort_keys=True, default=dict).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of `method`, which may carry its K ("ngram:4"), a synthetic acceptance ("draft:4@0.7") or a shape.

    decode_s: seconds after the prefill; of these draft_s went into drafting, verify_s into the target's runs, and
    onnx_s were spent inside ONNX Runtime. Bytes are those of the method: all weights that it uses, and its KV buffers;
    peak_bytes is the most RAM that the process held so far, None where the system does not tell.
    prompt_digest: of the prompt, as `BenchPrompt` gives it.
    """

    model: str
    id: str
    prompt_digest: str
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
    def prompt(self) -> tuple[str, str]:
        """What runs are paired by: the prompt's id and digest."""
        return self.id, self.prompt_digest

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
    and these prompts already in it, of the same settings, are not run again and belong to the result. Raises UsageError
    for a file of other settings and for a prompt that is there twice, IntegrityError for a file of another kind.
    """
    report = progress or no_progress
    known = {(prompt.id, prompt.digest): prompt for prompt in prompts}
    if len(known) < len(prompts):
        (name, _), _ = Counter((prompt.id, prompt.digest) for prompt in prompts).most_common(1)[0]
        raise UsageError(f"Prompt {name} is there twice: leave one out, or give it another id.")
    facts = model_facts(engine, labels)
    file = RunFile(output, {"machine": machine_facts(), "bench": settings, "model": facts})
    order = list(_order(prompts, repeats, labels))
    runs = {
        (*run.prompt, run.method, run.repeat): replace(run, category=known[run.prompt].category)
        for run in file.runs
        if run.prompt in known
    }
    missing = [entry for entry in order if (entry[0].id, entry[0].digest, entry[2], entry[1]) not in runs]
    if missing:
        file.begin(Sitting.now())
        reset_peak_memory()
        for label in dict.fromkeys(label for _, _, label in missing):
            report(f"Warming up {label}", 0, None)
            timed(missing[0][0], label, 0, WARM_UP_TOKENS)
    for count, (prompt, repeat, label) in enumerate(missing, len(order) - len(missing)):
        report(f"Timing {facts['model']}", count, len(order))
        run = timed(prompt, label, repeat, None)
        runs[*run.prompt, run.method, run.repeat] = run
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
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and data[: len(_BEGINNING)] == _BEGINNING[: len(data)]:  # empty, or cut in its first line
            path.write_bytes(b"")
            return
        model = self._settings["model"]["model"]
        try:
            values = [parse_object(line) for line in whole.decode("utf-8").split("\n")[:-1]]
            sound = "settings" in values[0]
            heads = [_head(value) for value in values if "settings" in value]
            runs = [_run(value) for value in values if "settings" not in value]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise IntegrityError(f"{path.name} is no file of bench runs: choose another --output.") from error
        if not sound:
            raise IntegrityError(f"{path.name} is no file of bench runs: choose another --output.")
        others = not all(run.prompt_digest for run in runs)
        for settings, sitting in heads:
            own = settings["model"]["model"] == model
            others = others or not self._same(settings, own=own)
            if own:
                self.sittings.append(sitting)
        if others:
            raise UsageError(f"{path.name} holds runs of other settings: choose another --output, or delete it.")
        if whole != data:  # cut in the middle of a line
            path.write_bytes(whole)
        self.runs = [run for run in runs if run.model == model]

    def _same(self, settings: dict[str, Any], *, own: bool) -> bool:
        """Whether runs of these settings may stand beside the new ones; own: they are of the same model.

        Runs of more methods may join, so speculators are compared where both have used one.
        """
        model = self._settings["model"]
        used, there = model["speculators"], settings["model"].get("speculators")
        if not isinstance(there, Mapping) or (own and any(used.get(key, there[key]) != there[key] for key in there)):
            return False
        wanted = self._settings | {"model": model | {"speculators": there} if own else settings["model"]}
        return settings == wanted


def _head(value: dict[str, Any]) -> tuple[dict[str, Any], Sitting]:
    """The settings and the sitting of a line; raises ValueError, KeyError, TypeError or AttributeError for another."""
    settings: dict[str, Any] = value["settings"]
    if not isinstance(settings["model"]["model"], str) or set(value) != {"settings", "sitting"}:
        raise ValueError("these are no settings")
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    settings["model"].get("speculators")
    return settings, decode(Sitting, value["sitting"])


def _run(value: dict[str, Any]) -> Run:
    """The run of a line, without a digest of its prompt where it has none; raises ValueError for anything else."""
    run: Run = decode(Run, {"prompt_digest": ""} | value)
    for field in dataclasses.fields(run):
        entry = getattr(run, field.name)
        if isinstance(entry, str):
            entry.encode()  # it can be shown
        elif entry is not None and not 0 <= entry <= _MOST:
            raise ValueError(f"{field.name} is no such number")
    return run
