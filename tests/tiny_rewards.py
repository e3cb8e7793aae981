"""Tiny sequence-classification models in the transformers layout, for tests of reward models. They need torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .conftest import TINY_TOKENS, tiny_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tiny_classifier(
    labels: int = 1, *, seed: int = 0, context: int = 256, pad: int | None = 299, kind: str = "llama"
) -> Any:
    """A small classifier of random weights over the tiny tokenizer: llama, or bert (an encoder with token types)."""
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
