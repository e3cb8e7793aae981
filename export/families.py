"""The model families that specrun builds graphs for, one declarative row each.

A family says where a model may differ from the common form: RMSNorm, rotary grouped-query attention, SwiGLU MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

if TYPE_CHECKING:
    from specrun.export.config import ModelConfig

WindowRule = Literal["none", "all", "upper_layers", "no_rope_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one family fixes and what its configuration may choose. The defaults hold when a key is absent."""

    name: str
    architectures: tuple[str, ...]  # `architectures` or, without it, `model_type` of config.json
    gguf_architectures: tuple[str, ...]  # `general.architecture`
    gguf_permuted_qk: bool  # llama.cpp stores the rows of q and k interleaved
    qkv_bias: bool = False  # q, k and v always have biases
    qk_norm: bool = False  # RMSNorm of each head of q and k before the rotation
    optional_attention_bias: bool = False  # `attention_bias` adds biases to q, k, v and o
    optional_mlp_bias: bool = False  # `mlp_bias` adds biases to gate, up and down
    window_rule: WindowRule = "none"  # which layers a sliding window applies to
    default_window: int | None = None
    no_rope_interval: int | None = None  # each n-th layer does not rotate q and k
    default_theta: float = 10_000.0
    default_head_dim: int | None = None  # None: hidden / heads
    default_tied_head: bool = False


FAMILIES: tuple[Family, ...] = (
    Family(
        name="llama",
        architectures=("LlamaForCausalLM", "llama"),
        gguf_architectures=("llama",),
        gguf_permuted_qk=True,
        optional_attention_bias=True,
        optional_mlp_bias=True,
    ),
    Family(
        name="mistral",
        architectures=("MistralForCausalLM", "mistral"),
        gguf_architectures=("mistral",),  # llama.cpp itself writes "llama"
        gguf_permuted_qk=True,
        window_rule="all",
        default_window=4096,
    ),
    Family(
        name="qwen2",
        architectures=("Qwen2ForCausalLM", "qwen2"),
        gguf_architectures=("qwen2",),
        gguf_permuted_qk=False,
        qkv_bias=True,
        window_rule="upper_layers",
        default_window=4096,
    ),
    Family(
        name="qwen3",
        architectures=("Qwen3ForCausalLM", "qwen3"),
        gguf_architectures=("qwen3",),
        gguf_permuted_qk=False,
        qk_norm=True,
        optional_attention_bias=True,
        window_rule="upper_layers",
        default_window=4096,
        default_head_dim=128,
    ),
    Family(
        name="smollm3",
        architectures=("SmolLM3ForCausalLM", "smollm3"),
        gguf_architectures=("smollm3",),
        gguf_permuted_qk=True,
        optional_attention_bias=True,
        optional_mlp_bias=True,
        window_rule="no_rope_layers",
        no_rope_interval=4,
        default_theta=2_000_000.0,
        default_tied_head=True,
    ),
)


def family_for(architecture: str, *, gguf: bool = False) -> Family:
    """The family of an architecture name of config.json, or of a GGUF file with `gguf`.

    Raises UnsupportedModelError, which names the architecture and lists the known ones.

    >>> family_for("Qwen2ForCausalLM").name
    'qwen2'
    """
    for family in FAMILIES:
        if architecture in (family.gguf_architectures if gguf else family.architectures):
            return family
    known = ", ".join((family.gguf_architectures if gguf else family.architectures)[0] for family in FAMILIES)
    raise UnsupportedModelError(
        f"The architecture {architecture!r} is not one that specrun builds graphs for; it knows {known}."
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this configuration has, by its Hugging Face name."""
    hidden, inner, head = config.hidden, config.intermediate, config.head_dim
    queries, keys = config.heads * head, config.kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden)}
    projections = {  # name -> rows, columns, has a bias
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.family.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Compare the tensors of a file, by their Hugging Face names, with what the model must have.

    Raises IntegrityError for a missing tensor or one of the wrong shape, UnsupportedModelError for one that the
    family does not account for: weights that are ignored are wrong answers.
    """
    wanted = tensor_shapes(config)
    if missing := [name for name in wanted if name not in found]:
        raise IntegrityError(
            f"{source} lacks {_some(missing)}, which a {config.family.name} model has; fetch it again."
        )
    if unknown := [name for name in found if name not in wanted]:
        raise UnsupportedModelError(
            f"{source} has {_some(unknown)}, which specrun's {config.family.name} family does not account for."
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise IntegrityError(
                f"{name} in {source} has the shape {list(found[name])}, but the configuration says {list(shape)}."
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"
