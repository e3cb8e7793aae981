"""tokenizer.json documents built from a vocabulary: byte-level BPE, SentencePiece BPE and unigram.

The text of a token type follows SentencePiece's numbering, which GGUF shares: 1 normal, 2 unknown, 3 control,
4 user defined, 5 unused, 6 byte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specrun.models_cache.errors import UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes a space as this character

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TIKTOKEN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text into words: regular expressions applied one after the other.

    `whole_words`: a word that is a token is taken whole, without merges. `add_bos`: whether text starts with BOS
    where the file does not say.
    """

    expressions: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


_LLAMA3 = PreTokenizer((_TIKTOKEN % "{1,3}",), whole_words=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-3": _LLAMA3,
    "qwen2": PreTokenizer((_TIKTOKEN % "",)),
    "deepseek-r1-qwen": PreTokenizer((_TIKTOKEN % "",)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token texts by id with their types (see the module) and, for SentencePiece, their scores."""

    texts: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float] = ()

    def ids(self) -> dict[str, int]:
        """Text to id. Raises UnsupportedModelError where two ids share a text."""
        ids: dict[str, int] = {}
        for token_id, text in enumerate(self.texts):
            if ids.setdefault(text, token_id) != token_id:
                raise UnsupportedModelError(
                    f"the tokenizer has the token {text!r} twice, as ids {ids[text]} and {token_id}: "
                    "convert the model again from its original files"
                )
        return ids


@dataclass(frozen=True, slots=True)
class SentencePieceOptions:
    """What a SentencePiece model does to text before it looks tokens up."""

    space_prefix: bool
    collapse_spaces: bool = False
    charsmap: bytes = b""


def byte_level_json(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], pre: PreTokenizer) -> str:
    """tokenizer.json of a byte-level BPE vocabulary (tokens written with GPT-2's byte characters)."""
    splits = [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
        for expression in pre.expressions
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _document(
        vocabulary,
        model=_bpe(vocabulary.ids(), merges, ignore_merges=pre.whole_words),
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        decoder=byte_level,
    )


def sentencepiece_bpe_json(vocabulary: Vocabulary, options: SentencePieceOptions) -> str:
    """tokenizer.json of a SentencePiece BPE vocabulary; merges come from the scores, best first.

    Only normal and unused tokens are merged into: a control token that stands in a text as text is never made of its
    characters. Ties between equal scores are broken by id, where SentencePiece takes the leftmost place.
    """
    ids = vocabulary.ids()
    mergeable = {
        text: token_id for text, token_id in ids.items() if vocabulary.types[token_id] in (NORMAL, UNUSED) and text
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, token_id in mergeable.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-vocabulary.scores[token_id], token_id, cut, left, right))
    ranked.sort()
    model = _bpe(ids, [(left, right) for _, _, _, left, right in ranked], ignore_merges=False)
    model |= {"unk_token": _unknown(vocabulary), "fuse_unk": True, "byte_fallback": BYTE in vocabulary.types}
    return _document(
        vocabulary,
        model=model,
        normalizer=_sentencepiece_normalizer(options),
        pre_tokenizer=None,
        decoder=_sentencepiece_decoder(options),
    )


def unigram_json(vocabulary: Vocabulary, options: SentencePieceOptions) -> str:
    """tokenizer.json of a SentencePiece unigram vocabulary, with byte fallback where it has byte tokens.

    Text that spells a control token stays text as long as its characters are in the vocabulary.
    """
    vocabulary.ids()  # refuses a text that occurs twice
    # The library searches every piece. Control and byte tokens must not be found in a text, so they cost too much.
    hidden = -1e6
    pieces = [
        [text, float(score) if kind in (NORMAL, USER_DEFINED, UNUSED) else hidden]
        for text, kind, score in zip(vocabulary.texts, vocabulary.types, vocabulary.scores, strict=True)
    ]
    unknown = _unknown(vocabulary)
    model = {
        "type": "Unigram",
        "unk_id": None if unknown is None else list(vocabulary.texts).index(unknown),
        "vocab": pieces,
        "byte_fallback": BYTE in vocabulary.types,
    }
    return _document(
        vocabulary,
        model=model,
        normalizer=_sentencepiece_normalizer(options),
        pre_tokenizer=None,
        decoder=_sentencepiece_decoder(options),
    )


def _bpe(ids: dict[str, int], merges: Sequence[tuple[str, str]], *, ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _unknown(vocabulary: Vocabulary) -> str | None:
    return next((text for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind == UNKNOWN), None)


def _sentencepiece_normalizer(options: SentencePieceOptions) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if options.charsmap:
        charsmap = base64.b64encode(options.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if options.collapse_spaces:
        steps.append({"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if options.space_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _sentencepiece_decoder(options: SentencePieceOptions) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if options.space_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _document(
    vocabulary: Vocabulary,
    *,
    model: dict[str, Any],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    decoder: dict[str, Any],
) -> str:
    added = [
        {
            "id": token_id,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token_id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(document, ensure_ascii=False)
