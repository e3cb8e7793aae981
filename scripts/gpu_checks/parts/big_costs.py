"""v(n) of a random model in the sizes of LLaMA-7B: where reading the weights is what a step costs."""

from __future__ import annotations

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.parts.costs import CONTEXT, measure
from gpu_checks.random_model import SHAPES
from specrun.models_cache.layout import find_bundle
from specrun.runtime.session import ModelSession, WidthRule, session_opener


def run(context: Context, report: Report) -> None:
    """One load of the weights serves every batch."""
    amounts = context.amounts
    report.add(shape=amounts.big, parameters=SHAPES[amounts.big].parameters)
    bundle = find_bundle(amounts.big)
    opener = session_opener(bundle, models.threads_of(context), context.device)

    def open_session(batch: int) -> ModelSession:
        return opener(batch, WidthRule())

    ids = models.text_ids(bundle, CONTEXT + max(amounts.big_widths))
    measure(open_session, ids, amounts.big_widths, amounts.big_batches, report)
