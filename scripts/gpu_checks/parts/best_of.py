"""Memory of N samples of one prompt, whose prefix is stored once."""

from __future__ import annotations

from gpu_checks.child import Report
from gpu_checks.context import Context


def run(context: Context, report: Report) -> None:
    """Not built yet."""
    report.add(built=False, n=context.amounts.samples)
