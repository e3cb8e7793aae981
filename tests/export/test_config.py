from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrun.export.config import LayerConfig, ModelConfig, config_from_gguf, config_from_json
from specrun.export.config_keys import RopeConfig
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def of(folder: Path, architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    raw = LLAMA | {"architectures": [architecture]} | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return config_from_json(folder)


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.sliding_window for layer in config.layer_configs]


def rotary(config: ModelConfig) -> list[bool]:
    return [layer.rotary for layer in config.layer_configs]


def test_plain_llama(tmp_path: Path) -> None:
    config = of(tmp_path)
    assert (config.hidden, config.layers, config.heads, config.kv_heads, config.head_dim) == (64, 4, 4, 2, 16)
    assert (config.intermediate, config.vocabulary, config.context, config.norm_epsilon) == (96, 160, 256, 1e-5)
    assert config.rope == RopeConfig(10_000.0)
    flags = (config.tied_head, config.attention_bias, config.output_bias, config.mlp_bias)
    assert flags == (False,) * 4
    assert config.layer_configs == (LayerConfig(None, True),) * 4


def test_optional_keys(tmp_path: Path) -> None:
    assert of(tmp_path, num_key_value_heads=None).kv_heads == 4
    assert of(tmp_path, num_key_value_heads="absent").kv_heads == 4
    assert of(tmp_path, head_dim=None).head_dim == 16
    assert of(tmp_path, head_dim=32).head_dim == 32
    assert of(tmp_path, tie_word_embeddings=True).tied_head
    assert of(tmp_path, architectures=None, model_type="qwen2").family.name == "qwen2"
    assert of(tmp_path, "Qwen3ForCausalLM").head_dim == 128
    assert of(tmp_path, "SmolLM3ForCausalLM").tied_head  # transformers leaves its default out of config.json


def test_biases(tmp_path: Path) -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.attention_bias, config.output_bias, config.mlp_bias

    both = {"attention_bias": True, "mlp_bias": True}
    assert biases(of(tmp_path, **both)) == (True, True, True)
    assert biases(of(tmp_path, "Qwen2ForCausalLM")) == (True, False, False)
    assert biases(of(tmp_path, "Qwen3ForCausalLM", **both)) == (True, True, False)
    assert biases(of(tmp_path, "MistralForCausalLM", **both)) == (False, False, False)


