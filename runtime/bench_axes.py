"""What each method costs and brings, side by side: memory beyond the target's, acceptance, and training."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from specrun.models_cache.layout import Bundle
from specrun.models_cache.speculator import InstalledSpeculator
from specrun.runtime.bench_runs import BASELINE
from specrun.runtime.bench_summary import Summary, totals
from specrun.runtime.heads import HEAD_METHODS

REPORT_FILE = "speculator.json"
TRAINED = ("draft", *HEAD_METHODS)
_MOST = 1e15  # of any number of a report


@dataclass(frozen=True, slots=True)
class Axes:
    """A method over all prompts. weights_bytes, kv_bytes: what it needs beside the target's own.

    training_tokens, training_minutes: what its speculator was trained on, and how long; 0 where nothing is trained,
    None where nothing is known of it. Tables of n-grams, less than a kB a token of text, are not counted.
    """

    model: str
    method: str
    weights_bytes: int
    kv_bytes: int
    mean_accepted_tokens: float
    acceptance_rate: float
    ratio: float
    training_tokens: int | None
    training_minutes: float | None


def method_axes(
    rows: Iterable[Summary], bundle: Bundle, draft: Bundle | InstalledSpeculator | None = None
) -> list[Axes]:
    """A row for each method that was timed on `bundle`, in order; draft: what `--draft` named."""
    found = []
    for row in totals(rows):
        if row.method == BASELINE:
            continue
        base = row.method.partition(":")[0].partition("+")[0]
        tokens, minutes = _training(base, bundle, draft)
        found.append(
            Axes(
                model=row.model,
                method=row.method,
                weights_bytes=row.weights_bytes - bundle.weights_bytes,
                kv_bytes=row.kv_draft_bytes,
                mean_accepted_tokens=row.mean_accepted_tokens,
                acceptance_rate=row.acceptance_rate,
                ratio=row.ratio,
                training_tokens=tokens,
                training_minutes=minutes,
            )
        )
    return found


def _training(base: str, bundle: Bundle, draft: Bundle | InstalledSpeculator | None) -> tuple[int | None, float | None]:
    """(tokens seen, minutes) of the speculator that serves a method."""
    if base not in TRAINED:
        return 0, 0.0
    if isinstance(draft, Bundle) and base == "draft":
        return None, None
    serving = [draft] if isinstance(draft, InstalledSpeculator) else []
    serving += bundle.speculators()
    for speculator in serving:
        if speculator.manifest.method == base:
            return training_cost(speculator)
    return None, None


def training_cost(speculator: InstalledSpeculator) -> tuple[int | None, float | None]:
    """(tokens seen, minutes) of a training by `specrun train`, as its report says; None where it says nothing."""
    try:
        report = json.loads((speculator.path / REPORT_FILE).read_text(encoding="utf-8"))["report"]
        tokens, minutes = report.get("tokens_seen"), report.get("minutes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, None
    return (
        tokens if isinstance(tokens, int) and 0 <= tokens <= _MOST else None,
        float(minutes) if isinstance(minutes, int | float) and 0 <= minutes <= _MOST else None,
    )
