"""Timed runs in alternation, and the file that keeps them so that an interrupted comparison goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specrun.runtime.engine import Prompt

from .processes import BenchError, Worker
from .sides import SPECRUN, Mode

Progress = Callable[[str], None]

SETTLE_S = 0.05  # threads of the process that just answered stop spinning meanwhile
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with the token ids that every side gets."""

    id: str
    prompt: Prompt
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run. decode_s: seconds from when `first` tokens were there (mostly 1) to the last one.

    idle: for each other side, how many seconds it waited meanwhile and its processor seconds in that time.
    """

    prompt: str
    mode: str
    repeat: int
    first: int
    decode_s: float
    token_ids: list[int]
    idle: dict[str, list[float]] = field(default_factory=dict)

    @property
    def seconds_per_token(self) -> float:
        """Decoding only."""
        return self.decode_s / (len(self.token_ids) - self.first)


class Record:
    """What is measured, also in a JSONL file if a path is given; what that holds already is not measured again.

    facts: by (kind, key), such as ("reference", prompt). Raises BenchError where the file is one of other settings.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.runs: list[Run] = []
        self.facts: dict[tuple[str, str], Any] = {}
        self._path = path
        if path is None:
            return
        try:
            if not path.exists():
                self._write({"settings": settings})
                return
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"{path} cannot be read or written ({error}): choose another --output") from error
        try:
            head = json.loads(lines[0])["settings"]
            for line in lines[1:-1]:
                self._take(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{path.name} is no file of this benchmark: choose another --output") from error
        if head != settings:
            raise BenchError(f"{path.name} holds runs of other settings: choose another --output, or delete it")
        if lines[-1]:  # cut in the middle of a line
            path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")

    def add_run(self, run: Run) -> None:
        """Keep a run."""
        self.runs.append(run)
        self._write(asdict(run))

    def add_fact(self, kind: str, key: str, value: Any) -> None:
        """Keep a value that JSON holds."""
        self.facts[kind, key] = value
        self._write({"kind": kind, "key": key, "value": value})

    def _take(self, record: dict[str, Any]) -> None:
        if "kind" in record:
            self.facts[record["kind"], record["key"]] = record["value"]
        else:
            self.runs.append(Run(**record))

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")


class Alternation:
    """Times modes in turn within each prompt; which comes first turns from repeat to repeat and prompt to prompt.

    A mode of a peer that fails is left out from then on, and `failures` says why, by label; a side whose process has
    ended loses all its modes. One of specrun's own ends everything with a BenchError.
    """

    def __init__(self, workers: Mapping[str, Worker], modes: Sequence[Mode], record: Record) -> None:
        self.failures: dict[str, str] = {}
        self._workers = workers
        self._modes = modes
        self._record = record

    def run(self, questions: Sequence[Question], repeats: int, max_tokens: int, progress: Progress) -> None:
        """Time everything that the record does not hold yet."""
        done = {(run.prompt, run.mode, run.repeat) for run in self._record.runs}
        plan = [
            (question, repeat, mode)
            for question, repeat, mode in turns(questions, repeats, self._modes)
            if (question.id, mode.label, repeat) not in done
        ]
        for mode in self._modes:
            if any(planned is mode for _, _, planned in plan):
                progress(f"warming up: {mode.label}")
                self._attempt(questions[0], mode, -1, WARM_UP_TOKENS)
        for number, (question, repeat, mode) in enumerate(plan, 1):
            if mode.label in self.failures:
                continue
            progress(f"run {number} of {len(plan)}: prompt {question.id}, {mode.label}")
            run = self._attempt(question, mode, repeat, max_tokens)
            if run is not None:
                self._record.add_run(run)
        progress("")

    def _attempt(self, question: Question, mode: Mode, repeat: int, max_tokens: int) -> Run | None:
        while True:
            try:
                return self._run(question, mode, repeat, max_tokens)
            except BenchError as error:
                ended = [m.label for m in self._modes if not self._workers[m.side].alive]
                lost = [label for label in ended if label not in self.failures] or [mode.label]
                if not self._workers[SPECRUN].alive or (mode.side == SPECRUN and mode.label in lost):
                    raise
                self.failures |= dict.fromkeys(lost, str(error))
                if mode.label in self.failures:
                    return None
                # Another side has ended while it waited: this one is asked again.

    def _run(self, question: Question, mode: Mode, repeat: int, max_tokens: int) -> Run:
        request: dict[str, Any] = {"method": mode.method, "prompt_ids": question.ids, "max_tokens": max_tokens}
        request["draft_length"] = mode.draft_length
        if mode.side == SPECRUN:
            request["prompt"] = question.prompt
        others = {side: worker for side, worker in self._workers.items() if side != mode.side and worker.alive}
        time.sleep(SETTLE_S)
        before = {side: worker.ask("about") for side, worker in others.items()}
        answer = self._workers[mode.side].ask("run", **request)
        after = {side: worker.ask("about") for side, worker in others.items()}
        if len(answer["token_ids"]) <= answer["first"]:
            raise BenchError(f"it wrote only {len(answer['token_ids'])} tokens for prompt {question.id}")
        return Run(
            prompt=question.id,
            mode=mode.label,
            repeat=repeat,
            first=answer["first"],
            decode_s=answer["decode_s"],
            token_ids=answer["token_ids"],
            idle={side: [after[side][key] - before[side][key] for key in ("idle_s", "idle_cpu_s")] for side in others},
        )


def turns(questions: Sequence[Question], repeats: int, modes: Sequence[Mode]) -> Iterator[tuple[Question, int, Mode]]:
    """Every prompt, repeat and mode, in the order in which they run."""
    for number, question in enumerate(questions):
        for repeat in range(repeats):
            shift = (number + repeat) % len(modes)
            for mode in (*modes[shift:], *modes[:shift]):
                yield question, repeat, mode
