"""Every test: a cache of its own and no network. For those that ask: a tiny real bundle, or the default model."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TINY_TOKENS = 300
_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

# A shell that starts tests in the background has Ctrl-C ignored, and its children inherit that.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def isolated_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """SPECRUN_HOME of this test."""
    home = tmp_path / "specrun home"
    monkeypatch.setenv("SPECRUN_HOME", str(home))
    for name in ("SPECRUN_DEBUG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections of this process go to this machine only."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if not (host in ("localhost", "::1") or str(host).startswith("127.")):
            raise OSError(f"tests have no network (wanted {host})")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture
def run() -> Run:
    """Run `specrun` as a process, without a network, in a folder that is not the checkout."""

    def call(*arguments: str, input: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from specrun.cli.main import main; main()", *arguments],
            input=input,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", **environment},
            cwd=os.environ["SPECRUN_HOME"] if Path(os.environ["SPECRUN_HOME"]).is_dir() else None,
            timeout=120,
        )

    return call


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random llama weights in a safetensors folder, with a byte-level tokenizer and a chat template."""
    return write_tiny_source(tmp_path_factory.mktemp("sources") / "tiny")


@pytest.fixture(scope="session")
def tiny_cache(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with the model `tiny`, already calibrated; copy it, do not change it."""
    from specrun.export.bundle import export_bundle
    from specrun.runtime import Engine

    root = tmp_path_factory.mktemp("tiny cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRUN_HOME", str(root))
        export_bundle(str(tiny_source))
        Engine.load("tiny").close()
    return root


@pytest.fixture
def tiny(tiny_cache: Path, isolated_home: Path) -> str:
    """The name of a tiny model in this test's cache."""
    shutil.copytree(tiny_cache, isolated_home)
    return "tiny"


@pytest.fixture(scope="session")
def weights_home() -> Path:
    """A cache root, kept between runs, that holds smollm2-135m from the package index.

    SPECRUN_TEST_HOME says where; by default .cache/specrun-test below the checkout.
    """
    root = Path(os.environ.get("SPECRUN_TEST_HOME") or ROOT / ".cache" / "specrun-test").absolute()
    subprocess.run(
        [sys.executable, "-c", "from specrun.cli.main import main; main()", "models", "pull", "smollm2-135m"],
        env={**os.environ, "SPECRUN_HOME": str(root), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return root


@pytest.fixture
def smollm2(weights_home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the default model, with SPECRUN_HOME set to the cache that holds it. For tests marked `weights`."""
    monkeypatch.setenv("SPECRUN_HOME", str(weights_home))
    return "smollm2-135m"


def write_tiny_source(folder: Path, *, seed: int = 1, layers: int = 2, context: int = 16384) -> Path:
    """Write a llama of random weights that transformers would load too."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    hidden, inner, heads, kv_heads, head_dim = 64, 96, 4, 2, 16
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 0.15).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(TINY_TOKENS, hidden)}
    ones = np.ones(hidden, np.float32)
    tensors["model.norm.weight"] = ones
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = ones
        tensors[f"{prefix}post_attention_layernorm.weight"] = ones
        tensors[f"{prefix}self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden)
        tensors[f"{prefix}self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        tensors[f"{prefix}self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        tensors[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        tensors[f"{prefix}mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, inner)
    save_file({name: array.copy() for name, array in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": TINY_TOKENS,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_tokenizer())
    tokenizer_config = {"eos_token": "<|end|>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def tiny_tokenizer() -> str:
    """tokenizer.json: the 256 bytes, <|start|> (256), <|end|> (257), and a few pairs and words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<|start|>": 256, "<|end|>": 257}
    merges = []
    for left, right in [("e", "r"), ("h", "e"), ("t", "he"), ("i", "n"), ("Ġ", "the"), ("o", "n"), ("a", "n")]:
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    while len(vocabulary) < TINY_TOKENS:
        vocabulary[f"Ġw{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|start|>", "<|end|>")])
    return str(tokenizer.to_str())
