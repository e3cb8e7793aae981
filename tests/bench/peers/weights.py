"""The weights as a peer reads them: the GGUF file itself, a transformers folder, or genai's own CPU model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specrun.export.tokenizer import TokenizerFiles, tokenizer_files
from specrun.export.weights import Weights, open_weights
from specrun.models_cache.sources import FetchedSource

from .environments import installed_version
from .processes import BenchError, call

# MatMulNBits, symmetric, rounded to nearest. Blocks of 32 and accuracy level 4 are the builder's defaults for the CPU,
# but the comparison rests on them.
BUILD_OPTIONS = ("block_size=32", "accuracy_level=4")

Note = Callable[[str], None]


def gguf_file(source: FetchedSource) -> Path:
    """The GGUF file of a source. Raises BenchError where it is none."""
    if source.path.suffix.lower() != ".gguf":
        raise BenchError(f"it reads GGUF files, and {source.name} is none")
    return source.path


def gguf_types(path: Path) -> str:
    """The types of a GGUF file's quantised tensors, that of the most weights first: "Q4_1, Q8_0"."""
    from gguf import GGUFReader

    weights: Counter[str] = Counter()
    for tensor in GGUFReader(path).tensors:
        if tensor.tensor_type.name not in ("F32", "F16", "BF16"):
            weights[tensor.tensor_type.name] += int(tensor.n_elements)
    return ", ".join(name for name, _ in weights.most_common()) or "not quantised"


def transformers_folder(work: Path, source: FetchedSource, note: Note) -> Path:
    """The folder below `work` with a source as transformers reads it, in fp32; written where it is missing."""
    folder = work / f"weights-{_key(sorted(source.files.values()))}"
    if not folder.exists():
        note(f"Writing the weights of {source.name} for transformers ...")
        unfinished = work / "weights-unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        write_transformers_folder(unfinished, source.path)
        unfinished.rename(folder)
    return folder


def genai_model(
    work: Path, python: Path, source: FetchedSource, weights: Path, precision: str, options: Sequence[str], note: Note
) -> Path:
    """The folder below `work` with its CPU model of `source`, made by its own builder; built where it is missing.

    python: of its environment. weights: the source as a transformers folder. precision: int8 or int4. options: of the
    builder, as KEY=VALUE.
    """
    release = installed_version(python, "onnxruntime-genai")
    folder = work / f"{precision}-{_key([release, sorted(source.files.values()), options])}"
    if folder.exists():
        return folder
    note(f"Building the {precision} model of onnxruntime-genai {release}; this takes a minute ...")
    unfinished = work / "model-unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    builder = [os.fspath(python), "-m", "onnxruntime_genai.models.builder", "--precision", precision]
    builder += ["--execution_provider", "cpu", "--input", os.fspath(weights), "--output", os.fspath(unfinished)]
    builder += ["--cache_dir", os.fspath(work / "build-cache"), "--extra_options", "hf_token=false", *options]
    call(builder, work / "build.log", "its model builder failed")
    unfinished.rename(folder)
    return folder


def write_transformers_folder(folder: Path, source: Path) -> None:
    """Write config.json, model.safetensors in fp32 and the tokenizer of a source, as transformers reads them."""
    from safetensors.numpy import save_file

    weights = open_weights(source)
    tokenizer = tokenizer_files(source)
    config = _transformers_config(weights, tokenizer)
    folder.mkdir(parents=True)
    tensors = {name: weights.tensor(name) for name in weights.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")


def _transformers_config(weights: Weights, tokenizer: TokenizerFiles) -> dict[str, Any]:
    config = weights.config
    plain = config.rope.kind == "default" and "rope_freqs.weight" not in weights.names()
    windowed = any(layer.sliding_window for layer in config.layer_configs)
    if config.family.name not in ("llama", "qwen2") or not plain or windowed:
        raise BenchError(f"{config.name}: only Llama and Qwen2 models with plain rotary embeddings can be compared.")
    if config.attention_bias != config.output_bias and config.family.name == "llama":
        raise BenchError(f"{config.name}: transformers has no Llama with biases of q, k and v alone.")
    architecture, model_type = config.family.architectures[:2]
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope.theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},  # transformers 5
        "tie_word_embeddings": config.tied_head,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_act": "silu",
        "bos_token_id": tokenizer.special_ids.bos,
        "eos_token_id": list(tokenizer.special_ids.eos),
        "torch_dtype": "float32",
    }


def _key(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