def test_rope_of_transformers_4_and_5(tmp_path: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    wanted = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    assert of(tmp_path, rope_theta=5e5, rope_scaling=None).rope == RopeConfig(5e5)
    assert of(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope == RopeConfig(5e5)
    assert of(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3"} | llama3).rope == wanted
    assert of(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5} | llama3).rope == wanted
    assert of(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(1e4, "linear", 2.0)
    assert of(tmp_path, "SmolLM3ForCausalLM").rope.theta == 2e6


def test_windows_of_mistral(tmp_path: Path) -> None:
    name = "MistralForCausalLM"
    assert windows(of(tmp_path, name, sliding_window=32)) == [32] * 4
    assert windows(of(tmp_path, name, sliding_window=None)) == [None] * 4
    assert windows(of(tmp_path, name, max_position_embeddings=32768)) == [4096] * 4  # the default of its class
    assert windows(of(tmp_path, name, sliding_window=256)) == [None] * 4  # the whole context


def test_windows_of_qwen(tmp_path: Path) -> None:
    name, on = "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 32}
    assert windows(of(tmp_path, name, sliding_window=32)) == [None] * 4
    assert windows(of(tmp_path, name, max_window_layers=3, **on)) == [None, None, None, 32]
    assert windows(of(tmp_path, name, **on)) == [None] * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert windows(of(tmp_path, name, layer_types=types, **on)) == [32, None] * 2


def test_layers_without_rope(tmp_path: Path) -> None:
    name = "SmolLM3ForCausalLM"
    assert rotary(of(tmp_path, name)) == [True, True, True, False]
    assert rotary(of(tmp_path, name, no_rope_layer_interval=2)) == [True, False] * 2
    assert rotary(of(tmp_path, name, no_rope_layers=[0, 1, 1, 1])) == [False, True, True, True]
    assert windows(of(tmp_path, name, use_sliding_window=True, sliding_window=8)) == [None, None, None, 8]
    assert rotary(of(tmp_path, no_rope_layers=[0, 0, 0, 0])) == [True] * 4  # llama has no such layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
            "LlamaForSequenceClassification",
        ),
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between layer types"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor of 0\.5"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": 10**8}, "vocabulary is 100000000"),
        ({"num_key_value_heads": 3}, "4 attention heads"),
        ({"hidden_size": 66}, "head_dim is 0"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window in config.json"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        of(tmp_path, **changes)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"hidden_size": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_broken_files(text: str, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is not a complete model folder"):
        config_from_json(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(IntegrityError, match=r"config\.json"):
        config_from_json(tmp_path)


def test_name_and_licence(tmp_path: Path) -> None:
    folder = tmp_path / "größe 模型"
    folder.mkdir()
    assert (of(folder).name, of(folder).licence) == ("größe 模型", None)
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nlicense: none\n")
    assert of(folder, _name_or_path="org/model").name == "org/model"
    assert of(folder, _name_or_path="/home/someone/model").name == "größe 模型"
    assert of(folder).licence == "apache-2.0"


GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 4,
    "llama.context_length": 256,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {"token_embd.weight": (160, 64)}


def of_gguf(architecture: str = "llama", extra: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    own = {key.replace("llama.", f"{architecture}."): value for key, value in GGUF.items()}
    own |= {"general.architecture": architecture}
    own |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
    header = SimpleNamespace(
        metadata={key: value for key, value in own.items() if value is not None},
        shapes=SHAPES | dict.fromkeys(extra, (64,)),
    )
    return config_from_gguf(header)


def test_gguf_sizes_and_defaults() -> None:
    config = of_gguf()
    assert (config.hidden, config.heads, config.kv_heads, config.head_dim, config.vocabulary) == (64, 4, 2, 16, 160)
    assert config.tied_head
    assert not of_gguf(extra=("output.weight",)).tied_head
    assert of_gguf(attention__key_length=32, attention__value_length=32).head_dim == 32
    assert of_gguf(attention__head_count_kv=None).kv_heads == 4
    assert of_gguf(rope__freq_base=5e5).rope == RopeConfig(5e5)
    assert of_gguf(extra=("blk.0.attn_q.bias",)).attention_bias
    assert of_gguf("qwen2").attention_bias
    assert rotary(of_gguf("smollm3")) == [True, True, True, False]


def test_gguf_rope_and_window() -> None:
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    assert of_gguf(**linear).rope == RopeConfig(1e4, "linear", 4.0)
    assert of_gguf(rope__scale_linear=4.0).rope == RopeConfig(1e4, "linear", 4.0)
    assert of_gguf(rope__scaling__type="none", rope__scaling__factor=4.0).rope == RopeConfig(1e4)
    assert windows(of_gguf(attention__sliding_window=32)) == [32] * 4
    assert windows(of_gguf("qwen2", attention__sliding_window=256)) == [None] * 4


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma3", {}, "'gemma3'"),
        ("llama", {"expert_count": 8}, r"llama\.expert_count to 8"),
        ("llama", {"attention__scale": 0.1}, r"llama\.attention\.scale"),
        ("llama", {"rope__scaling__type": "yarn"}, "'yarn'"),
        ("llama", {"rope__dimension_count": 8}, r"rope\.dimension_count to 8"),
        ("llama", {"attention__head_count_kv": [2, 2, 1, 1]}, "head_count_kv"),
        ("llama", {"block_count": None}, "block_count is missing"),
        ("qwen2", {"attention__sliding_window": 32}, "which layers"),
    ],
)
def test_gguf_refusals(architecture: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        of_gguf(architecture, **changes)
