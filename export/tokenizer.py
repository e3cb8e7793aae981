"""The tokenizer of a model source, as the files and ids that a bundle holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import tokenizers

from specrun.export.tokenizer_gguf import MetadataReader, gguf_tokenizer
from specrun.export.tokenizer_sentencepiece import sentencepiece_tokenizer
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError
from specrun.models_cache.manifest import SpecialIds


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a bundle needs of a tokenizer: tokenizer.json, chat template, special ids, number of real ids.

    `special_ids.eos[0]` is the token that a chat template calls `eos_token`; the others end a text as well.
    """

    tokenizer_json: str
    chat_template: str | None
    special_ids: SpecialIds
    tokens: int


def tokenizer_files(source_path: Path, reader: MetadataReader | None = None) -> TokenizerFiles:
    """Read the tokenizer of a safetensors folder or of a GGUF file.

    `reader` is the file's open `gguf.GGUFReader`, where there is one already. A folder's tokenizer.json is taken
    verbatim; without one, tokenizer.model (SentencePiece) is converted. EOS ids are the union of what
    tokenizer_config.json, generation_config.json and config.json name.

    Raises UnsupportedModelError for a tokenizer that specrun cannot build, IntegrityError for files that are cut,
    are Git LFS pointers or contradict each other.
    """
    if reader is not None or source_path.is_file():
        files = TokenizerFiles(*gguf_tokenizer(reader if reader is not None else gguf.GGUFReader(source_path)))
    else:
        files = _folder_files(source_path)
    _load(files.tokenizer_json)
    return files


def _load(document: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(document)
    except Exception as error:  # the library raises a bare Exception
        raise UnsupportedModelError(
            f"the tokenizers library refuses this tokenizer ({error}): a newer release of it may know more"
        ) from error


def _folder_files(folder: Path) -> TokenizerFiles:
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    config = _read_json(folder / "config.json")
    generation_config = _read_json(folder / "generation_config.json")
    default_bos: int | None = None
    default_eos: int | None = None
    if (folder / "tokenizer.json").is_file():
        document = _read_text(folder / "tokenizer.json")
        if document.startswith("version https://git-lfs"):
            raise IntegrityError(
                f"{folder / 'tokenizer.json'} is a Git LFS pointer, not the file: fetch it with git lfs pull"
            )
    elif (folder / "tokenizer.model").is_file():
        added = tokenizer_config.get("added_tokens_decoder") or _added_tokens(_read_json(folder / "added_tokens.json"))
        document, default_bos, default_eos = sentencepiece_tokenizer((folder / "tokenizer.model").read_bytes(), added)
    else:
        raise UnsupportedModelError(
            f"{folder} has neither tokenizer.json nor tokenizer.model: save the tokenizer there as tokenizer.json"
        )
    tokenizer = _load(document)
    named = {**_read_json(folder / "special_tokens_map.json"), **tokenizer_config}

    def token_id(key: str) -> int | None:
        token = named.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        return tokenizer.token_to_id(text) if isinstance(text, str) else None

    bos = _first(token_id("bos_token"), *_ids(generation_config, config, key="bos_token_id"), default_bos)
    eos = [token_id("eos_token"), *_ids(generation_config, config, key="eos_token_id"), default_eos]
    add_bos = tokenizer_config.get("add_bos_token")
    if add_bos is None:
        add_bos = default_bos is not None or _writes_first(tokenizer, bos)
    special_ids = SpecialIds(
        bos=bos,
        eos=tuple(dict.fromkeys(value for value in eos if value is not None)),
        pad=_first(token_id("pad_token"), *_ids(generation_config, config, key="pad_token_id")),
        add_bos=bool(add_bos) and bos is not None,
    )
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return TokenizerFiles(document, _folder_template(folder, tokenizer_config), special_ids, max(ids, default=-1) + 1)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise IntegrityError(f"{path} is not UTF-8 text: fetch the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise IntegrityError(f"{path} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise IntegrityError(f"{path} does not hold a JSON object: fetch the file again")
    return value


def _added_tokens(added: dict[str, Any]) -> dict[str, Any]:
    return {str(token_id): {"content": text, "special": True} for text, token_id in added.items()}


def _ids(*configs: dict[str, Any], key: str) -> Iterator[int]:
    """Ids under `key` in each configuration and in its text part, lists flattened."""
    for config in configs:
        for part in (config, config.get("text_config")):
            value = part.get(key) if isinstance(part, dict) else None
            for token_id in value if isinstance(value, list) else [value]:
                if isinstance(token_id, int) and token_id >= 0:
                    yield token_id


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _writes_first(tokenizer: tokenizers.Tokenizer, bos: int | None) -> bool:
    """Whether the post-processor starts every text with BOS."""
    return bos is not None and tokenizer.encode("", add_special_tokens=True).ids[:1] == [bos]


def _folder_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = tokenizer_config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default", next(iter(named.values()), None) if len(named) == 1 else None)
    return template if isinstance(template, str) else None
