"""S(alpha, K, phi) by the clock against the formula: the big random model and its draft, at chosen acceptance."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpu_checks.child import Report
from gpu_checks.context import Context
from specrun.runtime.bench_runs import BASELINE, BenchPrompt
from specrun.runtime.engine import Engine
from specrun.runtime.synthetic import run_synthetic, summarise_synthetic

FORMULA = "S = (1 - a^(K+1)) / ((1 - a)(K phi + v(K+1) + r)); theorem: the same with v = 1 and r = 0"
KEPT = (
    "acceptance",
    "draft_length",
    "rounds",
    "acceptance_rate",
    "expected_tokens",
    "mean_accepted_tokens",
    "draft",
    "verify",
    "rest",
    "speedup",
    "speedup_exact",
    "predicted",
    "theorem",
    "equal",
)


def run(context: Context, report: Report) -> None:
    """A row for each acceptance and K; `error` is (predicted - measured) / measured."""
    amounts = context.amounts
    report.add(target=amounts.big, draft=amounts.big_draft, formula=FORMULA)
    rows: list[dict[str, Any]] = []
    prompts = [BenchPrompt("1", "all", "The tide comes in twice a day, and twice a day it goes out again.")]
    with Engine.load(
        amounts.big, draft=amounts.big_draft, device=context.device, threads=context.threads, context=1024
    ) as engine:
        report.add(exactness=engine.calibration.exactness)
        for k in amounts.draft_lengths:
            bench = run_synthetic(
                engine,
                prompts,
                acceptances=amounts.acceptances,
                draft_lengths=(k,),
                methods=["draft"],
                max_tokens=amounts.synthetic_tokens,
                repeats=amounts.repeats,
            )
            step = min(run.seconds_per_token for run in bench.runs if run.method == BASELINE)
            for cell in summarise_synthetic(bench.runs):
                row = {name: value for name, value in asdict(cell).items() if name in KEPT}
                rows.append({**row, "error": cell.error, "phi": cell.draft / k})
            report.add(step_ms=step * 1e3, cells=rows, all_equal=all(row["equal"] for row in rows))
