"""The tokenizer in a GGUF file's metadata (`tokenizer.ggml.*`). The reference for its meaning is llama.cpp."""

from __future__ import annotations

import re
from typing import Any, Protocol

from specrun.export.tokenizer_build import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNUSED,
    USER_DEFINED,
    PreTokenizer,
    SentencePieceOptions,
    Vocabulary,
    byte_level_json,
    sentencepiece_bpe_json,
    unigram_json,
)
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError
from specrun.models_cache.manifest import SpecialIds


class MetadataReader(Protocol):
    """What is used of `gguf.GGUFReader`: `fields`, a mapping from key to something with `contents()`."""

    @property
    def fields(self) -> Any: ...


# Tokens that end a text wherever they occur, by their text.
_END_TEXTS = frozenset(
    """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|>
    <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> [e~[
    <｜end▁of▁sentence｜>
    """.split()  # noqa: SIM905 (a list of quoted strings would hide the marks among the quotes)
)
# Tokens that separate files and fill gaps in code models: nothing of the answer comes after them.
_FILE_TEXTS = frozenset(
    """
    <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
    """.split()  # noqa: SIM905
)
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def gguf_tokenizer(reader: MetadataReader) -> tuple[str, str | None, SpecialIds, int]:
    """tokenizer.json, chat template, special ids and the number of real ids of a GGUF file.

    Tokenizer models: `gpt2` (byte-level BPE, with a pre-tokenizer of PRE_TOKENIZERS), `llama` (SentencePiece BPE) and
    `t5` (unigram). Ids at the end that only pad the vocabulary ("[PAD151665]") are not real ids.
    As in llama.cpp, no Unicode normalisation is applied to byte-level vocabularies.

    Raises UnsupportedModelError for another tokenizer model, an unknown pre-tokenizer, or none named in the file.
    """
    metadata = _Metadata(reader)
    model = metadata.get("model", None)
    if model is None:
        raise UnsupportedModelError(
            "the GGUF file has no tokenizer (tokenizer.ggml.model): use a file that carries one"
        )
    if model not in ("gpt2", "llama", "t5"):
        raise UnsupportedModelError(
            f"the GGUF file has the tokenizer model {model!r}; known ones are gpt2, llama and t5: "
            "export from the original safetensors folder instead"
        )
    pre = _pre_tokenizer(metadata.get("pre", None)) if model == "gpt2" else None
    vocabulary = _vocabulary(metadata, scored=model != "gpt2")
    if pre is not None:
        document = byte_level_json(vocabulary, _merges(metadata), pre)
    else:
        charsmap = metadata.get("precompiled_charsmap", ()) if model == "t5" else ()
        options = SentencePieceOptions(
            space_prefix=bool(metadata.get("add_space_prefix", model == "llama")),
            collapse_spaces=model == "t5" and bool(metadata.get("remove_extra_whitespaces", False)),
            charsmap=bytes(int(value) & 0xFF for value in charsmap),
        )
        document = (sentencepiece_bpe_json if model == "llama" else unigram_json)(vocabulary, options)
    special_ids = _special_ids(metadata, vocabulary, model, pre)
    return document, metadata.chat_template(), special_ids, len(vocabulary.texts)


class _Metadata:
    def __init__(self, reader: MetadataReader) -> None:
        self._fields = reader.fields

    def get(self, key: str, default: Any) -> Any:
        field = self._fields.get(f"tokenizer.ggml.{key}")
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise IntegrityError(f"the GGUF file lacks tokenizer.ggml.{key}: convert the model again")
        return value

    def chat_template(self) -> str | None:
        field = self._fields.get("tokenizer.chat_template")
        return None if field is None else str(field.contents())


def _pre_tokenizer(name: str | None) -> PreTokenizer:
    known = ", ".join(PRE_TOKENIZERS)
    if name is None:
        raise UnsupportedModelError(
            "the GGUF file does not name its pre-tokenizer (no tokenizer.ggml.pre), so text would be split wrongly: "
            f"convert the model again with a current converter; known pre-tokenizers are {known}"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF file has the pre-tokenizer {name!r}; known ones are {known}: "
            "export from the original safetensors folder instead"
        )
    return PRE_TOKENIZERS[name]


def _vocabulary(metadata: _Metadata, *, scored: bool) -> Vocabulary:
    texts = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(metadata.require("tokens"))]
    types = [int(kind) for kind in metadata.get("token_type", [NORMAL] * len(texts))]
    scores = [float(score) for score in metadata.require("scores")] if scored else [0.0] * len(texts)
    if not len(texts) == len(types) == len(scores):
        raise IntegrityError(
            f"the GGUF file has {len(texts)} tokens but {len(types)} types and {len(scores)} scores: "
            "convert the model again"
        )
    # Files exist that call their end-of-text token user defined. One of type normal is taken at its word: Qwen2 has an
    # ordinary token "</s>", which is text.
    types = [
        CONTROL if text in _END_TEXTS and kind == USER_DEFINED else kind
        for text, kind in zip(texts, types, strict=True)
    ]
    count = len(texts)
    while count and (types[count - 1] == UNUSED or texts[count - 1] == f"[PAD{count - 1}]"):
        count -= 1
    if scored and BYTE not in types:
        types = [
            BYTE if re.fullmatch(r"<0x[0-9A-F]{2}>", text) else kind for text, kind in zip(texts, types, strict=True)
        ]
    return Vocabulary(texts[:count], types[:count], scores[:count])


def _merges(metadata: _Metadata) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.require("merges"):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise IntegrityError(f"the GGUF file has the merge {merge!r}, which is not a pair: convert the model again")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _special_ids(metadata: _Metadata, vocabulary: Vocabulary, model: str, pre: PreTokenizer | None) -> SpecialIds:
    count = len(vocabulary.texts)

    def named(key: str, default: int | None = None) -> int | None:
        value = metadata.get(f"{key}_token_id", default)
        return int(value) if value is not None and 0 <= int(value) < count else None

    bos = named("bos", 1 if model == "llama" else None)
    eos = named("eos", {"llama": 2, "t5": 1}.get(model))
    add_bos = bool(metadata.get("add_bos_token", model == "llama" or (pre is not None and pre.add_bos)))
    return SpecialIds(
        bos=bos,
        eos=_end_ids(vocabulary, eos, [named(key) for key in _END_KEYS]),
        pad=named("padding"),
        add_bos=add_bos and bos is not None,
    )


def _end_ids(vocabulary: Vocabulary, eos: int | None, named: list[int | None]) -> tuple[int, ...]:
    """Every id that ends a text: the file's EOS first, then the others in ascending order.

    The rule is llama.cpp's: the ids that the file names (EOS, EOT, EOM and the file separators of code models), and
    every token whose text is a known end mark, but here only if its type is control or user defined. Two exceptions:
    `<|end|>` only closes a part of a message where `<|return|>` and `<|call|>`, or `<|calls|>` and `<|flush|>`, exist;
    `</s>` does not end a text where `<|tool_response>` exists.
    """
    found = {token_id for token_id in named if token_id is not None}
    by_text = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind in (CONTROL, USER_DEFINED) and text in _END_TEXTS | _FILE_TEXTS
    }
    found |= set(by_text.values())
    texts = by_text.keys()
    if {"<|return|>", "<|call|>"} <= texts or ("<|flush|>" in texts and texts & {"<|call|>", "<|calls|>"}):
        found.discard(by_text.get("<|end|>", -1))
    if "<|tool_response>" in texts:
        found.discard(by_text.get("</s>", -1))
    first = () if eos is None else (eos,)
    return first + tuple(sorted(found - set(first)))
