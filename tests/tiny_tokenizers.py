"""Tiny tokenizers with known answers: tests/export/data/*.json, made with llama.cpp from trained vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specrun.export.tokenizer_gguf import gguf_tokenizer
from specrun.models_cache.manifest import SpecialIds
from specrun.runtime.tokenizer import Tokenizer

DATA = Path(__file__).parent / "export" / "data"


class Field:
    def __init__(self, value: Any) -> None:
        self._value = value

    def contents(self) -> Any:
        return self._value


class Reader:
    """Stands for gguf.GGUFReader. Keys are without their `tokenizer.ggml.`."""

    def __init__(self, chat_template: str | None = None, **metadata: Any) -> None:
        self.fields = {f"tokenizer.ggml.{key}": Field(value) for key, value in metadata.items()}
        if chat_template is not None:
            self.fields["tokenizer.chat_template"] = Field(chat_template)


def golden(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def tiny(name: str, chat_template: str | None = None, *, add_bos: bool | None = None) -> Tokenizer:
    """A tokenizer of the goldens: "qwen2", "smollm", "llama" (SentencePiece), ..."""
    document, template, special_ids, tokens = gguf_tokenizer(
        Reader(chat_template, **golden(f"tiny-{name}")["metadata"])
    )
    if add_bos is not None:
        special_ids = SpecialIds(special_ids.bos, special_ids.eos, special_ids.pad, add_bos)
    return Tokenizer(document, special_ids, tokens, template)
