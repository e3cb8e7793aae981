"""Real bundles of tiny models: numpy weights and a byte-level tokenizer, exported as any other model is.

No torch, no transformers. `bigram` models have known answers: attention and MLP add nothing, so the logits are a table
row of the last token, yet every token goes through the real graph and session.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from specrun.export.bundle import export_bundle
from specrun.models_cache.layout import Bundle

from ..export.tiny_models import gguf_name, permute

END, START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, START, TURN_END)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Pairs that the byte-level tokenizer joins; "Ġ" is the space.
MERGES = (
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("i", "n"),
    ("Ġ", "a"),
    ("e", "r"),
    ("o", "n"),
    ("in", "g"),
    ("Ġ", "b"),
    ("r", "e"),
    ("Ġ", "s"),
    ("l", "l"),
    ("Ġ", "c"),
    ("o", "r"),
    ("a", "n"),
    ("an", "d"),
    ("Ġb", "l"),
)
BYTE_TOKENS = 256
FULL_TOKENS = len(SPECIALS) + BYTE_TOKENS + len(MERGES)
VOCABULARY = 288
LAYERS, HEADS, KV_HEADS, INNER = 2, 4, 2, 96
PROMPT = "List the days of the week, then again: "


def tokenizer_json(*, tokens: int | None = None, swapped: tuple[int, int] | None = None, reverse: bool = False) -> str:
    """A byte-level tokenizer: special tokens, bytes, merged pairs; only the first `tokens` ids if given.

    swapped: two ids that change places. reverse: the bytes in the opposite order, so that it is another tokenizer.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (not c.isascii(), c))
    if reverse:
        alphabet.reverse()
    pieces = [*SPECIALS, *alphabet, *[a + b for a, b in MERGES]][:tokens]
    if swapped is not None:
        a, b = swapped
        pieces[a], pieces[b] = pieces[b], pieces[a]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [pair for pair in MERGES if {*pair, "".join(pair)} <= set(vocabulary)]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    return inner.to_str()


@functools.cache
def _vocabulary() -> dict[str, int]:
    return tokenizers.Tokenizer.from_str(tokenizer_json()).get_vocab()


def token_id(piece: str) -> int:
    """The id of a token as the vocabulary spells it."""
    return _vocabulary()[piece]


def write_model(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    vocabulary: int,
    hidden: int,
    context: int = 512,
    head_dim: int = 16,
    eos: int | Sequence[int] = (0, 2),
    tokenizer: str | None = None,
) -> Path:
    """A Hugging Face folder of a two-layer llama. The tokenizer's own end of text is <|endoftext|>."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": eos if isinstance(eos, int) else list(eos)},
        "tokenizer_config.json": {"eos_token": END, "chat_template": TEMPLATE},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer or tokenizer_json(), encoding="utf-8")
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def random_tensors(
    seed: int, *, vocabulary: int = VOCABULARY, hidden: int = 64, head_dim: int = 16
) -> dict[str, np.ndarray]:
    """Random weights whose attention is peaked, so that every position of the context shows in the logits."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, spread: float) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * spread / np.sqrt(columns)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, np.sqrt(hidden)),
        "lm_head.weight": matrix(vocabulary, hidden, 2.5),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * head_dim, hidden, 1.6),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, hidden, 1.6),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, hidden, 1.5),
            f"{name}.self_attn.o_proj.weight": matrix(hidden, HEADS * head_dim, 1.5),
            f"{name}.mlp.gate_proj.weight": matrix(INNER, hidden, 1.5),
            f"{name}.mlp.up_proj.weight": matrix(INNER, hidden, 1.5),
            f"{name}.mlp.down_proj.weight": matrix(hidden, INNER, 1.5),
        }
    return tensors


def noisy(tensors: Mapping[str, np.ndarray], amount: float, seed: int = 99) -> dict[str, np.ndarray]:
    """The same weights with noise of `amount` times their spread: a draft that is right now and then."""
    rng = np.random.default_rng(seed)
    return {
        name: (array + amount * array.std() * rng.standard_normal(array.shape)).astype(np.float32)
        for name, array in tensors.items()
    }


def padded_vocabulary(tensors: Mapping[str, np.ndarray], vocabulary: int, seed: int = 5) -> dict[str, np.ndarray]:
    """More rows for embedding and head: large ones, so that a padding id would win if it were looked at."""
    rng = np.random.default_rng(seed)
    result = dict(tensors)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = tensors[name]
        more = (rng.standard_normal((vocabulary - len(old), old.shape[1])) * 4 * old.std()).astype(np.float32)
        result[name] = np.concatenate([old, more])
    return result


def bigram_tensors(logits: np.ndarray) -> dict[str, np.ndarray]:
    """A model whose logits after token i are `logits[i]`, whatever stood before; hidden size = vocabulary."""
    vocabulary = len(logits)
    tensors = {name: array * 0 for name, array in random_tensors(0, vocabulary=vocabulary, hidden=vocabulary).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = np.ones_like(tensors[name])
    root = np.sqrt(vocabulary)
    tensors["model.embed_tokens.weight"] = (np.eye(vocabulary) * root).astype(np.float32)
    tensors["lm_head.weight"] = np.ascontiguousarray(logits.T / root).astype(np.float32)
    return tensors


def table_logits(table: Mapping[int, int], vocabulary: int = VOCABULARY, default: int = 3) -> np.ndarray:
    """Logits whose largest entry after token i is `table[i]`."""
    logits = np.zeros((vocabulary, vocabulary))
    for token in range(vocabulary):
        logits[token, table.get(token, default)] = 20.0
    return logits


def chain_table(*texts: Sequence[int]) -> dict[int, int]:
    """A table that writes the texts: each token of one is followed by its next."""
    table: dict[int, int] = {}
    for text in texts:
        for first, second in itertools.pairwise(text):
            assert table.get(first, second) == second, f"{first} has two followers"
            table[first] = second
    return table


def export_tiny(name: str, folder: Path, precision: str = "fp32", device: str = "cpu") -> Bundle:
    """Export a model folder into the cache that SPECRUN_HOME names."""
    return export_bundle(str(folder), name=name, precision=precision, device=device)


def write_gguf(path: Path, tensors: Mapping[str, np.ndarray], *, hidden: int = 64, type_name: str = "Q4_1") -> Path:
    """The same model as a GGUF file with quantised matrices and the same tokenizer."""
    inner = tokenizers.Tokenizer.from_str(tokenizer_json())
    tokens = [inner.id_to_token(index) for index in range(FULL_TOKENS)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIALS else normal for token in tokens])
    writer.add_token_merges([f"{a} {b}" for a, b in MERGES])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for name, array in tensors.items():
        rows = array
        if ".q_proj." in name or ".k_proj." in name:
            rows = permute(rows, HEADS if ".q_proj." in name else KV_HEADS)
        if rows.ndim == 1:
            writer.add_tensor(gguf_name(name), rows)
        else:
            kind = gguf.GGMLQuantizationType[type_name]
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(np.ascontiguousarray(rows), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
