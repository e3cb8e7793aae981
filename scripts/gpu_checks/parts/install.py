"""Unpacks the wheels of the folder beside the check, so that its processes import them first."""

from __future__ import annotations

from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.wheels import install


def run(context: Context, report: Report) -> None:
    """Install, and name what was installed."""
    report.add(wheels=[wheel.name for wheel in context.wheels])
    if context.wheels:
        install(context.wheels, context.site)
