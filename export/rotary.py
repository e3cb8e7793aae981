"""Rotary tables, rounded as transformers rounds them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import ModelConfig
from specrun.export.config_keys import RopeConfig
from specrun.models_cache.errors import UnsupportedModelError

if TYPE_CHECKING:
    from specrun.export.weights import Weights

ROPE_FACTORS = "rope_freqs.weight"


def rotary_tables(
    config: ModelConfig, positions: int, weights: Weights | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines, each float32 [positions, head_dim / 2], for halves that rotate together (x[i], x[i + d/2]).

    `weights` gives the frequency divisors that a GGUF file may carry. Raises UnsupportedModelError when those do not
    fit the head.
    """
    frequencies = _frequencies(config.rope, config.head_dim)
    if weights is not None and ROPE_FACTORS in weights.names():
        factors = weights.tensor(ROPE_FACTORS)
        if factors.shape != frequencies.shape or not np.all(np.isfinite(factors) & (factors > 0)):
            raise UnsupportedModelError(
                f"{ROPE_FACTORS} must hold {frequencies.size} positive numbers, and has the shape {factors.shape}."
            )
        frequencies = frequencies / factors
    # The angle is rounded to float32 before the cosine: transformers does, and at position 8000 it shows.
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)


def _frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float32]:
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float64)
    inverse = np.float32(1.0) / np.power(rope.theta, exponents).astype(np.float32)
    if rope.kind == "linear":
        return (inverse / np.float32(rope.factor)).astype(np.float32)
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    return inverse.astype(np.float32)


def _llama3(rope: RopeConfig, inverse: NDArray[np.float32]) -> NDArray[np.float32]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    frequencies = inverse.astype(np.float64)
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    blend = np.clip((rope.original_context / wavelengths - low) / (high - low), 0.0, 1.0)
    scaled: NDArray[np.float64] = (1 - blend) * frequencies / rope.factor + blend * frequencies
    return scaled.astype(np.float32)
