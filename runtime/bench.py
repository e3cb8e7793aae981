"""Times methods against the fastest plain loop: alternating runs, paired by prompt, resumable.

The baseline is plain decoding at its natural width 1, inexact as that is; only `bench` may run it. Every run starts
from an engine that has forgotten all earlier ones, so no method profits from another's text. Methods alternate within
a model; models are timed one after another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from specrun.models_cache.errors import UsageError
from specrun.models_cache.progress import Progress
from specrun.runtime.bench_environment import peak_memory
from specrun.runtime.bench_runs import BASELINE, Bench, BenchPrompt, Run, time_in_turn
from specrun.runtime.engine import Engine
from specrun.runtime.request import RequestOptions
from specrun.runtime.session import WidthRule
from specrun.runtime.stream import Stream

__all__ = ["BASELINE", "Bench", "BenchPrompt", "Run", "load_prompts", "plain_widths", "run_bench", "time_stream"]


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
    identity, category = str(record.get("question_id", record.get("id", number))), str(record.get("category", "all"))
    json.dumps([identity, category, prompt], ensure_ascii=False).encode()  # half a surrogate pair is no text
    return BenchPrompt(identity, category, prompt)


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
) -> Bench:
    """Time the baseline and `methods` on every prompt, in turn, `repeats` times.

    "ngram:4" fixes K to 4, "lookahead:5/4/5" sets window, n-grams and guesses.

    output: a JSONL file of runs; those of these prompts already in it, of the same settings, are not run again.
    """

    def timed(prompt: BenchPrompt, label: str, repeat: int, tokens: int | None) -> Run:
        engine.reset()
        most = max_tokens if tokens is None else min(tokens, max_tokens)
        with plain_widths(engine) if label == BASELINE else nullcontext():
            stream = engine.stream(prompt.prompt, **_request(label, draft_length, most))
            return time_stream(engine, stream, prompt, label, repeat)

    labels = [BASELINE, *[method for method in methods if method != BASELINE]]
    settings = {"max_tokens": max_tokens, "draft_length": draft_length}
    return time_in_turn(engine, prompts, labels, repeats, timed, settings=settings, output=output, progress=progress)


def _request(label: str, draft_length: int | None, max_tokens: int) -> RequestOptions:
    """The options that a label stands for; draft_length: of those without a K."""
    method, _, fixed = label.partition(":")
    options: RequestOptions = {"method": method, "draft_length": draft_length, "max_tokens": max_tokens}
    if label == BASELINE:
        options |= {"method": "none", "draft_length": None}
    elif "/" in fixed:
        options["lookahead"] = [*map(int, fixed.split("/"))]
    elif fixed:
        options["draft_length"] = int(fixed)
    return options


@contextmanager
def plain_widths(engine: Engine) -> Iterator[None]:
    """Within it the target runs at every width as it is, unpadded: the fastest plain loop, not exact."""
    rule = engine.target.width_rule
    engine.target.width_rule = WidthRule(padded=False, exact=False)
    try:
        yield
    finally:
        engine.target.width_rule = rule


def time_stream(
    engine: Engine, stream: Stream, prompt: BenchPrompt, label: str, repeat: int, *, whole_rounds: int | None = None
) -> Run:
    """Read a stream to its end, or with `whole_rounds` to the end of the round that reaches so many tokens."""
    pieces = iter(stream)
    written = len(next(pieces).tokens)  # the prefill
    before = engine.onnx_seconds
    for piece in pieces:
        written += len(piece.tokens)
        if whole_rounds is not None and written >= whole_rounds:
            stream.cancel()
    inside = engine.onnx_seconds - before
    result = stream.result
    counts, memory = result.speculation, engine.memory(result.method)
    ids = result.token_ids if whole_rounds is None else result.token_ids[:whole_rounds]
    return Run(
        model=result.model,
        id=prompt.id,
        prompt_digest=prompt.digest,
        category=prompt.category,
        method=label,
        repeat=repeat,
        tokens=result.usage.completion_tokens,
        rounds=counts.rounds,
        evaluated=counts.evaluated,
        accepted=counts.accepted,
        prefill_s=result.timings.prefill_s,
        decode_s=result.timings.decode_s,
        draft_s=counts.draft_s,
        verify_s=counts.verify_s,
        onnx_s=inside,
        mean_accepted_tokens=counts.mean_accepted_tokens,
        acceptance_rate=counts.acceptance_rate,
        weights_bytes=memory.weights_bytes,
        kv_target_bytes=memory.kv_target_bytes,
        kv_draft_bytes=memory.kv_draft_bytes,
        peak_bytes=peak_memory(),
        ids_digest=hashlib.sha256(repr(ids).encode()).hexdigest()[:16],
    )
