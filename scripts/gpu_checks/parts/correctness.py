"""The device's graphs against the processor's: logits on a fixed text, and the text that plain decoding writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_checks import models
from gpu_checks.child import Report, for_each
from gpu_checks.context import Context
from gpu_checks.parts.export import REFERENCE
from specrun.export.fidelity import compare_logits
from specrun.models_cache.errors import SpecrunError
from specrun.runtime.backend import default_threads
from specrun.runtime.engine import Engine
from specrun.runtime.session import ModelSession, WidthRule, session_opener

POSITIONS = 200
LEAST_AGREEMENT = 0.8  # of the best tokens: less is no rounding
SPARE = 40  # positions of the context that stay free
STEPS = (1, 2, 5, 9)  # widths in which the text is run, besides one chunk


def run(context: Context, report: Report) -> None:
    """Compare each precision with the processor's fp32, and with the same graph where the processor can run it."""
    with models.open_engine(context, REFERENCE, "cpu") as engine:
        ids = models.text_ids(engine, min(POSITIONS, engine.context - SPARE))
        expected = _logits(engine.target, ids, len(ids))
    rows: list[dict[str, Any]] = []

    def compare(precision: str) -> None:
        with models.open_engine(context, precision) as engine:
            whole = _logits(engine.target, ids, len(ids))
            rows.append(_row(precision, f"{REFERENCE} on cpu", "one chunk", expected, whole))
            for width in STEPS:
                stepped = _logits(engine.target, ids, width)
                rows.append(_row(precision, "itself in one chunk", f"{width} at a time", whole, stepped))
            report.add(logits=rows)
            if context.device != "cpu":
                try:
                    own = _on_cpu(context, engine, ids)
                except SpecrunError as error:  # its kernels may not have this precision
                    report.add(**{f"{precision}_on_cpu": str(error)})
                else:
                    rows.append(_row(precision, "itself on cpu", "one chunk", own, whole))
                    report.add(logits=rows)

    for_each(context.amounts.precisions, report, compare)
    wrong = [row["precision"] for row in rows if row["argmax_agreement"] < LEAST_AGREEMENT]
    if wrong:
        raise RuntimeError(f"The logits of {', '.join(dict.fromkeys(wrong))} are not those of the model.")


def _on_cpu(context: Context, engine: Engine, ids: list[int]) -> NDArray[np.float32]:
    """A session alone: to load the engine, its widths would be probed, which takes the processor most of a minute."""
    session = session_opener(engine.bundle, context.threads or default_threads())(1, WidthRule())
    try:
        return _logits(session, ids, len(ids))
    finally:
        session.close()


def _logits(session: ModelSession, ids: list[int], width: int) -> NDArray[np.float32]:
    """Logits f32 [len(ids), vocabulary] of a text that is run `width` positions at a time."""
    session.rewind_to(0)
    pieces = [
        models.on_host(session.run(ids[start : start + width], rows=len(ids[start : start + width])))
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
