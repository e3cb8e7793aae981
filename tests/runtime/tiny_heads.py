"""Speculators for the tiny models: random ones, ones that are right by construction, ones with known probabilities."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specrun.export.speculator_config import DraftConfig, EagleConfig, MedusaConfig, SpeculatorConfig, tensor_rules
from specrun.export.speculator_weights import Speculator, SpeculatorTarget, Tensor, quantized
from specrun.export.speculators import attach_speculator
from specrun.models_cache.layout import Bundle

from . import tiny_bundles as tiny
from .toys import TABLE, TOY_DRAFT_LOGITS, TOY_IDS

ACCEPTANCE = ((0.45, 0.2, 0.1), (0.4, 0.2, 0.1), (0.4, 0.15, 0.1))
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96, "rope_theta": 10000.0, "norm_epsilon": 1e-6}
KNOWN_TOY_IDS = TOY_IDS[:7]  # of the eight, what the toy heads know


def speculator(
    bundle: Bundle,
    name: str,
    config: SpeculatorConfig,
    tensors: Mapping[str, np.ndarray] | None = None,
    *,
    vocabulary: list[int] | None = None,
    taps: tuple[int, ...] = (2,),
    seed: int = 3,
) -> Speculator:
    """With these tensors where given (f32 matrices in 8 bits where 32 divides their width), else random ones."""
    sizes = bundle.manifest.sizes
    target = SpeculatorTarget("tiny", sizes.hidden, sizes.layers, sizes.vocabulary, {})
    given = dict(tensors or {})
    rng = np.random.default_rng(seed)
    stored: dict[str, Tensor] = {}
    if vocabulary is not None:
        stored["vocabulary"] = np.array(vocabulary, np.int32)
    for key, rule in tensor_rules(config, target, taps, len(vocabulary or range(sizes.vocabulary))).items():
        if key in given:
            values = np.asarray(given.pop(key), np.float32)
        elif rule.optional:
            continue
        else:
            values = rng.standard_normal(rule.shape).astype(np.float32) * np.float32(0.15)
            values = 1 + values if "norm" in key else values
        stored |= quantized(key, values) if rule.kind == "matrix" else {key: values}
    assert not given, f"no tensors of these names: {sorted(given)}"
    method = {MedusaConfig: "medusa", EagleConfig: "eagle", DraftConfig: "draft"}[type(config)]
    return Speculator(
        method=method,
        name=name,
        licence=None,
        target=target,
        taps=taps,
        config=config,
        acceptance=ACCEPTANCE,
        tensors=stored,
    )


def random_heads(bundle: Bundle) -> None:
    """medusa, medusa1, eagle, eagle1: random, over a cut vocabulary; draft: the target's own layers in 8 bits."""
    cut = [2, 40, 80, 120, *range(1, 276, 2)]
    hidden = bundle.manifest.sizes.hidden
    joined = MedusaConfig(3, 2, "medusa-joined")
    attach_speculator(bundle, speculator(bundle, "medusa", joined, vocabulary=sorted(cut), taps=(0, 2)))
    attach_speculator(bundle, speculator(bundle, "medusa1", MedusaConfig(3, 2), vocabulary=sorted(cut)))
    attach_speculator(bundle, speculator(bundle, "eagle", EagleConfig("eagle3", **SIZES), taps=(0, 1), seed=4))
    attach_speculator(bundle, speculator(bundle, "eagle1", EagleConfig("eagle1", **SIZES), vocabulary=sorted(cut)))
    config = DraftConfig(layers=2, **SIZES)
    tensors = draft_tensors(tiny.random_tensors(1, hidden=hidden))
    attach_speculator(bundle, speculator(bundle, "draft", config, tensors, vocabulary=list(range(3, 276)), taps=()))


def draft_tensors(model: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The layers of a tiny model as those of a draft."""
    tensors = {"final_norm": model["model.norm.weight"]}
    for layer in range(tiny.LAYERS):
        theirs, ours = f"model.layers.{layer}", f"layers.{layer}"
        join = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
        parts = {
            "qkv": [model[f"{theirs}.self_attn.{part}_proj.weight"] for part in join["qkv"]],
            "output": [model[f"{theirs}.self_attn.o_proj.weight"]],
            "gate_up": [model[f"{theirs}.mlp.{part}_proj.weight"] for part in join["gate_up"]],
            "down": [model[f"{theirs}.mlp.down_proj.weight"]],
        }
        tensors |= {f"{ours}.{name}": np.concatenate(rows) for name, rows in parts.items()}
        tensors[f"{ours}.input_norm"] = model[f"{theirs}.input_layernorm.weight"]
        tensors[f"{ours}.mlp_norm"] = model[f"{theirs}.post_attention_layernorm.weight"]
    return tensors


def _follow(steps: int) -> np.ndarray:
    """[next, token]: 1 where the table model writes `next` so many tokens after `token`."""
    size = tiny.VOCABULARY
    matrix = np.zeros((size, size), np.float32)
    for token in range(size):
        after = token
        for _ in range(steps):
            after = TABLE.get(after, 3)
        matrix[after, token] = 1.0
    return matrix


def _echo(hidden: int) -> dict[str, np.ndarray]:
    """An eagle1 layer that passes on the embedding of the token after the feature: right for every bigram model."""
    kv_width = (SIZES["heads"] + 2 * SIZES["kv_heads"]) * SIZES["head_dim"]
    return {
        "fc": np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], axis=1),
        "qkv": np.zeros((int(kv_width), hidden)),
        "output": np.zeros((hidden, int(SIZES["heads"] * SIZES["head_dim"]))),
        "gate_up": np.zeros((2 * int(SIZES["intermediate"]), hidden)),
        "down": np.zeros((hidden, int(SIZES["intermediate"]))),
    }


def table_heads(bundle: Bundle) -> None:
    """medusa and eagle for the table model: always right."""
    hidden, heads = bundle.manifest.sizes.hidden, 3
    tensors: dict[str, np.ndarray] = {}
    for head in range(heads):
        tensors[f"heads.{head}.blocks.0.weight"] = 4 * _follow(head + 1)
        tensors[f"heads.{head}.blocks.0.bias"] = np.zeros(hidden)
    attach_speculator(bundle, speculator(bundle, "medusa", MedusaConfig(heads, 1), tensors))
    attach_speculator(bundle, speculator(bundle, "eagle", EagleConfig("eagle1", **SIZES), _echo(hidden)))


def toy_heads(bundle: Bundle) -> None:
    """medusa and eagle for the toy: the draft's probabilities, over seven of the eight tokens."""
    hidden = bundle.manifest.sizes.hidden
    head = TOY_DRAFT_LOGITS.T[KNOWN_TOY_IDS] / np.sqrt(hidden)
    tensors: dict[str, np.ndarray] = {}
    for index in range(2):
        tensors[f"heads.{index}.blocks.0.weight"] = np.zeros((hidden, hidden))
        tensors[f"heads.{index}.blocks.0.bias"] = np.zeros(hidden)
        tensors[f"heads.{index}.head"] = head
    known = list(KNOWN_TOY_IDS)
    attach_speculator(bundle, speculator(bundle, "medusa", MedusaConfig(2, 1), tensors, vocabulary=known))
    config = EagleConfig("eagle1", **SIZES)
    attach_speculator(bundle, speculator(bundle, "eagle", config, {**_echo(hidden), "head": head}, vocabulary=known))
