"""Models of random weights in any shape: small ones as a source to export, large ones written as a bundle at once.

A large one keeps the weights of one layer in its file, and every layer refers to that place under a name of its own:
the file stays small, while a session loads and keeps each layer by itself, as it would those of a real model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrun.export.config import ModelConfig, config_from_json
from specrun.export.weight_file import WeightFile
from specrun.export.weight_store import StoredWeights, store_weights
from specrun.models_cache.layout import Bundle
from specrun.models_cache.progress import Progress

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int

    @property
    def head_dim(self) -> int:
        """Of each head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """How many weights it has, embedding and head each for itself."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocabulary * self.hidden


SHAPES: Final = {
    # Touvron et al. 2023, table 2; its context is 2048, and one run more must fit behind it.
    "llama-7b": Shape(32, 4096, 32, 32, 11008, 32000, 2304),
    "llama-68m": Shape(2, 768, 12, 12, 3072, 32000, 2304),  # a draft in use for it (Miao et al. 2023)
    "small": Shape(8, 512, 8, 8, 1408, 4096, 2304),
    "small-draft": Shape(1, 128, 2, 2, 384, 4096, 2304),
    "tiny": Shape(2, 64, 4, 2, 96, 320, 1024),
    "tiny-draft": Shape(1, 32, 2, 2, 64, 320, 1024),
}

_TEMPLATE: Final = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
_END: Final = "<|end|>"


class RandomWeights:
    """Weights as `specrun.export.weights.Weights` has them: normal, of a spread that keeps activations about 1."""

    files: dict[str, Path]

    def __init__(self, config: ModelConfig, seed: int = 1) -> None:
        self.config = config
        self.files = {}
        self._seed = seed

    def names(self) -> frozenset[str]:
        """Every tensor."""
        names = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
        for layer in range(self.config.layers):
            names |= {f"model.layers.{layer}.{name}.weight" for name in _LAYER}
        return frozenset(names)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor, the same for the same seed."""
        rows, columns = self._shape(name)
        if columns == 0:
            return np.ones(rows, np.float32)
        rng = np.random.default_rng([self._seed, *name.encode()])
        values = rng.standard_normal((rows, columns), np.float32)
        values *= np.float32(1.0 if "embed" in name else 1.5 / columns**0.5)
        return values

    def blocks(self, name: str) -> None:
        """They are floats."""

    def _shape(self, name: str) -> tuple[int, int]:
        config, part = self.config, name.removesuffix(".weight").split(".")[-1]
        heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        shapes = {
            "q_proj": (heads, config.hidden),
            "k_proj": (kv, config.hidden),
            "v_proj": (kv, config.hidden),
            "o_proj": (config.hidden, heads),
            "gate_proj": (config.intermediate, config.hidden),
            "up_proj": (config.intermediate, config.hidden),
            "down_proj": (config.hidden, config.intermediate),
            "embed_tokens": (config.vocabulary, config.hidden),
            "lm_head": (config.vocabulary, config.hidden),
        }
        return shapes.get(part, (config.hidden, 0))


_LAYER: Final = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
)


def write_source(folder: Path, shape: Shape, *, weights: bool = True) -> Path:
    """Write a model folder as transformers does: configuration, tokenizer and, unless left out, the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_tokenizer(shape.vocabulary), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END, "chat_template": _TEMPLATE}))
    if weights:
        from safetensors.numpy import save_file

        made = RandomWeights(config_from_json(folder))
        save_file({name: made.tensor(name) for name in sorted(made.names())}, folder / "model.safetensors")
    return folder


def write_bundle(name: str, shape: Shape, precision: str, device: str, work: Path) -> Bundle:
    """A bundle of random weights in the cache, found there if it was written before; no fidelity is measured."""
    from specrun.export import bundle as exporter
    from specrun.models_cache.manifest import Manifest
    from specrun.models_cache.sources import FetchedSource
    from specrun.models_cache.store import bundle_or_build

    source = write_source(work / f"source-{name}", shape, weights=False)
    options: dict[str, Any] = {} if device == "cpu" else {"device": device}

    def build(folder: Path) -> Manifest:
        # The exporter itself, so that the graphs are those of any model; only what reads the weights is another.
        with patch.multiple(
            exporter,
            open_weights=lambda path: RandomWeights(config_from_json(path)),
            store_weights=_store_one_layer,
            measure_fidelity=lambda *arguments: (None, ()),
        ):
            fetched = FetchedSource(name, "path", source, {}, None)
            return exporter.write_bundle(folder, fetched, precision=precision, block=None, **options)

    return bundle_or_build(name, build)


def _store_one_layer(
    weights: RandomWeights, file: WeightFile, precision: str, block: int | None, progress: Progress | None = None
) -> StoredWeights:
    """`store_weights` of a model of one layer, to which the other layers refer."""
    config = weights.config
    one = RandomWeights(replace(config, layers=1, layer_configs=config.layer_configs[:1]))
    stored = store_weights(one, file, precision, block, progress)
    return replace(stored, layers=tuple(_renamed(stored.layers[0], file, index) for index in range(config.layers)))


def _renamed(value: T, file: WeightFile, index: int) -> T:
    """A copy whose tensors have names of their own and lie where those of `value` do."""

    def walk(item: Any) -> Any:
        if is_dataclass(item) and not isinstance(item, type):
            return replace(item, **{f.name: walk(getattr(item, f.name)) for f in fields(item)})
        if isinstance(item, tuple):
            return tuple(map(walk, item))
        if isinstance(item, dict):
            return {key: walk(entry) for key, entry in item.items()}
        if isinstance(item, (ir.ExternalTensor, ir.Tensor)):
            return file.view(f"{item.name}.of_layer_{index}", item, item.shape.numpy())
        return item

    copied: T = walk(value)
    return copied


def _tokenizer(tokens: int) -> str:
    """A byte-level tokenizer: 256 bytes, the end of text, and words without meaning up to `tokens`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[_END] = len(vocabulary)
    while len(vocabulary) < tokens:
        vocabulary[f"Ġw{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(_END, special=True)])
    return str(tokenizer.to_str())
