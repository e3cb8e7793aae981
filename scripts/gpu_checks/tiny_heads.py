"""Random speculators for a dry run, so that every method can be walked through."""

from __future__ import annotations

from typing import Final

import numpy as np

from specrun.export.speculator_config import (
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    SpeculatorConfig,
    SpeculatorTarget,
    tensor_rules,
)
from specrun.export.speculator_weights import Speculator, Tensor, quantized
from specrun.export.speculators import attach_speculator
from specrun.models_cache.layout import Bundle

_ACCEPTANCE: Final = ((0.45, 0.2, 0.1), (0.4, 0.2, 0.1), (0.4, 0.15, 0.1))


def attach_random_heads(bundle: Bundle) -> None:
    """Attach medusa, eagle and draft to the bundle of a tiny model."""
    eagle = EagleConfig(
        "eagle1", heads=4, kv_heads=2, head_dim=16, intermediate=96, rope_theta=10000.0, norm_epsilon=1e-6
    )
    draft = DraftConfig(
        layers=1, heads=4, kv_heads=2, head_dim=16, intermediate=96, rope_theta=10000.0, norm_epsilon=1e-6
    )
    layers = bundle.manifest.sizes.layers
    for method, config, taps in (
        ("medusa", MedusaConfig(3, 1), (layers,)),
        ("eagle", eagle, (layers,)),
        ("draft", draft, ()),
    ):
        attach_speculator(bundle, _random(bundle, method, config, taps))


def _random(bundle: Bundle, method: str, config: SpeculatorConfig, taps: tuple[int, ...]) -> Speculator:
    sizes = bundle.manifest.sizes
    target = SpeculatorTarget(bundle.manifest.name, sizes.hidden, sizes.layers, sizes.vocabulary, {})
    rng = np.random.default_rng(3)
    tensors: dict[str, Tensor] = {}
    for key, rule in tensor_rules(config, target, taps, sizes.vocabulary).items():
        if rule.optional:
            continue
        values = rng.standard_normal(rule.shape).astype(np.float32) * np.float32(0.15)
        values = 1 + values if "norm" in key else values
        tensors |= quantized(key, values) if rule.kind == "matrix" else {key: values}
    return Speculator(
        method=method,
        name=method,
        licence=None,
        target=target,
        taps=taps,
        config=config,
        acceptance=_ACCEPTANCE,
        tensors=tensors,
    )
