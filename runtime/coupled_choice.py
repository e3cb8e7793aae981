"""Coupled sampling without filters straight from a row of logits: the token that `coupled_token` draws, sooner."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.coupled_noise import CoupledNoise, Ids, least_race, longest_race

_OFFSET: Final = 127 + 32  # of the bounds below: the bias of an exponent, and the bits of the noise looked at
_SLACK: Final = 0.01  # far above what rounding to 32 bits can do to the bound of a token that may win
_STEEPEST: Final = 1e30  # which keeps 0 times it a number
_HOTTEST: Final = 1e30  # beyond, logits whose difference no 32-bit float holds may all win


def coupled_choice(
    row: NDArray[np.float32], peak: float, temperature: float, noise: CoupledNoise, position: int
) -> int:
    """The token of least E / w, the lowest id on ties, where w = exp((logit - peak) / temperature), E = -log(1 - u).

    row       f32 [n], -inf for tokens that may not be drawn; `peak`, finite, is its largest value
    position  of the token to draw, whose u the noise gives

    As E >= u, log2(E / w) is at least log2 u - log2 w. That is bounded from below for all tokens in 32-bit floats, by
    the upper bits of u, log2 by exponent and fraction of the number; E / w itself is then computed where the bound lets
    several tokens win.
    """
    few = np.arange(row.size) if temperature > _HOTTEST else _likely(row, peak, temperature, noise, position)
    weights = np.exp((row[few].astype(np.float64) - peak) / temperature)
    return least_race(few, weights, noise, position)


def _likely(row: NDArray[np.float32], peak: float, temperature: float, noise: CoupledNoise, position: int) -> Ids:
    """The tokens that may win, ascending."""
    coarse = noise.row(row.size, position)
    bounds = coarse.astype(np.float32).view(np.int32).astype(np.float32)
    bounds *= np.float32(2.0**-23)
    with np.errstate(over="ignore"):
        steps = row - np.float32(peak)
        steps *= np.float32(min(1.0 / (temperature * math.log(2.0)), _STEEPEST))
    bounds -= steps
    near = int(bounds.argmin())
    weight = math.exp((float(row[near]) - peak) / temperature)
    most = math.log2(longest_race(int(coarse[near])) / weight) if weight > 0.0 else math.inf
    return np.flatnonzero(bounds <= most + _OFFSET + _SLACK)
