"""Text to token ids and back, with the exact bytes of every token."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from specrun.models_cache.errors import (
    IntegrityError,
    ManifestError,
    UnsupportedModelError,
    UsageError,
    VocabularyMismatchError,
)
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import SpecialIds

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """A bundle's tokenizer. Safe to use from several threads.

    `special_ids` and `tokens` are the manifest's; `chat_template` is the Jinja source that chat_template.jinja holds.
    A control token is one that tokenizer.json marks as special: its text never appears in decoded text, and user text
    that spells it stays ordinary text unless it is asked to be parsed.
    """

    def __init__(
        self, tokenizer_json: str, special_ids: SpecialIds, tokens: int, chat_template: str | None = None
    ) -> None:
        self._inner = _load(tokenizer_json)
        self.special_ids = special_ids
        self.tokens = tokens
        self.chat_template = chat_template
        added = self._inner.get_added_tokens_decoder()
        self.added_tokens: dict[int, tokenizers.AddedToken] = dict(added)
        self.control_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoder = _Decoder(self._inner)
        self._bytes: dict[int, bytes] = {}
        self._texts: list[str | None] | None = None
        self._middle: tokenizers.Tokenizer | None = None
        # Whether control tokens are parsed is a setting of the library's object, so encoding is one at a time.
        self._lock = threading.Lock()

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Tokenizer:
        """Load a bundle's tokenizer; only files that its manifest lists, and whose digests it so vouches for, are read.

        Raises ManifestError for one that is not listed, IntegrityError as `from_folder` does.
        """
        for name in ("tokenizer.json", "chat_template.jinja"):
            there = os.path.lexists(bundle.path / name)
            if name not in bundle.manifest.files and (there or name == "tokenizer.json"):
                raise ManifestError(f"{bundle.path}: the manifest does not list {name}; export the model again")
        return cls.from_folder(bundle.path, bundle.manifest.special_ids, bundle.manifest.sizes.tokens)

    @classmethod
    def from_folder(cls, folder: Path, special_ids: SpecialIds, tokens: int) -> Tokenizer:
        """Load tokenizer.json, and chat_template.jinja where there is one, from a bundle's folder.

        Raises IntegrityError for a missing or unreadable file.
        """
        try:
            document = (folder / "tokenizer.json").read_text(encoding="utf-8")
            template = folder / "chat_template.jinja"
            chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(
                f"the tokenizer in {folder} cannot be read ({error}): export the model again"
            ) from error
        return cls(document, special_ids, tokens, chat_template)

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_bos`: start with BOS where the model wants it; one that the text already starts with is kept and not
        doubled. `parse_special`: text that spells a control token becomes that token.

        Raises UsageError for text that is not valid Unicode (a lone surrogate).
        """
        ids = self._encode(self._inner, text, parse_special=parse_special)
        return self.with_bos(ids) if add_bos else ids

    def encode_parts(self, parts: Iterable[str | int], *, add_bos: bool = True) -> list[int]:
        """Token ids of one text given as runs of ordinary text (str) and control tokens (int) between them."""
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode(self._inner if index == 0 else self._without_first_prefix(), part)
        return self.with_bos(ids) if add_bos else ids

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` with BOS in front, where the model wants one and there is none yet."""
        bos = self.special_ids.bos
        if not self.special_ids.add_bos or bos is None or ids[:1] == [bos]:
            return ids
        return [bos, *ids]

    def decode(self, ids: Iterable[int], *, prompt: Sequence[int] = ()) -> str:
        """The text of `ids`, without control tokens; bytes that are no UTF-8 become U+FFFD.

        `prompt`: ids that stand before. SentencePiece's space before the first word belongs to the first text only, so
        it is dropped unless the prompt has text already.
        """
        data = b"".join(map(self.token_bytes, ids))
        if self.drops_first_space(prompt):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def drops_first_space(self, prompt: Sequence[int] = ()) -> bool:
        """Whether a space at the start of the text that follows `prompt` is no part of the text."""
        return self._decoder.strips_first_space and not any(map(self.token_bytes, prompt))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: part of a character, perhaps; none for a control token."""
        data = self._bytes.get(token_id)
        if data is None:
            data = b"" if token_id in self.control_ids else self._spelt_bytes(token_id)
            self._bytes[token_id] = data
        return data

    def token_text(self, token_id: int) -> str:
        """A token for display: control tokens as they are spelt, bytes that are no UTF-8 as U+FFFD."""
        return self._spelt_bytes(token_id).decode("utf-8", "replace")

    def first_difference(self, other: Tokenizer) -> tuple[int, str | None, str | None] | None:
        """The first real id whose token differs, with both texts (None: no such id), or None if the two agree.

        Only real ids are compared: the padding that models add to their vocabulary does not matter.
        """
        mine, theirs = self._vocabulary(), other._vocabulary()
        for token_id in range(max(len(mine), len(theirs))):
            a = mine[token_id] if token_id < len(mine) else None
            b = theirs[token_id] if token_id < len(theirs) else None
            if a != b:
                return token_id, a, b
        return None

    def require_same_vocabulary(self, other: Tokenizer) -> None:
        """Raise VocabularyMismatchError, naming the first differing token, unless `other` has the same vocabulary."""
        difference = self.first_difference(other)
        if difference is not None:
            token_id, a, b = difference
            raise VocabularyMismatchError(
                f"target and draft have different tokenizers: id {token_id} is {a!r} in the target and {b!r} in the "
                "draft; choose a draft of the same model family"
            )

    def _encode(self, inner: tokenizers.Tokenizer, text: str, *, parse_special: bool = False) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode (a lone surrogate at position {error.start}): read it as UTF-8"
            ) from error
        with self._lock:
            inner.encode_special_tokens = not parse_special
            try:
                with without_panics():
                    ids: list[int] = inner.encode(text, add_special_tokens=False).ids
            except Exception as error:  # the library raises a bare Exception
                raise IntegrityError(f"tokenizer.json fails on the text ({error}): export the model again") from error
        return ids

    def _without_first_prefix(self) -> tokenizers.Tokenizer:
        """The tokenizer for text that is not the start: no space is put in front where only the start gets one."""
        with self._lock:
            if self._middle is None:
                state = _state(self._inner.pre_tokenizer)
                if _replace_first_prefix(state):
                    document = json.loads(self._inner.to_str())
                    document["pre_tokenizer"] = state
                    self._middle = _load(json.dumps(document))
                else:
                    self._middle = self._inner
            return self._middle

    def _spelt_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.tokens:
            raise UsageError(f"token id {token_id} does not exist: the tokenizer has the ids 0 to {self.tokens - 1}")
        added = self.added_tokens.get(token_id)
        if added is not None:
            return self._decoder.added(added.content)
        with self._lock:
            piece = self._inner.id_to_token(token_id)
        return b"" if piece is None else self._decoder.piece(piece)

    def _vocabulary(self) -> list[str | None]:
        if self._texts is None:
            texts: list[str | None] = [None] * self.tokens
            with self._lock:
                vocabulary = self._inner.get_vocab(with_added_tokens=True)
            for text, token_id in vocabulary.items():
                if token_id < self.tokens:
                    texts[token_id] = text
            self._texts = texts
        return self._texts


@contextmanager
def without_panics() -> Iterator[None]:
    """A panic of the tokenizers library, which is no Exception, is a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


def _load(document: str) -> tokenizers.Tokenizer:
    try:
        with without_panics():
            inner = tokenizers.Tokenizer.from_str(document)
    except Exception as error:  # the library raises a bare Exception
        raise IntegrityError(f"tokenizer.json is not valid ({error}): export the model again") from error
    inner.no_truncation()
    inner.no_padding()
    return inner


def _state(component: Any) -> dict[str, Any]:
    state: dict[str, Any] = {} if component is None else json.loads(component.__getstate__())
    return state


def _replace_first_prefix(state: dict[str, Any]) -> bool:
    """Turn the prefix of the first word off in a pre-tokenizer's state; False if there was none."""
    found = state.get("prepend_scheme") == "first"
    if found:
        state["prepend_scheme"] = "never"
    for part in state.get("pretokenizers", ()):
        found |= _replace_first_prefix(part)
    return found


def _byte_characters() -> dict[str, int]:
    """GPT-2's writing of bytes as characters: printable ones stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class _Decoder:
    """What a tokenizer.json's decoder makes of a single token: a table or a few replacements."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._byte_characters: dict[str, int] | None = None
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        state = _state(inner.decoder)
        steps = state.get("decoders", []) if state.get("type") == "Sequence" else [state]
        for step in steps:
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_characters = _byte_characters()
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                self._replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": str(replacement)}:
                self._replacements.append((replacement, " "))
                self.strips_first_space = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.strips_first_space = start == 1
            case _:
                raise UnsupportedModelError(
                    f"tokenizer.json has the decoder {step.get('type', 'none')!r}, whose tokens have no fixed text; "
                    "known ones are ByteLevel, Metaspace, and Replace, ByteFallback, Fuse and Strip in sequence"
                )

    def piece(self, piece: str) -> bytes:
        """Bytes of a token of the model's own vocabulary."""
        if self._byte_characters is not None:
            try:
                return bytes(self._byte_characters[character] for character in piece)
            except KeyError:
                return piece.encode("utf-8")
        spelt = _BYTE.fullmatch(piece) if self._byte_fallback else None
        return bytes.fromhex(spelt[1]) if spelt else self.added(piece)

    def added(self, content: str) -> bytes:
        """Bytes of a token that is written as it is."""
        for pattern, replacement in self._replacements:
            content = content.replace(pattern, replacement)
        return content.encode("utf-8")
