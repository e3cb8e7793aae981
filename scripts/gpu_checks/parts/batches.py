"""Throughput of many requests by the rows that run at a time, plain and with speculation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from specrun.runtime.batch import BatchEngine, BatchRequest
from specrun.runtime.engine import Engine
from specrun.runtime.result import Result

METHODS = ("none", "auto")


def run(context: Context, report: Report) -> None:
    """Whole jobs, prompts read included; every answer is compared with what the request gets alone."""
    amounts = context.amounts
    rows: list[dict[str, Any]] = []
    with models.open_engine(context) as engine:
        requests = _requests(amounts.requests, amounts.max_tokens)
        alone = []
        for request in requests:
            engine.reset()
            alone.append(engine.generate(request.prompt, method="none", max_tokens=amounts.max_tokens))
        for size in amounts.batches:
            if BatchEngine(engine, batch_size=size).batch_size < size:
                report.add(left_out="This ONNX Runtime runs one row at a time, so larger batches were left out.")
                break
            for method in METHODS:
                rows.append(_job(engine, requests, size, method, alone, rows))
                report.add(throughput=rows)


def _requests(count: int, max_tokens: int) -> list[BatchRequest]:
    """Different prompts: a model that has seen one must read the next."""
    prompts = [f"{models.PROMPTS[n % len(models.PROMPTS)]} ({n + 1})" for n in range(count)]
    return [BatchRequest(n, prompt, {"max_tokens": max_tokens}) for n, prompt in enumerate(prompts)]


def _job(
    engine: Engine,
    requests: Sequence[BatchRequest],
    size: int,
    method: str,
    alone: Sequence[Result],
    before: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    engine.reset()
    batch = BatchEngine(engine, batch_size=size)
    given = [BatchRequest(r.index, r.prompt, {**r.options, "method": method}) for r in requests]
    start = time.perf_counter()
    answers = {answer.index: answer.result for answer in batch.run(given)}
    seconds = time.perf_counter() - start
    failed = [answer for answer in answers.values() if not isinstance(answer, Result)]
    if failed:
        raise failed[0]
    stats = batch.stats
    rate = stats.completion_tokens / seconds
    first = before[0]["tokens_per_s"] if before else rate
    different = sum(answers[n].token_ids != result.token_ids for n, result in enumerate(alone))  # type: ignore[union-attr]
    return {
        "rows": size,
        "method": method,
        "tokens_per_s": rate,
        "ratio": rate / first,
        "decode_tokens_per_s": (stats.completion_tokens - len(requests)) / stats.decode_s if stats.decode_s else None,
        "prefill_s": stats.prefill_s,
        "acceptance": stats.acceptance_rate,
        "different_texts": different,
    }
