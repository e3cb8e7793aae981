"""Exports the graphs: the model in each precision for the device, its fp32 reference, and the random big model."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any

from gpu_checks import models, random_model
from gpu_checks.child import Report
from gpu_checks.context import Context
from specrun.runtime.backend import default_threads

REFERENCE = "fp32"  # of the processor's graphs, which the device's are compared with


def run(context: Context, report: Report) -> None:
    """Export side by side, one process each; one that fails takes no other with it. Raises at the end if one did."""
    amounts = context.amounts
    if context.dry_run:
        random_model.write_source(context.source, random_model.SHAPES["tiny"])
    jobs: dict[str, tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]] = {}
    for precision in amounts.precisions:
        jobs[models.name_of(precision, context.device)] = (_export, (context, precision, context.device))
    jobs.setdefault(models.name_of(REFERENCE, "cpu"), (_export, (context, REFERENCE, "cpu")))
    for shape in (amounts.big, amounts.big_draft):
        jobs[shape] = (_write_random, (context, shape))
    rows: list[dict[str, Any]] = []
    failed = {}
    # Fresh processes: this one has a thread, whose locks a fork would copy as they are.
    workers = min(len(jobs), context.threads or default_threads())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting: dict[Future[dict[str, Any]], str] = {
            pool.submit(function, *arguments): name for name, (function, arguments) in jobs.items()
        }
        for future in as_completed(waiting):
            name = waiting[future]
            try:
                rows.append({"bundle": name, **future.result()})
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
            report.add(bundles=rows, failed=failed)
    if failed:
        raise RuntimeError(f"{', '.join(failed)} could not be exported: {next(iter(failed.values()))}")


def _export(context: Context, precision: str, device: str) -> dict[str, Any]:
    start = time.perf_counter()
    bundle = models.export(context, precision, device)
    fidelity = bundle.manifest.fidelity
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "file_mb": round(bundle.weights_bytes / 1e6, 1),
        "logit_rmse": fidelity.logit_rmse if fidelity else None,
        "argmax_agreement": fidelity.argmax_agreement if fidelity else None,
        "speculators": ", ".join(speculator.name for speculator in bundle.speculators()),
    }


def _write_random(context: Context, name: str) -> dict[str, Any]:
    start = time.perf_counter()
    shape = random_model.SHAPES[name]
    precision = "fp16" if context.device == "cuda" else "fp32"
    bundle = random_model.write_bundle(name, shape, precision, context.device, context.work)
    seconds = round(time.perf_counter() - start, 2)
    return {"seconds": seconds, "file_mb": round(bundle.weights_bytes / 1e6, 1), "parameters": shape.parameters}
