"""The sizes and options of one model, read from config.json or from GGUF metadata and validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specrun.export.config_keys import Keys, RopeConfig, read_config, rope_from_json
from specrun.export.families import Family, family_for
from specrun.models_cache.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer. A token sees the last `sliding_window` keys, its own included; None: all. `rotary`: q and k rotate."""

    sliding_window: int | None
    rotary: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything about a model but its weights. Sizes are positive and agree with each other."""

    family: Family
    name: str
    licence: str | None
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    norm_epsilon: float
    rope: RopeConfig
    tied_head: bool
    attention_bias: bool  # of q, k and v
    output_bias: bool
    mlp_bias: bool
    layer_configs: tuple[LayerConfig, ...]

    def __post_init__(self) -> None:
        for key, limit in _LIMITS.items():
            value = getattr(self, key)
            if not 0 < value <= limit:
                raise UnsupportedModelError(f"The model's {key} is {value}; it must lie between 1 and {limit}.")
        if self.heads % self.kv_heads:
            raise UnsupportedModelError(
                f"The model has {self.heads} attention heads, which {self.kv_heads} key/value heads cannot share."
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"The model's head_dim is {self.head_dim}; rotary embeddings need an even one.")
        if not 0 < self.norm_epsilon < 1:
            raise UnsupportedModelError(f"The model's norm epsilon is {self.norm_epsilon}; it must lie in (0, 1).")


_LIMITS = {
    "hidden": 2**17,
    "layers": 1024,
    "heads": 4096,
    "kv_heads": 4096,
    "head_dim": 4096,
    "intermediate": 2**20,
    "vocabulary": 2**22,
    "context": 2**22,
}


class GGUFHeader(Protocol):
    """What `config_from_gguf` needs: metadata by key, and the shape of each tensor, outermost dimension first."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...


def config_from_json(folder: Path) -> ModelConfig:
    """Read `config.json` of a Hugging Face model folder, of transformers 4 or 5.

    Raises IntegrityError when the file is missing or is not JSON, UnsupportedModelError when the model uses what
    specrun does not build (another architecture, activation, rope type, a quantised checkpoint).
    """
    raw = read_config(folder / "config.json")
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else raw.get("model_type")
    family = family_for(str(named))
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{folder.name} is a quantised checkpoint (quantization_config); export the original weights or a GGUF."
        )
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"The activation {activation!r} is not supported; specrun builds silu only.")
    keys = Keys(raw, "config.json")
    heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    layers = keys.integer("num_hidden_layers", limit=_LIMITS["layers"])
    context = keys.integer("max_position_embeddings")
    attention_bias = family.optional_attention_bias and keys.flag("attention_bias", False)
    return ModelConfig(
        family=family,
        name=_model_name(raw, folder),
        licence=_licence(folder),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", heads),
        head_dim=keys.integer("head_dim", family.default_head_dim or _even_share(hidden, heads)),
        intermediate=keys.integer("intermediate_size"),
        vocabulary=keys.integer("vocab_size"),
        context=context,
        norm_epsilon=keys.number("rms_norm_eps", 1e-6),
        rope=rope_from_json(keys, family.default_theta, context),
        tied_head=keys.flag("tie_word_embeddings", family.default_tied_head),
        attention_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.optional_mlp_bias and keys.flag("mlp_bias", False),
        layer_configs=_layers_from_json(keys, family, layers, context),
    )


