"""v(n) of a random model in the sizes of LLaMA-7B: where reading the weights is what a step costs."""

from __future__ import annotations

from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.parts.costs import measure
from gpu_checks.random_model import SHAPES
from specrun.runtime.engine import Engine


def run(context: Context, report: Report) -> None:
    """As for the model itself."""
    amounts = context.amounts
    report.add(shape=amounts.big, parameters=SHAPES[amounts.big].parameters)
    with Engine.load(amounts.big, device=context.device, threads=context.threads, context=1024) as engine:
        measure(engine, amounts.big_widths, amounts.big_batches, report)
