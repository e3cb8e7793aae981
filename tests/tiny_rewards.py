"""Tiny reward models: bundles with a graph made by hand, and classifiers in the transformers layout, which need torch.

The graph by hand adds up what a table [vocabulary, labels] says of each token, so every reward is known.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specrun.models_cache.manifest import GraphSpec, SourceInfo, SpecialIds, TensorSpec
from specrun.models_cache.reward import RewardBundle, RewardManifest, reward_or_build
from specrun.runtime.chat_template import ChatTemplate
from specrun.runtime.tokenizer import Tokenizer

from .conftest import TINY_TOKENS, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def chat_ids(prompt: str, text: str) -> list[int]:
    """What a reward model with `TEMPLATE` reads."""
    tokenizer = Tokenizer(tiny_tokenizer(), SpecialIds(None, (257,), 299, False), 300, TEMPLATE)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    return ChatTemplate(tokenizer).encode_chat(messages, add_generation_prompt=False)


def reward_table(labels: int = 1, *, seed: int = 0) -> np.ndarray:
    """What each token adds to each logit, f32 [vocabulary, labels]."""
    return np.random.default_rng(seed).standard_normal((TINY_TOKENS, labels)).astype(np.float32)


def handmade_reward(
    table: np.ndarray,
    *,
    name: str = "judge",
    label: int = 0,
    context: int = 64,
    pad: int | None = 299,
    template: str | None = TEMPLATE,
    types: bool = False,
    output: Path | None = None,
    force: bool = False,
) -> RewardBundle:
    """A reward model that adds up table[token] over the tokens; with `types`, each token type adds 1 as well."""

    def build(folder: Path) -> RewardManifest:
        inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
        _write_graph(folder / "model.onnx", table, inputs)
        (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        shape = ("batch", "positions")
        specs = tuple(TensorSpec(entry, "int64", shape) for entry in inputs)
        logits = TensorSpec("logits", "float32", ("batch", table.shape[1]))
        return RewardManifest(
            name=name,
            family="handmade",
            graphs={"reward": GraphSpec("model.onnx", (), (), None, specs, (logits,))},
            labels=tuple(f"LABEL_{index}" for index in range(table.shape[1])),
            label=label,
            vocabulary=TINY_TOKENS,
            tokens=TINY_TOKENS,
            context=context,
            pad=pad,
            special_ids=SpecialIds(bos=None, eos=(257,), pad=pad, add_bos=False),
            source=SourceInfo(name, "path", {}, None),
            error=0.0,
        )

    return reward_or_build(name, build, output=output, force=force)


def _write_graph(path: Path, table: np.ndarray, inputs: Sequence[str]) -> None:
    from onnx import TensorProto, checker, helper, numpy_helper, save

    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
    ]
    rows = "rows"
    if "token_type_ids" in inputs:
        nodes += [
            helper.make_node("Cast", ["token_type_ids"], ["types"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["types", "last"], ["type_column"]),
            helper.make_node("Add", ["rows", "type_column"], ["typed"]),
        ]
        rows = "typed"
    nodes += [
        helper.make_node("Mul", [rows, "column"], ["seen"]),
        helper.make_node("ReduceSum", ["seen", "positions_axis"], ["logits"], keepdims=0),
    ]
    constants = {"table": table, "last": np.array([2], np.int64), "positions_axis": np.array([1], np.int64)}
    graph = helper.make_graph(
        nodes,
        "reward",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "positions"]) for name in inputs],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", table.shape[1]])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    checker.check_model(model)
    save(model, path)


def tiny_classifier(
    labels: int = 1, *, seed: int = 0, context: int = 256, pad: int | None = 299, kind: str = "llama"
) -> Any:
    """A small classifier of random weights over the tiny tokenizer: llama, gpt2, or the encoders bert and roberta."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": TINY_TOKENS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": context,
        "num_labels": labels,
        "pad_token_id": pad,
        "initializer_range": 0.2,
    }
    if kind == "bert":
        return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).eval()
    if kind == "roberta":
        return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**sizes)).eval()
    if kind == "gpt2":
        own = {"n_positions": context, "n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": 257}
        return transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, **own)).eval()
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, bos_token_id=None, eos_token_id=257)
    return transformers.LlamaForSequenceClassification(config).eval()


def write_classifier(folder: Path, model: Any, *, template: str | None = TEMPLATE) -> Path:
    """Save a classifier with the tiny tokenizer as transformers users have it."""
    model.save_pretrained(folder, safe_serialization=True)
    (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")
    config: dict[str, Any] = {"eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def source_logits(model: Any, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """What the source model itself gives for each row of ids, one at a time."""
    import torch

    found = []
    for row in rows:
        ids = torch.tensor([list(row)])
        with torch.no_grad():
            found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].tolist())
    return found
