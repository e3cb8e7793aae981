"""Tokens a second of plain decoding and of each method with the speculators that the model has."""

from __future__ import annotations

import statistics
from typing import Any

from gpu_checks import models
from gpu_checks.child import Report, for_each
from gpu_checks.context import Context
from specrun.runtime.bench import BASELINE, BenchPrompt, Run, run_bench
from specrun.runtime.bench_summary import median_per_token


def run(context: Context, report: Report) -> None:
    """In each precision; the ratio is against the fastest plain loop, which need not be exact."""
    amounts = context.amounts
    prompts = [BenchPrompt(str(n), "all", text) for n, text in enumerate(models.PROMPTS[: amounts.prompts])]
    rows: dict[str, list[dict[str, Any]]] = {}
    done: dict[str, int] = {}

    def time(precision: str) -> None:
        kept = context.work / f"speed-{precision}.jsonl"
        kept.unlink(missing_ok=True)  # of an earlier check
        how: dict[str, Any] = {"max_tokens": amounts.max_tokens, "repeats": amounts.repeats, "output": kept}
        with models.open_engine(context, precision) as engine, models.usable(engine, amounts.methods) as methods:
            for count in range(1, len(prompts) + 1):  # runs that were made are in the file, so each call adds a prompt
                bench = run_bench(engine, prompts[:count], methods=methods, **how)
                found = _summary(bench.runs)
                rows[precision] = [{"precision": precision, "method": name, **row} for name, row in found.items()]
                done[precision] = count
                report.add(speed=[row for own in rows.values() for row in own], prompts=done)

    for_each(amounts.precisions[: amounts.timed], report, time)


def _summary(runs: tuple[Run, ...]) -> dict[str, dict[str, Any]]:
    """By method, over prompts that each weigh the same."""
    by_method: dict[str, dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        by_method.setdefault(run.method, {}).setdefault(run.prompt, []).append(run)
    base = {prompt: median_per_token(found) for prompt, found in by_method[BASELINE].items()}
    plain = {prompt: found[0].ids_digest for prompt, found in by_method["none"].items()}
    result = {}
    for method, prompts in by_method.items():
        own = [run for found in prompts.values() for run in found]
        per_token = {prompt: median_per_token(found) for prompt, found in prompts.items()}
        rounds, tokens = sum(run.rounds for run in own), sum(run.tokens - 1 for run in own)
        evaluated = sum(run.evaluated for run in own)
        decode = sum(run.decode_s for run in own)
        result[method] = {
            "tokens_per_s": 1 / statistics.mean(per_token.values()),
            "ratio": statistics.mean(base[prompt] / seconds for prompt, seconds in per_token.items()),
            "mean_accepted_tokens": tokens / max(1, rounds),
            "acceptance": sum(run.accepted for run in own) / evaluated if evaluated else None,
            "draft_share": sum(run.draft_s for run in own) / decode,
            "outside_ms_a_round": 1e3 * (decode - sum(run.onnx_s for run in own)) / max(1, rounds),
            "equal_texts": f"{sum(run.ids_digest == plain[run.prompt] for run in own)}/{len(own)}",
        }
    return result
