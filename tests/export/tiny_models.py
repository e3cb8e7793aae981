"""Tiny random models: transformers makes and saves them, GGUF files are written from what it saved.

Everything here is written apart from `specrun.export`, so that a test compares two readings of the same format.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

VOCABULARY = 160
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_THETA = {"rope_type": "default", "rope_theta": 50000.0}

# name -> (prefix of the transformers classes, configuration)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32, "rope_parameters": _THETA}),
    "llama-tied": ("Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama-rope3": ("Llama", {"head_dim": 32, "rope_parameters": _LLAMA3}),
    "llama-linear": ("Llama", {"head_dim": 32, "rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True}),
    "llama-heads": ("Llama", {"num_attention_heads": 8, "head_dim": 32}),
    "llama-wide": (  # rows of 256: the block size of the K types
        "Llama",
        {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32},
    ),
    "mistral": ("Mistral", {"head_dim": 32, "sliding_window": 8}),
    "qwen2": ("Qwen2", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen2-window": (
        "Qwen2",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}),
}


def save_tiny(
    variant: str, folder: Path, *, dtype: str = "float32", shard_bytes: int | None = None, seed: int = 0
) -> Path:
    """Make a random model of `VARIANTS` and save it as transformers does; returns the folder."""
    torch, transformers = _torch()
    prefix, options = VARIANTS[variant]
    config = getattr(transformers, f"{prefix}Config")(**(_COMMON | options))
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            # Wide enough that attention is peaked and every bias and norm shows in the logits.
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3 if parameter.ndim == 1 else 0.15)
        model = model.to(getattr(torch, dtype))
        model.save_pretrained(folder, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
    return folder


def transformers_logits(folder: Path, token_ids: Sequence[int]) -> np.ndarray:
    """Logits float32 [tokens, vocabulary] of a saved model, computed by transformers in float32."""
    return _transformers_output(folder, token_ids).logits[0].float().numpy()


def transformers_residuals(folder: Path, token_ids: Sequence[int]) -> list[np.ndarray]:
    """The residual streams float32 [tokens, hidden] that enter each layer of a saved model."""
    return [layer[0].float().numpy() for layer in _transformers_output(folder, token_ids).hidden_states[:-1]]


def _transformers_output(folder: Path, token_ids: Sequence[int]) -> Any:
    torch, transformers = _torch()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return model(torch.tensor([list(token_ids)]), output_hidden_states=True)


def token_ids(count: int = 24, vocabulary: int = VOCABULARY) -> list[int]:
    """A fixed text without meaning."""
    return [int(token) for token in np.random.default_rng(7).integers(3, vocabulary, count)]


def _torch() -> tuple[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


# GGUF

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
PERMUTED = ("llama", "mistral", "smollm3")


def gguf_name(name: str) -> str:
    """ "model.layers.0.mlp.up_proj.weight" is "blk.0.ffn_up.weight"."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's q and k, as its converter makes it."""
    shape = weights.shape
    return weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def quantize(values: np.ndarray, type_name: str) -> np.ndarray:
    """Raw rows of `type_name` for float32 values; random blocks for the types that the gguf package cannot make."""
    kind = gguf.GGMLQuantizationType[type_name]
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_rows(type_name, values.shape[0], values.shape[1], np.random.default_rng(values.size))


def random_rows(type_name: str, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """Valid random raw rows, uint8 [rows, bytes]: any bits, but scales that are small and finite."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(type_name, (0,))
    spread = 3e-4 if type_name.endswith("K") else 1e-2
    for place in places:
        scale = (rng.standard_normal((rows, columns // block, 1)) * spread).astype(np.float16)
        raw[:, :, place : place + 2] = scale.view(np.uint8)
    return raw.reshape(rows, -1)


def gguf_from_folder(
    folder: Path,
    path: Path,
    type_of: Callable[[str], str] = lambda name: "F32",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the model in `folder` as a GGUF file, as llama.cpp's converter would.

    `type_of` gets the GGUF name of each matrix; vectors stay float32. `metadata` adds keys below the architecture
    (None drops one), `tensors` adds tensors.
    """
    raw = json.loads((folder / "config.json").read_text())
    family = raw["model_type"]
    architecture = "llama" if family == "mistral" else family
    heads, kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
    rope = raw.get("rope_parameters") or {}
    head_dim = raw.get("head_dim") or raw["hidden_size"] // heads
    values: dict[str, Any] = {
        "block_count": raw["num_hidden_layers"],
        "context_length": raw["max_position_embeddings"],
        "embedding_length": raw["hidden_size"],
        "feed_forward_length": raw["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(raw["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "vocab_size": raw["vocab_size"],
    } | dict(metadata or {})
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    for key, value in values.items():
        if value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](f"{architecture}.{key}", value)
    saved: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        saved |= load_file(file)
    for name, array in saved.items():
        if family in PERMUTED and ".q_proj." in name:
            array = permute(array, heads)
        if family in PERMUTED and ".k_proj." in name:
            array = permute(array, kv_heads)
        type_name = type_of(gguf_name(name)) if array.ndim == 2 else "F32"
        rows = np.ascontiguousarray(array.astype(np.float32))
        if type_name == "F32":
            writer.add_tensor(gguf_name(name), rows)
        else:
            kind = gguf.GGMLQuantizationType[type_name]
            writer.add_tensor(gguf_name(name), quantize(rows, type_name), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
