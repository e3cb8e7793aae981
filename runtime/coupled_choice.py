"""Coupled sampling without filters straight from a row of logits: the token that `coupled_token` draws, sooner."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

_UNIT: Final = 2.0**-53
_OFFSET: Final = 127 + 53 - 32  # of the bounds below: the bias of an exponent, and the bits of the noise left out
_SLACK: Final = 0.01  # far above what rounding to 32 bits can do to the bound of a token that may win
_STEEPEST: Final = 1e30  # which keeps 0 times it a number


def coupled_choice(row: NDArray[np.float32], peak: float, temperature: float, noise: NDArray[np.uint64]) -> int:
    """The token of least E / w, the lowest id on ties, where w = exp((logit - peak) / temperature), E = -log(1 - u).

    row    f32 [n], -inf for tokens that may not be drawn; `peak`, finite, is its largest value
    noise  u64 [n] in [0, 2**53), u times 2**53: what `coupled_noise` gives for the ids 0 .. n - 1

    As E >= u, log2(E / w) is at least log2 u - log2 w. That is bounded from below for all tokens in 32-bit floats, log2
    by exponent and fraction of the number; E / w itself is then computed where the bound lets a token win.
    """
    bounds = (noise >> np.uint64(32)).astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= np.float32(2.0**-23)
    with np.errstate(over="ignore"):
        steps = row - np.float32(peak)
        steps *= np.float32(min(1.0 / (temperature * math.log(2.0)), _STEEPEST))
    bounds -= steps
    near = int(bounds.argmin())
    exact = float(_ratios(row, peak, temperature, noise, np.array([near]))[0])
    few = np.flatnonzero(bounds <= math.log2(exact) + _OFFSET + _SLACK if exact > 0.0 else noise == 0)
    return int(few[_ratios(row, peak, temperature, noise, few).argmin()])


def _ratios(
    row: NDArray[np.float32], peak: float, temperature: float, noise: NDArray[np.uint64], ids: NDArray[np.int64]
) -> NDArray[np.float64]:
    """E / w of these ids, f64; infinite where w is 0."""
    weights = row[ids].astype(np.float64)
    weights -= peak
    weights /= temperature
    np.exp(weights, out=weights)
    ratios = np.full(ids.size, math.inf)
    np.divide(-np.log1p(noise[ids] * -_UNIT), weights, out=ratios, where=weights > 0.0)
    return ratios
