"""Memory of N samples of one prompt against as many copies of it; a GPU's graphs do copy it."""

from __future__ import annotations

import time
from dataclasses import asdict

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.driver import DeviceMemory
from specrun.export.fidelity import TEXT
from specrun.runtime.cost_model import prefix_saving

TEXTS = 4  # repeats of the text that is the prompt: about 900 tokens


def run(context: Context, report: Report) -> None:
    """By what the runtime says of its buffers, by the device's memory, and by arithmetic."""
    amounts = context.amounts
    prompt = models.PROMPTS[0] if context.dry_run else TEXT * TEXTS
    with models.open_engine(context) as engine:
        engine.generate(prompt, method="none", max_tokens=1)  # the prompt is in its buffers then
        memory = DeviceMemory(context.device)
        before, _ = memory.read()
        start = time.perf_counter()
        result = engine.best_of(prompt, n=amounts.samples, max_tokens=amounts.max_tokens, seed=1)
        seconds = time.perf_counter() - start
        after, _ = memory.read()
        written = result.usage.completion_tokens
        prefix = result.usage.prompt_tokens
        report.add(
            n=amounts.samples,
            prefix_stored_once=bool(result.memory.kv_prefix_bytes),
            method=result.method,
            exactness=result.exactness,
            prompt_tokens=prefix,
            completion_tokens=written,
            tokens_per_s=written / seconds,
            memory=asdict(result.memory),
            kv_saved=result.memory.kv_saved,
            saved_by_arithmetic=prefix_saving(prefix, amounts.max_tokens, amounts.samples),
            device_gb_taken=(after - before) / 1e9,
            different_texts=len({candidate.text for candidate in result.candidates}),
        )
