"""v(n): what a run of n positions costs in plain steps, alone and in a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from specrun.models_cache.errors import SpecrunError
from specrun.runtime.engine import Engine
from specrun.runtime.session import ModelSession

CONTEXT = 128  # tokens before the timed ones
SECONDS = 0.15  # for a batch and width, at most, after two runs that do not count
MOST_RUNS = 20
BESIDES = 64  # positions of the widest run of a batch; wider ones, one row alone, stand for batches of short runs
LOGIT_BYTES = 512 << 20  # of a run; wider ones are left out


def run(context: Context, report: Report) -> None:
    """The model itself, in the precision of the timings."""
    amounts = context.amounts
    with models.open_engine(context) as engine:
        measure(engine, amounts.widths, amounts.batches, report)


def measure(engine: Engine, widths: Sequence[int], batches: Sequence[int], report: Report) -> None:
    """Report `ms`, the fastest of a few runs, and `v`, the same over that of batch 1 and width 1; a row a batch.

    inside_ms: the share of `ms` inside ONNX Runtime. A batch that this ONNX Runtime, or the memory, cannot run is
    named in `left_out` with the reason.
    """
    rows: dict[str, list[dict[str, Any]]] = {"ms": [], "inside_ms": [], "v": []}
    left_out: dict[str, str] = {}
    ids = models.text_ids(engine, CONTEXT + max(widths))
    for batch in batches:
        row: dict[str, dict[str, Any]] = {name: {"batch": batch} for name in rows}
        try:
            session = models.open_rows(engine, batch)
            for width in widths:
                if batch > 1 and width > BESIDES:
                    continue
                if batch * width * session.sizes.vocabulary * 4 > LOGIT_BYTES:
                    left_out[f"batch {batch}, width {width}"] = "its logits take too much room"
                    continue
                total, inside = _fastest(session, ids, width)
                row["ms"][str(width)], row["inside_ms"][str(width)] = round(total * 1e3, 4), round(inside * 1e3, 4)
            session.cache.close()
        except SpecrunError as error:
            left_out[f"batch {batch}"] = str(error)
        if len(row["ms"]) > 1:
            for name in ("ms", "inside_ms"):
                rows[name].append(row[name])
            step = rows["ms"][0]["1"]
            rows["v"].append({"batch": batch} | {w: round(ms / step, 3) for w, ms in row["ms"].items() if w != "batch"})
        report.add(**rows, left_out=left_out)
    if not rows["ms"]:
        raise RuntimeError(f"No batch could be run: {next(iter(left_out.values()))}")


def _fastest(session: ModelSession, ids: Sequence[int], width: int) -> tuple[float, float]:
    """Seconds of a run of `width` new positions in every row, with the logits of all: (whole, inside ONNX Runtime)."""
    batch = session.cache.batch
    context = [list(ids[:CONTEXT])] * batch
    new = [list(ids[CONTEXT : CONTEXT + width])] * batch
    _rewind(session, min(CONTEXT, min(session.cache.lengths)))
    if session.cache.lengths[0] < CONTEXT:
        for start in range(0, CONTEXT, 32):
            session.run_batch([row[start : start + 32] for row in context], rows=1)
    best, end, count = (math.inf, math.inf), math.inf, 0
    while count < 2 + MOST_RUNS and (count < 4 or time.perf_counter() < end):
        if count == 2:
            best, end = (math.inf, math.inf), time.perf_counter() + SECONDS
        before, began = session.onnx_seconds, time.perf_counter()
        session.run_batch(new, rows=width)
        best = min(best, (time.perf_counter() - began, session.onnx_seconds - before))
        _rewind(session, CONTEXT)
        count += 1
    return best


def _rewind(session: ModelSession, length: int) -> None:
    for row in range(session.cache.batch):
        session.cache.rewind_to(length, row)
