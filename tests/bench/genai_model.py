"""onnxruntime-genai's environment, and its own 8-bit CPU model of the weights that a specrun bundle was made of."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from worker import BenchError, child_environment, last_line

from specrun.export.tokenizer import TokenizerFiles, tokenizer_files
from specrun.export.weights import Weights, open_weights
from specrun.models_cache.sources import FetchedSource

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
# The builder imports more than the package itself asks for.
REQUIREMENTS = ("onnxruntime-genai>=0.18", "onnx", "onnx-ir", "safetensors", "torch", "transformers")
# 8-bit MatMulNBits, symmetric, rounded to nearest. Blocks of 32 and accuracy level 4 are its defaults for the CPU, but
# the comparison rests on them.
BUILD_OPTIONS = ("block_size=32", "accuracy_level=4")

Note = Callable[[str], None]


def genai_python(work: Path, note: Note) -> Path:
    """The Python of a virtual environment below `work` that has onnxruntime-genai; made where it is missing.

    It gets the version of ONNX Runtime that specrun runs on, so that both have the same kernels.
    """
    folder = work / "venv"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = [*REQUIREMENTS, f"onnxruntime=={_onnxruntime_version()}"]
    constraints = ["--constraint", os.fspath(CONSTRAINTS)] if CONSTRAINTS.exists() else []
    content = "\n".join([sys.version, *wanted, CONSTRAINTS.read_text(encoding="utf-8") if constraints else ""])
    stamp = folder / ".installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == content:
        return python
    note(f"Making {folder} and installing {REQUIREMENTS[0]} with what its model builder needs ...")
    log = work / "install.log"
    _call([sys.executable, "-m", "venv", "--clear", os.fspath(folder)], log, "The virtual environment was not made")
    install = [os.fspath(python), "-m", "pip", "install", "--disable-pip-version-check", *constraints, *wanted]
    _call(install, log, "onnxruntime-genai was not installed")
    stamp.write_text(content, encoding="utf-8")
    return python


def genai_model(work: Path, python: Path, source: FetchedSource, extra_options: Sequence[str], note: Note) -> Path:
    """The folder below `work` with its 8-bit model of `source`, made by its own builder; built where it is missing."""
    options = [*BUILD_OPTIONS, *extra_options]
    command = [os.fspath(python), "-c", "from importlib.metadata import version; print(version('onnxruntime-genai'))"]
    release = subprocess.run(command, capture_output=True, encoding="utf-8", env=child_environment()).stdout.strip()
    key = json.dumps([release, sorted(source.files.values()), options])
    folder = work / f"model-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if folder.exists():
        return folder
    note(f"Building the 8-bit model of onnxruntime-genai {release}; this takes a minute ...")
    weights, unfinished, log = work / "weights", work / "model-unfinished", work / "build.log"
    for left in (weights, unfinished):
        shutil.rmtree(left, ignore_errors=True)
    builder = [os.fspath(python), "-m", "onnxruntime_genai.models.builder", "--precision", "int8"]
    builder += ["--execution_provider", "cpu", "--input", os.fspath(weights), "--output", os.fspath(unfinished)]
    builder += ["--cache_dir", os.fspath(work / "build-cache"), "--extra_options", "hf_token=false", *options]
    try:
        write_transformers_folder(weights, source.path)
        _call(builder, log, "onnxruntime-genai's builder failed")
    finally:
        shutil.rmtree(weights, ignore_errors=True)
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


def _onnxruntime_version() -> str:
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise BenchError("ONNX Runtime is not installed in this Python: pip install 'specrun[cpu]'.")


def _call(command: list[str], log: Path, failure: str) -> None:
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env=child_environment())
    if done.returncode:
        raise BenchError(f"{failure}: {last_line(log)} (all of it is in {log})")
