"""Runs with known figures."""

from __future__ import annotations

from typing import Any

from specrun.runtime.bench_runs import BenchPrompt, Run

BENCH_PROMPTS = [BenchPrompt("1", "qa", "What is a tide?"), BenchPrompt("2", "code", "def add(a, b):")]


def run(**changes: Any) -> Run:
    values: dict[str, Any] = {
        "model": "m",
        "id": "1",
        "prompt_digest": "p",
        "category": "qa",
        "method": "baseline",
        "repeat": 0,
        "tokens": 11,
        "rounds": 10,
        "evaluated": 0,
        "accepted": 0,
        "prefill_s": 0.1,
        "decode_s": 1.0,
        "draft_s": 0.0,
        "verify_s": 0.8,
        "onnx_s": 0.9,
        "mean_accepted_tokens": 1.0,
        "acceptance_rate": 0.0,
        "weights_bytes": 1000,
        "kv_target_bytes": 200,
        "kv_draft_bytes": 0,
        "peak_bytes": 5000,
        "ids_digest": "x",
    }
    return Run(**(values | changes))
