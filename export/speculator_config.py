"""What a speculator's weights mean: method, sizes, and the tensors that follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from specrun.export.config_keys import RopeConfig
from specrun.models_cache.strictjson import StrictJsonError

METHODS = ("medusa", "eagle", "draft")
MAX_HEADS = 32  # of a Medusa speculator: no deeper proposal is ever made
MAX_BLOCKS = 16
MAX_DRAFT_LAYERS = 64
MEDUSA_LAYOUTS = ("medusa", "medusa-joined")
EAGLE_LAYOUTS = ("joined", "eagle3", "eagle1")


@dataclass(frozen=True, slots=True)
class SpeculatorTarget:
    """The model that a speculator was made for. `source_files` maps its weight files to their sha256 (hex)."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    source_files: dict[str, str]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """`heads` stacks of `blocks` residual blocks z + silu(W z + b).

    In the published layout, "medusa", they begin with the target's last residual stream. In "medusa-joined", which
    specrun trains, with several taps and the newest token, joined as in EAGLE's layout "joined".
    """

    heads: int
    blocks: int
    layout: str = "medusa"
    norm_epsilon: float = 1e-5


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Scaled rotary frequencies, as `RopeConfig` has them."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """One decoder layer on top of the target's features; `layout` says how they reach it.

    "eagle3" and "eagle1" are published. "joined" is what specrun trains: the taps go through `fc` as in EAGLE-3
    and then, with the token's embedding, through `join` into the residual stream of a plain llama layer, as in EAGLE-1.
    """

    layout: str
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    norm_epsilon: float
    rope_scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A llama of a few layers between the target's embedding and its head."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rope_theta: float
    norm_epsilon: float
    rope_scaling: RopeScaling | None = None


SpeculatorConfig = MedusaConfig | EagleConfig | DraftConfig
CONFIGS: dict[str, type[SpeculatorConfig]] = {"medusa": MedusaConfig, "eagle": EagleConfig, "draft": DraftConfig}


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A tensor that a speculator may have: a matrix may be stored in 8 bits, a vector (of any rank) may not."""

    kind: Literal["matrix", "vector"]
    shape: tuple[int, ...]
    optional: bool = False


def rope_config(config: EagleConfig | DraftConfig) -> RopeConfig:
    """The rotary frequencies of a speculator's layers."""
    scaling = config.rope_scaling
    if scaling is None:
        return RopeConfig(config.rope_theta)
    kind: Any = scaling.kind
    return RopeConfig(
        config.rope_theta,
        kind,
        scaling.factor,
        scaling.low_frequency_factor,
        scaling.high_frequency_factor,
        scaling.original_context,
    )


def check_config(config: SpeculatorConfig, target: SpeculatorTarget, taps: tuple[int, ...]) -> None:
    """Raise StrictJsonError for sizes that cannot be, before anything is allocated for them."""
    for name, low, high in (("hidden", 1, 2**17), ("layers", 1, 1024), ("vocabulary", 1, 2**22)):
        _check_range(f"target.{name}", getattr(target, name), low, high)
    if list(taps) != sorted(set(taps)):
        raise StrictJsonError("taps must be ascending layers, each once")
    for tap in taps:
        _check_range("taps", tap, 0, target.layers)
    if isinstance(config, MedusaConfig):
        _check_range("config.heads", config.heads, 1, MAX_HEADS)
        _check_range("config.blocks", config.blocks, 1, MAX_BLOCKS)
        if config.layout not in MEDUSA_LAYOUTS:
            raise StrictJsonError(f"config.layout is {config.layout!r} and must be one of {', '.join(MEDUSA_LAYOUTS)}")
        if not 0 < config.norm_epsilon < 1:
            raise StrictJsonError("config.norm_epsilon must lie in (0, 1)")
    else:
        _check_layers(config)
    if isinstance(config, DraftConfig):
        _check_range("config.layers", config.layers, 1, MAX_DRAFT_LAYERS)
        fitting, wanted = not taps, "be empty: a draft reads no features"
    elif config.layout not in ("medusa", "eagle1"):
        fitting, wanted = bool(taps), "name at least one layer"
    else:
        fitting, wanted = taps == (target.layers,), f"be [{target.layers}], the target's last residual stream"
    if not fitting:
        raise StrictJsonError(f"taps is {list(taps)} and must {wanted}")


