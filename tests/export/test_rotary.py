from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrun.export.config import ModelConfig, config_from_json
from specrun.export.config_keys import RopeConfig
from specrun.export.rotary import rotary_tables
from specrun.models_cache.errors import UnsupportedModelError

from .tiny_models import save_tiny

SCALED = {
    "default": RopeConfig(10_000.0),
    "linear": RopeConfig(10_000.0, "linear", 4.0),
    "llama3": RopeConfig(500_000.0, "llama3", 32.0, 1.0, 4.0, 8192),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_from_json(save_tiny("llama", tmp_path_factory.mktemp("rotary") / "llama"))


def transformers_tables(rope: RopeConfig, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        parameters["factor"] = rope.factor
    if rope.kind == "llama3":
        parameters["low_freq_factor"] = rope.low_frequency_factor
        parameters["high_freq_factor"] = rope.high_frequency_factor
        parameters["original_max_position_embeddings"] = rope.original_context
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = LlamaConfig(head_dim=head_dim, max_position_embeddings=131_072, rope_parameters=parameters)
        cos, sin = LlamaRotaryEmbedding(settings)(torch.zeros(1), torch.arange(positions)[None])
    return cos[0, :, : head_dim // 2].numpy(), sin[0, :, : head_dim // 2].numpy()


@pytest.mark.parametrize("kind", sorted(SCALED))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_equal_transformers(kind: str, head_dim: int, config: ModelConfig) -> None:
    positions = 4096
    shaped = dataclasses.replace(config, rope=SCALED[kind], head_dim=head_dim)
    cos, sin = rotary_tables(shaped, positions)
    assert (cos.shape, cos.dtype, sin.dtype) == ((positions, head_dim // 2), np.float32, np.float32)
    expected = transformers_tables(SCALED[kind], head_dim, positions)
    for found, wanted in zip((cos, sin), expected, strict=True):
        # One unit in the last place of a frequency is worth 1e-7 of the angle: 2.4e-4 at 4096.
        np.testing.assert_allclose(found, wanted, atol=3e-4)
        assert np.mean(np.abs(found - wanted) > 1e-6) < 0.05


def with_factors(factors: np.ndarray) -> Any:
    return SimpleNamespace(names=lambda: frozenset({"rope_freqs.weight"}), tensor=lambda name: factors)


def test_gguf_factors_divide_the_frequencies(config: ModelConfig) -> None:
    # llama.cpp writes llama3 scaling as these factors: applying them must equal the scaling itself.
    llama3 = dataclasses.replace(config, rope=SCALED["llama3"], head_dim=64)
    plain = dataclasses.replace(llama3, rope=RopeConfig(SCALED["llama3"].theta))
    theta, low, high = SCALED["llama3"].theta, 8192 / 1.0, 8192 / 4.0
    factors = []
    for frequency in 1.0 / theta ** (np.arange(0, 64, 2) / 64):  # the loop of convert_hf_to_gguf.py
        wavelength = 2 * np.pi / frequency
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(32.0)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / 32.0 + smooth))
    found = rotary_tables(plain, 2048, with_factors(np.array(factors, np.float32)))
    for left, right in zip(found, rotary_tables(llama3, 2048), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-4)


@pytest.mark.parametrize("factors", [np.ones(3), np.array([np.nan] * 16), np.zeros(16)])
def test_factors_that_do_not_fit_are_refused(factors: np.ndarray, config: ModelConfig) -> None:
    with pytest.raises(UnsupportedModelError, match="16 positive numbers"):
        rotary_tables(config, 8, with_factors(factors.astype(np.float32)))
