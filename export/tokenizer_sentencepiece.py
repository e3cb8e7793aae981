"""A SentencePiece tokenizer.model (a protocol buffer) as a tokenizer.json."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from specrun.export.tokenizer_build import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    SentencePieceOptions,
    Vocabulary,
    sentencepiece_bpe_json,
    unigram_json,
)
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

# Field numbers of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_TRAINER_MODEL_TYPE, _TRAINER_BOS, _TRAINER_EOS = 3, 41, 42
_NORMALIZER_CHARSMAP, _NORMALIZER_PREFIX, _NORMALIZER_COLLAPSE = 2, 3, 4
_UNIGRAM, _BPE = 1, 2


def sentencepiece_tokenizer(model: bytes, added: dict[str, Any]) -> tuple[str, int | None, int | None]:
    """tokenizer.json, BOS id and EOS id of a serialised SentencePiece model.

    `added` holds the tokens that were added after training, as `added_tokens_decoder` of tokenizer_config.json does:
    id to {"content", "special"}; those beyond the model's own ids must follow on without a gap.

    Raises IntegrityError for a file that is cut, UnsupportedModelError for a word or character model.
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, Any] | None = None
    normalizer: dict[int, Any] | None = None
    try:
        for number, value in _fields(model):
            if number == _PIECES:
                piece = dict(_fields(value))
                score = struct.unpack("<f", piece[_PIECE_SCORE])[0] if _PIECE_SCORE in piece else 0.0
                pieces.append((piece[_PIECE_TEXT].decode("utf-8"), score, piece.get(_PIECE_TYPE, NORMAL)))
            elif number == _TRAINER:
                trainer = dict(_fields(value))
            elif number == _NORMALIZER:
                normalizer = dict(_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise IntegrityError("tokenizer.model is cut or is not a SentencePiece model: fetch the file again") from error
    if not pieces or trainer is None or normalizer is None:
        raise IntegrityError("tokenizer.model is cut: fetch the file again")
    kind = trainer.get(_TRAINER_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(
            "tokenizer.model is a SentencePiece word or character model; "
            "specrun knows bpe and unigram: save the tokenizer as tokenizer.json"
        )
    _add(pieces, added)
    vocabulary = Vocabulary(
        [text for text, _, _ in pieces], [token_type for _, _, token_type in pieces], [score for _, score, _ in pieces]
    )
    options = SentencePieceOptions(
        space_prefix=bool(normalizer.get(_NORMALIZER_PREFIX, 1)),
        collapse_spaces=bool(normalizer.get(_NORMALIZER_COLLAPSE, 1)),
        charsmap=normalizer.get(_NORMALIZER_CHARSMAP, b""),
    )
    document = (sentencepiece_bpe_json if kind == _BPE else unigram_json)(vocabulary, options)
    return document, _id(trainer.get(_TRAINER_BOS, 1)), _id(trainer.get(_TRAINER_EOS, 2))


def _add(pieces: list[tuple[str, float, int]], added: dict[str, Any]) -> None:
    own = len(pieces)
    for token_id, token in sorted((int(key), value) for key, value in added.items()):
        text = token["content"]
        token_type = CONTROL if token.get("special") else USER_DEFINED
        if token_id < own:
            continue
        if token_id != len(pieces):
            raise UnsupportedModelError(
                f"the added token {text!r} has id {token_id}, but {len(pieces)} is the next free one: "
                "save the tokenizer as tokenizer.json"
            )
        pieces.append((text, 0.0, token_type))


def _id(value: int) -> int | None:
    return value if value < 1 << 31 else None  # -1, "none", is written as a 64-bit two's complement


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Field numbers and raw values of a protocol buffer message: int for varints, bytes for the rest."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(message):
            raise ValueError("cut message")
        yield number, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