def _check_layers(config: EagleConfig | DraftConfig) -> None:
    if isinstance(config, EagleConfig) and config.layout not in EAGLE_LAYOUTS:
        raise StrictJsonError(f"config.layout is {config.layout!r} and must be one of {', '.join(EAGLE_LAYOUTS)}")
    for name, high in (("heads", 1024), ("kv_heads", 1024), ("head_dim", 1024), ("intermediate", 2**20)):
        _check_range(f"config.{name}", getattr(config, name), 1, high)
    if config.heads % config.kv_heads:
        raise StrictJsonError(f"config.heads {config.heads} is no multiple of config.kv_heads {config.kv_heads}")
    if config.head_dim % 16:
        raise StrictJsonError("config.head_dim must be a multiple of 16, which the attention needs")
    if not 0 < config.norm_epsilon < 1 or not 1 <= config.rope_theta < 1e12:
        raise StrictJsonError("config.norm_epsilon must lie in (0, 1) and config.rope_theta in [1, 1e12)")
    scaling = config.rope_scaling
    if scaling is None:
        return
    if scaling.kind not in ("linear", "llama3") or not 0 < scaling.factor < 1e6:
        raise StrictJsonError("config.rope_scaling must be linear or llama3 with a factor in (0, 1e6)")
    bands = 0 < scaling.low_frequency_factor < scaling.high_frequency_factor
    if scaling.kind == "llama3" and not (bands and 0 < scaling.original_context < 2**30):
        raise StrictJsonError("config.rope_scaling of kind llama3 needs both frequency factors and original_context")


def _check_range(what: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        raise StrictJsonError(f"{what} is {number} and must lie between {low} and {high}")


def tensor_rules(
    config: SpeculatorConfig, target: SpeculatorTarget, taps: tuple[int, ...], draft_vocabulary: int
) -> dict[str, TensorRule]:
    """Every tensor that a speculator has or may have, besides `vocabulary`, by name.

    `head` and `embedding` are there only where a speculator brings its own instead of the target's.
    """
    hidden = target.hidden
    head = TensorRule("matrix", (draft_vocabulary, hidden), optional=True)
    rules: dict[str, TensorRule] = {}
    if isinstance(config, MedusaConfig):
        for index in range(config.heads):
            for block in range(config.blocks):
                rules[f"heads.{index}.blocks.{block}.weight"] = TensorRule("matrix", (hidden, hidden))
                rules[f"heads.{index}.blocks.{block}.bias"] = TensorRule("vector", (hidden,))
            rules[f"heads.{index}.head"] = head
        if config.layout == "medusa-joined":
            rules["embedding"] = TensorRule("matrix", (target.vocabulary, hidden), optional=True)
            rules["final_norm"] = TensorRule("vector", (hidden,))
            rules |= _taps_rules(hidden, taps) | _join_rules(hidden)
        return rules
    rules["embedding"] = TensorRule("matrix", (target.vocabulary, hidden), optional=True)
    rules["head"] = head
    if isinstance(config, DraftConfig):
        for index in range(config.layers):
            rules[f"layers.{index}.input_norm"] = TensorRule("vector", (hidden,))
            rules |= {f"layers.{index}.{name}": rule for name, rule in _layer_rules(config, hidden, hidden).items()}
        rules["final_norm"] = TensorRule("vector", (hidden,))
        return rules
    if config.layout != "eagle1":
        rules |= _taps_rules(hidden, taps)
        rules["input_norm"] = TensorRule("vector", (hidden,))
        rules["hidden_norm"] = TensorRule("vector", (hidden,))
        rules["final_norm"] = TensorRule("vector", (hidden,))
        if config.layout == "eagle3":
            return rules | _layer_rules(config, hidden, 2 * hidden)
        return rules | _join_rules(hidden) | _layer_rules(config, hidden, hidden)
    rules["fc"] = TensorRule("matrix", (hidden, 2 * hidden))
    rules["fc_bias"] = TensorRule("vector", (hidden,), optional=True)
    return rules | _layer_rules(config, hidden, hidden)


def _taps_rules(hidden: int, taps: tuple[int, ...]) -> dict[str, TensorRule]:
    return {
        "fc": TensorRule("matrix", (hidden, len(taps) * hidden)),
        "tap_norms": TensorRule("vector", (len(taps), hidden), optional=True),
    }


def _join_rules(hidden: int) -> dict[str, TensorRule]:
    return {
        "embedding_norm": TensorRule("vector", (hidden,)),
        "hidden_norm": TensorRule("vector", (hidden,)),
        "join": TensorRule("matrix", (hidden, 2 * hidden)),
    }


def _layer_rules(config: EagleConfig | DraftConfig, hidden: int, attention_input: int) -> dict[str, TensorRule]:
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    return {
        "qkv": TensorRule("matrix", (width, attention_input)),
        "qkv_bias": TensorRule("vector", (width,), optional=True),
        "output": TensorRule("matrix", (hidden, config.heads * config.head_dim)),
        "mlp_norm": TensorRule("vector", (hidden,)),
        "gate_up": TensorRule("matrix", (2 * config.intermediate, hidden)),
        "down": TensorRule("matrix", (hidden, config.intermediate)),
    }
