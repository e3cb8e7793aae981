"""Tiny random speculators of each layout, for a target of the sizes that `tests.conftest` writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrun.export.speculator_config import (
    EAGLE_LAYOUTS,
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    SpeculatorConfig,
    SpeculatorTarget,
    tensor_rules,
)
from specrun.export.speculator_weights import Speculator, Tensor, quantized

LAYOUTS = ("medusa", "medusa-joined", "joined", "eagle3", "eagle1", "draft")
DRAFT_VOCABULARY = 120


def tiny_target(hidden: int = 64, layers: int = 2, vocabulary: int = 300, **source_files: str) -> SpeculatorTarget:
    return SpeculatorTarget("tiny", hidden, layers, vocabulary, source_files)


def tiny_config(layout: str) -> SpeculatorConfig:
    if layout.startswith("medusa"):
        return MedusaConfig(heads=3, blocks=2, layout=layout)
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96}
    sizes |= {"rope_theta": 10000.0, "norm_epsilon": 1e-5}
    return DraftConfig(layers=2, **sizes) if layout == "draft" else EagleConfig(layout=layout, **sizes)


def tiny_speculator(
    layout: str,
    target: SpeculatorTarget | None = None,
    *,
    taps: tuple[int, ...] | None = None,
    draft_vocabulary: int | None = DRAFT_VOCABULARY,
    with_optional: tuple[str, ...] = (),
    plain: bool = False,
    seed: int = 3,
) -> Speculator:
    """Random weights; `with_optional` names optional tensors to have; `plain`: f32 matrices instead of 8-bit ones."""
    target = target or tiny_target()
    config = tiny_config(layout)
    if taps is None:
        taps = {"draft": (), "eagle3": (0, 1), "joined": (0, 1), "medusa-joined": (0, 1)}.get(layout, (target.layers,))
    rng = np.random.default_rng(seed)
    tensors: dict[str, Tensor] = {}
    if draft_vocabulary is not None:
        ids = rng.choice(target.vocabulary, draft_vocabulary, replace=False)
        tensors["vocabulary"] = np.sort(ids).astype(np.int32)
    for name, rule in tensor_rules(config, target, taps, draft_vocabulary or target.vocabulary).items():
        if rule.optional and name not in with_optional:
            continue
        values = rng.standard_normal(rule.shape).astype(np.float32)
        if rule.kind == "vector":
            tensors[name] = (1 + 0.3 * values if "norm" in name else 0.3 * values).astype(np.float16)
        else:
            tensors |= {name: values * np.float32(0.15)} if plain else quantized(name, values * np.float32(0.15))
    return Speculator(
        method="eagle" if layout in EAGLE_LAYOUTS else layout.removesuffix("-joined"),
        name=f"tiny-{layout}",
        licence="apache-2.0",
        target=target,
        taps=taps,
        config=config,
        acceptance=((0.5, 0.2), (0.4, 0.1)),
        report={"tokens": 1},
        tensors=tensors,
    )
