"""Times methods against the fastest plain loop: alternating runs, paired by prompt, resumable.

The baseline is plain decoding at its natural width 1, inexact as that is; only this module may run it. Every run starts
from an engine that has forgotten all earlier ones, so no method profits from another's text.
"""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.models_cache.progress import Progress, no_progress
from specrun.runtime.backend import onnxruntime
from specrun.runtime.engine import Engine, Prompt
from specrun.runtime.request import RequestOptions
from specrun.runtime.session import WidthRule

BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt with the id and category that results are paired and grouped by."""

    id: str
    category: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run. onnx_s: seconds of decoding spent inside ONNX Runtime."""

    id: str
    category: str
    method: str
    repeat: int
    tokens: int
    rounds: int
    decode_s: float
    onnx_s: float
    prefill_s: float
    mean_accepted_tokens: float
    acceptance_rate: float
    ids_digest: str
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Decoding only."""
        return self.decode_s / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Summary:
    """A method over a category. ratio: baseline's time a token / the method's, each prompt's median weighing the same.

    draft_ms, verify_ms: milliseconds a round of drafting and of the target's run; overhead_ms: those outside ONNX
    Runtime. equal: whether every text is that of exact plain decoding; None where "none" was not run.
    """

    category: str
    method: str
    prompts: int
    tokens_per_s: float
    ratio: float
    mean_accepted_tokens: float
    acceptance_rate: float
    draft_ms: float
    verify_ms: float
    overhead_ms: float
    equal: bool | None

    @property
    def loses(self) -> bool:
        """Whether the method drafts, and is slower than the fastest plain loop."""
        return self.method not in (BASELINE, "none") and self.ratio < 1.0


def load_prompts(path: Path, *, per_category: int | None = None) -> list[BenchPrompt]:
    """Prompts of a JSONL file of objects with `turns`, `prompt` or `messages`, and optionally `category` and an id.

    Of `turns` the first is taken. per_category: only so many of each category, the first ones.
    Raises UsageError naming the line that cannot be read.
    """
    prompts: list[BenchPrompt] = []
    counts: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text ({error}): give a JSONL file.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt(json.loads(line), number)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise UsageError(
                f"{path.name} line {number} is no prompt: give an object with turns, prompt or messages."
            ) from error
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if per_category is None or counts[prompt.category] <= per_category:
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"{path.name} holds no prompts.")
    return prompts


def _prompt(record: dict[str, Any], number: int) -> BenchPrompt:
    prompt = record["turns"][0] if "turns" in record else record.get("prompt") or record["messages"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
    if not isinstance(prompt, str) and not messages:
        raise TypeError("neither text nor messages")
    identity = record.get("question_id", record.get("id", number))
    return BenchPrompt(str(identity), str(record.get("category", "all")), prompt)


def run_bench(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    methods: Sequence[str] = ("none", "ngram"),
    draft_length: int | None = None,
    max_tokens: int = 128,
    repeats: int = 3,
    output: Path | None = None,
    progress: Progress | None = None,
) -> list[Run]:
    """Time the baseline and `methods` on every prompt, in turn, `repeats` times.

    "ngram:4" fixes K to 4, "lookahead:5/4/5" sets window, n-grams and guesses.

    output: a JSONL file of runs; those already in it, of the same settings, are not run again.
    """
    report = progress or no_progress
    settings = environment(engine) | {"max_tokens": max_tokens, "draft_length": draft_length}
    runs = _read_runs(output, settings) if output is not None else []
    done = {(run.id, run.method, run.repeat) for run in runs}
    labels = [BASELINE, *[method for method in methods if method != BASELINE]]
    total = len(prompts) * repeats * len(labels)
    for count, (prompt, repeat, label) in enumerate(_order(prompts, repeats, labels)):
        report("Timing", count, total)
        if (prompt.id, label, repeat) in done:
            continue
        run = _time(engine, prompt, label, repeat, draft_length, max_tokens)
        runs.append(run)
        if output is not None:
            with output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(run)) + "\n")
    return runs


def _order(
    prompts: Sequence[BenchPrompt], repeats: int, labels: Sequence[str]
) -> Iterator[tuple[BenchPrompt, int, str]]:
    """Methods alternate within a prompt, and their order turns from repeat to repeat."""
    for prompt in prompts:
        for repeat in range(repeats):
            shift = repeat % len(labels)
            for label in (*labels[shift:], *labels[:shift]):
                yield prompt, repeat, label


def _time(
    engine: Engine, prompt: BenchPrompt, label: str, repeat: int, draft_length: int | None, max_tokens: int
) -> Run:
    engine.reset()
    rule = engine.target.width_rule
    if label == BASELINE:
        engine.target.width_rule = WidthRule(padded=False, exact=False)
    try:
        stream = engine.stream(prompt.prompt, **_request(label, draft_length, max_tokens))
        next(stream)  # the prefill
        before = engine.onnx_seconds
        for _ in stream:
            continue
        inside = engine.onnx_seconds - before
    finally:
        engine.target.width_rule = rule
    result = stream.result
    return Run(
        id=prompt.id,
        category=prompt.category,
        method=label,
        repeat=repeat,
        tokens=result.usage.completion_tokens,
        rounds=result.speculation.rounds,
        decode_s=result.timings.decode_s,
        onnx_s=inside,
        prefill_s=result.timings.prefill_s,
        mean_accepted_tokens=result.speculation.mean_accepted_tokens,
        acceptance_rate=result.speculation.acceptance_rate,
        ids_digest=hashlib.sha256(repr(result.token_ids).encode()).hexdigest()[:16],
        draft_s=result.speculation.draft_s,
        verify_s=result.speculation.verify_s,
    )


def _request(label: str, draft_length: int | None, max_tokens: int) -> RequestOptions:
    """The options that a label stands for."""
    method, _, fixed = label.partition(":")
    options: RequestOptions = {"method": method, "draft_length": draft_length, "max_tokens": max_tokens}
    if label == BASELINE:
        options["method"] = "none"
    elif "/" in fixed:
        options["lookahead"] = [*map(int, fixed.split("/"))]
    elif fixed:
        options["draft_length"] = int(fixed)
    return options


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """A row for each category and method, then "all"; needs the baseline's runs."""
    cells: dict[tuple[str, str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.category, run.method, run.id), []).append(run)
    categories = [*dict.fromkeys(category for category, _, _ in cells)]
    methods = [*dict.fromkeys(method for _, method, _ in cells)]
    groups = {category: [category] for category in categories}
    if len(categories) > 1:
        groups["all"] = categories
    rows = []
    for name, members in groups.items():
        for method in methods:
            ids = [key for key in cells if key[0] in members and key[1] == method]
            paired = [key for key in ids if (key[0], BASELINE, key[2]) in cells]
            if paired:
                rows.append(_summary(name, method, cells, paired))
    return rows


