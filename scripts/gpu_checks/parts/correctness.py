"""The device's graphs against the processor's: logits on a fixed text, and the text that plain decoding writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.parts.export import REFERENCE
from specrun.export.fidelity import compare_logits
from specrun.models_cache.errors import SpecrunError
from specrun.models_cache.layout import Bundle
from specrun.runtime.session import ModelSession

POSITIONS = 200
STEPS = (1, 2, 5, 9)  # widths in which the text is run, besides one chunk


def run(context: Context, report: Report) -> None:
    """Compare each precision with the processor's fp32, and with the same graph where the processor can run it."""
    reference = models.bundle_of(REFERENCE, "cpu")
    ids = models.text_ids(reference, min(POSITIONS, reference.manifest.sizes.context - 40))
    expected = _logits(models.open_session(context, reference, "cpu"), ids, len(ids))
    rows: list[dict[str, Any]] = []
    for precision in context.amounts.precisions:
        bundle = models.bundle_of(precision, context.device)
        session = models.open_session(context, bundle, context.device)
        whole = _logits(session, ids, len(ids))
        rows.append(_row(precision, f"{REFERENCE} on cpu", "one chunk", expected, whole))
        for width in STEPS:
            stepped = _logits(session, ids, width)
            rows.append(_row(precision, "itself in one chunk", f"{width} at a time", whole, stepped))
        if context.device != "cpu":
            try:
                rows.append(_row(precision, "itself on cpu", "one chunk", _on_cpu(context, bundle, ids), whole))
            except SpecrunError as error:  # its kernels may not have this precision
                report.add(**{f"{precision}_on_cpu": str(error)})
        session.close()
        report.add(logits=rows)


def _on_cpu(context: Context, bundle: Bundle, ids: list[int]) -> NDArray[np.float32]:
    return _logits(models.open_session(context, bundle, "cpu"), ids, len(ids))


def _logits(session: ModelSession, ids: list[int], width: int) -> NDArray[np.float32]:
    """Logits f32 [len(ids), vocabulary] of a text that is run `width` positions at a time."""
    session.rewind_to(0)
    pieces = [
        np.array(session.run(ids[start : start + width], rows=len(ids[start : start + width])), np.float32)
        for start in range(0, len(ids), width)
    ]
    return np.concatenate(pieces)


def _row(
    precision: str, against: str, how: str, expected: NDArray[np.float32], got: NDArray[np.float32]
) -> dict[str, Any]:
    found = asdict(compare_logits(expected, got))
    largest = float(np.abs(expected - got).max())
    equal = bool(np.array_equal(expected, got))
    return {"precision": precision, "against": against, "run": how, **found, "largest": largest, "bit_equal": equal}
