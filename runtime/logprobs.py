"""Log-probabilities of raw logits, as answers report them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.sampling import check_peak, largest


def _log_normaliser(row: NDArray[np.float32]) -> tuple[int, float, float]:
    """Index of the largest logit, that logit, and log sum exp(row - largest), stable where one logit dominates."""
    best = int(row.argmax())
    peak = float(row[best])
    check_peak(row, peak)
    others = row.astype(np.float64)
    others -= peak
    np.exp(others, out=others)
    others[best] = 0.0
    return best, peak, float(np.log1p(others.sum()))


def logprob(logits: NDArray[np.float32], token: int, *, tokens: int) -> float:
    """The log-probability of a token: log-softmax (f64, natural log) of a raw row f32 [V] over its real tokens.

    Penalties, temperature and filters play no part: the value is the same under every sampling option.
    """
    real = logits[:tokens]
    _, peak, normaliser = _log_normaliser(real)
    return float(real[token]) - peak - normaliser


def top_logprobs(logits: NDArray[np.float32], n: int, *, tokens: int) -> list[tuple[int, float]]:
    """The n most probable (token, log-probability) of a raw row f32 [V], as in `logprob`; best first, then by id."""
    real = logits[:tokens]
    _, peak, normaliser = _log_normaliser(real)
    ids = largest(real, n) if n > 0 else np.empty(0, np.int64)
    order = np.argsort(-real[ids], kind="stable")
    return [(int(token), float(real[token]) - peak - normaliser) for token in ids[order]]