def _summary(
    name: str, method: str, cells: dict[tuple[str, str, str], list[Run]], keys: list[tuple[str, str, str]]
) -> Summary:
    def per_token(key: tuple[str, str, str]) -> float:
        return statistics.median(run.seconds_per_token for run in cells[key])

    own = [per_token(key) for key in keys]
    base = [per_token((category, BASELINE, identity)) for category, _, identity in keys]
    runs = [run for key in keys for run in cells[key]]
    rounds = sum(run.rounds for run in runs)
    return Summary(
        category=name,
        method=method,
        prompts=len(keys),
        tokens_per_s=len(own) / sum(own) if sum(own) else 0.0,
        ratio=sum(base) / sum(own) if sum(own) else 0.0,
        mean_accepted_tokens=sum(run.mean_accepted_tokens * run.rounds for run in runs) / max(1, rounds),
        acceptance_rate=statistics.mean(run.acceptance_rate for run in runs),
        draft_ms=1e3 * sum(run.draft_s for run in runs) / max(1, rounds),
        verify_ms=1e3 * sum(run.verify_s for run in runs) / max(1, rounds),
        overhead_ms=1e3 * sum(run.decode_s - run.onnx_s for run in runs) / max(1, rounds),
        equal=_equal(cells, keys),
    )


def _equal(cells: dict[tuple[str, str, str], list[Run]], keys: list[tuple[str, str, str]]) -> bool | None:
    plain = {key: {run.ids_digest for run in cells.get((key[0], "none", key[2]), [])} for key in keys}
    if not all(plain.values()):
        return None
    return all(len(plain[key] | {run.ids_digest for run in cells[key]}) == 1 for key in keys)


def environment(engine: Engine) -> dict[str, Any]:
    """What a figure depends on: model, precision, versions, processor, threads."""
    manifest = engine.bundle.manifest
    return {
        "model": manifest.name,
        "digest": engine.bundle.digest,
        "precision": manifest.precision.get("requested"),
        "onnxruntime": onnxruntime().__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": engine.threads,
        "exactness": engine.calibration.exactness,
    }


def _read_runs(path: Path, settings: dict[str, Any]) -> list[Run]:
    """Runs of an earlier, interrupted call; begins the file with the settings if there is none."""
    if not path.exists():
        path.write_text(json.dumps({"settings": settings, "started": time.strftime("%Y-%m-%d %H:%M")}) + "\n")
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        head = json.loads(lines[0])["settings"]
        runs = [Run(**json.loads(line)) for line in lines[1:-1] if line]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"{path.name} is no file of bench runs: choose another --output.") from error
    if head != settings:
        raise UsageError(f"{path.name} holds runs of other settings: choose another --output, or delete it.")
    if lines[-1]:  # cut in the middle of a line
        path.write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")
    return runs