def config_from_gguf(reader: GGUFHeader) -> ModelConfig:
    """Read the metadata of a GGUF file; biases and a tied head show in which tensors it holds.

    Raises UnsupportedModelError for what specrun does not build, and for metadata of the architecture it does not
    know, since such a key may change the answers.
    """
    architecture = str(reader.metadata.get("general.architecture"))
    family = family_for(architecture, gguf=True)
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in reader.metadata.items() if key.startswith(prefix)}
    keys = Keys(own, "the GGUF metadata", prefix)
    for key, value in own.items():
        if key not in _GGUF_KEYS or (key in _GGUF_INERT and value not in _GGUF_INERT[key]):
            raise UnsupportedModelError(
                f"The GGUF file sets {prefix}{key} to {value!r}, which specrun does not support."
            )
    layers = keys.integer("block_count", limit=_LIMITS["layers"])
    heads = keys.integer("attention.head_count")
    hidden = keys.integer("embedding_length")
    context = keys.integer("context_length")
    head_dim = keys.integer("attention.key_length", _even_share(hidden, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.integer(key, head_dim)) != head_dim:
            raise UnsupportedModelError(f"The GGUF file sets {prefix}{key} to {size}, but its head size is {head_dim}.")
    window = keys.integer("attention.sliding_window", 0) or None
    if window is not None and window < context and family.name not in ("llama", "mistral"):
        raise UnsupportedModelError(
            f"{prefix}attention.sliding_window does not say which layers of {family.name} use it."
        )
    embedding = reader.shapes.get("token_embd.weight", (0,))
    name = reader.metadata.get("general.name") or reader.metadata.get("general.basename") or architecture
    licence = reader.metadata.get("general.license")
    return ModelConfig(
        family=family,
        name=str(name),
        licence=None if licence is None else str(licence),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=keys.integer("feed_forward_length"),
        vocabulary=embedding[0] or keys.integer("vocab_size"),
        context=context,
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope_from_gguf(keys),
        tied_head="output.weight" not in reader.shapes,
        attention_bias=family.qkv_bias or "blk.0.attn_q.bias" in reader.shapes,
        output_bias="blk.0.attn_output.bias" in reader.shapes,
        mlp_bias="blk.0.ffn_up.bias" in reader.shapes,
        layer_configs=tuple(
            LayerConfig(_window_within(window, context), _rotates(index, family.no_rope_interval))
            for index in range(layers)
        ),
    )


# Keys below the architecture's prefix. Those of _GGUF_INERT are tolerated with the values listed there only.
_GGUF_INERT: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "attention.causal": (True,),
    "rope.scaling.attn_factor": (1.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
_GGUF_KEYS = frozenset(_GGUF_INERT) | {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
}


def _even_share(hidden: int, heads: int) -> int:
    return hidden // heads if heads and hidden % heads == 0 else 0


def _rotates(index: int, interval: int | None) -> bool:
    return interval is None or (index + 1) % interval != 0


def _window_within(window: int | None, context: int) -> int | None:
    return window if window is not None and window < context else None


def _rope_from_gguf(keys: Keys) -> RopeConfig:
    # A GGUF file carries llama3 scaling as the tensor rope_freqs.weight, which `rotary_tables` applies.
    theta = keys.number("rope.freq_base", 10_000.0)
    kind = keys.raw.get("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"The rope scaling {kind!r} is not supported; specrun knows none and linear.")
    if factor == 1.0 or (kind == "none" and "rope.scaling.type" in keys.raw):
        return RopeConfig(theta)
    return RopeConfig(theta, "linear", factor)


def _layers_from_json(keys: Keys, family: Family, layers: int, context: int) -> tuple[LayerConfig, ...]:
    rotary = [True] * layers
    if family.no_rope_interval is not None:
        interval = keys.integer("no_rope_layer_interval", family.no_rope_interval, least=1)
        listed = keys.items("no_rope_layers", layers, (0, 1))  # 1: the layer rotates
        rotary = [bool(item) for item in listed or (_rotates(index, interval) for index in range(layers))]
    window = _window_from_json(keys, family)
    slides = _sliding_layers(keys, family, window, rotary)
    window = _window_within(window, context)
    return tuple(LayerConfig(window if slide else None, rotates) for slide, rotates in zip(slides, rotary, strict=True))


def _window_from_json(keys: Keys, family: Family) -> int | None:
    rule = family.window_rule
    if rule == "none" or (rule != "all" and not keys.flag("use_sliding_window", False)):
        return None
    if keys.raw.get("sliding_window", family.default_window) is None:  # null: none; absent: the family's default
        return None
    return keys.integer("sliding_window", least=1) if "sliding_window" in keys.raw else family.default_window


def _sliding_layers(keys: Keys, family: Family, window: int | None, rotary: list[bool]) -> list[bool]:
    """Which layers the window applies to: what `layer_types` lists, else what the family does."""
    slides = [window is not None] * len(rotary)
    if window is not None and family.window_rule == "upper_layers":
        first = keys.integer("max_window_layers", 28)
        slides = [index >= first for index in range(len(rotary))]
    elif window is not None and family.window_rule == "no_rope_layers":
        slides = [not rotates for rotates in rotary]
    types = keys.items("layer_types", len(rotary), ("full_attention", "sliding_attention"))
    if types is None:
        return slides
    listed = [item == "sliding_attention" for item in types]
    if listed != slides and (window is None or family.window_rule == "all"):
        raise UnsupportedModelError(f"layer_types in config.json contradicts the sliding window of {family.name}.")
    return listed


def _model_name(raw: Mapping[str, Any], folder: Path) -> str:
    name = raw.get("_name_or_path")
    # A path on the machine that made the checkpoint says nothing here, and must not travel into a bundle.
    if isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return name
    return folder.resolve().name


def _licence(folder: Path) -> str | None:
    """The `license:` of the front matter of the model card, if there is one."""
    try:
        lines = (folder / "README.md").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    if not lines or lines[0].strip() != "---":
        return None
    for line in lines[1:200]:
        if line.strip() == "---":
            break
        if line.startswith("license:"):
            return line.removeprefix("license:").strip().strip("\"'") or None
    return None
