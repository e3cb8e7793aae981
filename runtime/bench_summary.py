"""What runs add up to: speed against the baseline by category and method, with confidence intervals over prompts."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.bench_runs import BASELINE, Run

EVERYTHING: Final = "all"
RESAMPLES: Final = 10_000
CONFIDENCE: Final = 0.95

Key = tuple[str, str, tuple[str, str]]
"""Category, method, prompt."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A method over a category. ratio: baseline's time a token / the method's, each prompt's median weighing the same.

    ratio_low, ratio_high: the ratio's 95 % interval over prompts, None for fewer than two. *_ms: milliseconds a round:
    the prefill shared out over the rounds, drafting, the target's run, and the rest (accepting, committing, text);
    overhead_ms of those of decoding were outside ONNX Runtime. *_bytes: memory of the method. equal: whether every text
    is that of exact plain decoding; None where "none" was not run.
    """

    model: str
    category: str
    method: str
    prompts: int
    tokens_per_s: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    mean_accepted_tokens: float
    acceptance_rate: float
    prefill_ms: float
    draft_ms: float
    verify_ms: float
    rest_ms: float
    overhead_ms: float
    weights_bytes: int
    kv_target_bytes: int
    kv_draft_bytes: int
    equal: bool | None

    @property
    def loses(self) -> bool:
        """Whether the method drafts, and is slower than the fastest plain loop."""
        return self.method not in (BASELINE, "none") and self.ratio < 1.0


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """A row for each category and method of one model, then "all"; needs the baseline's runs."""
    cells: dict[Key, list[Run]] = {}
    for run in runs:
        cells.setdefault((run.category, run.method, run.prompt), []).append(run)
    categories = [*dict.fromkeys(category for category, _, _ in cells)]
    methods = [*dict.fromkeys(method for _, method, _ in cells)]
    groups = {category: [category] for category in categories}
    if len(categories) > 1:
        groups[EVERYTHING] = categories
    rows = []
    for name, members in groups.items():
        for method in methods:
            keys = [key for key in cells if key[0] in members and key[1] == method]
            paired = [key for key in keys if (key[0], BASELINE, key[2]) in cells]
            if paired:
                rows.append(_summary(name, method, cells, paired))
    return rows


def totals(rows: Iterable[Summary]) -> list[Summary]:
    """Of each model and method the row over all prompts."""
    last = {(row.model, row.method): row for row in rows}
    return list(last.values())


def _summary(name: str, method: str, cells: dict[Key, list[Run]], keys: list[Key]) -> Summary:
    own = [median_per_token(cells[key]) for key in keys]
    base = [median_per_token(cells[category, BASELINE, prompt]) for category, _, prompt in keys]
    runs = [run for key in keys for run in cells[key]]
    rounds = max(1, sum(run.rounds for run in runs))
    low, high = ratio_interval(base, own) or (None, None)
    return Summary(
        model=runs[0].model,
        category=name,
        method=method,
        prompts=len(keys),
        tokens_per_s=len(own) / sum(own) if sum(own) else 0.0,
        ratio=sum(base) / sum(own) if sum(own) else 0.0,
        ratio_low=low,
        ratio_high=high,
        mean_accepted_tokens=sum(run.mean_accepted_tokens * run.rounds for run in runs) / rounds,
        acceptance_rate=statistics.mean(run.acceptance_rate for run in runs),
        prefill_ms=1e3 * sum(run.prefill_s for run in runs) / rounds,
        draft_ms=1e3 * sum(run.draft_s for run in runs) / rounds,
        verify_ms=1e3 * sum(run.verify_s for run in runs) / rounds,
        rest_ms=1e3 * sum(run.decode_s - run.draft_s - run.verify_s for run in runs) / rounds,
        overhead_ms=1e3 * sum(run.decode_s - run.onnx_s for run in runs) / rounds,
        weights_bytes=max(run.weights_bytes for run in runs),
        kv_target_bytes=max(run.kv_target_bytes for run in runs),
        kv_draft_bytes=max(run.kv_draft_bytes for run in runs),
        equal=_equal(cells, keys),
    )


def median_per_token(runs: Sequence[Run]) -> float:
    """Seconds a token, the median over repeats."""
    return statistics.median(run.seconds_per_token for run in runs)


def ratio_interval(
    base: Sequence[float], own: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of sum(base) / sum(own) over pairs; None for fewer than two.

    Pairs are drawn with replacement (Efron 1979), so it covers how prompts differ, and noise of the clock as far as it
    shows between them. For a handful of prompts it is too narrow.
    """
    if len(base) < 2:
        return None
    pairs: NDArray[np.float64] = np.array([base, own])
    drawn = np.random.default_rng(seed).integers(len(base), size=(resamples, len(base)))
    sums = pairs[:, drawn].sum(axis=2)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(sums[0] / sums[1], (tail, 100 - tail))
    return float(low), float(high)


def _equal(cells: dict[Key, list[Run]], keys: list[Key]) -> bool | None:
    plain = {key: {run.ids_digest for run in cells.get((key[0], "none", key[2]), [])} for key in keys}
    if not all(plain.values()):
        return None
    return all(len(plain[key] | {run.ids_digest for run in cells[key]}) == 1 for key in keys)
