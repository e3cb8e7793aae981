"""Weights from a Hugging Face folder with safetensors files, single or sharded."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import ModelConfig, config_from_json
from specrun.export.families import check_tensors
from specrun.export.gguf_blocks import Blocks
from specrun.export.weights import FLOAT_SIZES, map_bytes, to_float32
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError
from specrun.models_cache.integrity import check_weights_folder
from specrun.models_cache.strictjson import StrictJsonError, parse_object

_MAX_HEADER = 100_000_000  # the limit of the safetensors format itself
_INERT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte offset in the file
    end: int


class SafetensorsWeights:
    """The weights of a folder; files are mapped into memory and tensors converted one at a time.

    `names`, `tensor` and `blocks` are those of `Weights`; `blocks` is always None.
    Raises IntegrityError when a file is missing, truncated or a Git LFS pointer, UnsupportedModelError for tensors
    or types that the model's family does not account for.
    """

    def __init__(self, folder: Path) -> None:
        self.config: ModelConfig = config_from_json(folder)
        self.files: dict[str, Path] = {"config.json": folder / "config.json"}
        self._entries: dict[str, Entry] = {}
        if (folder / _INDEX).is_file():
            self.files[_INDEX] = folder / _INDEX
        for file in _weight_files(folder):
            self.files[file] = folder / file
            entries = read_header(folder / file)
            if doubled := [name for name in entries if name in self._entries]:
                raise IntegrityError(f"{doubled[0]} is in both {self._entries[doubled[0]].file} and {file}.")
            self._entries |= entries
        self._drop_inert()
        check_tensors(self.config, {name: entry.shape for name, entry in self._entries.items()}, folder.name)
        for name, entry in self._entries.items():
            if entry.dtype not in FLOAT_SIZES:
                raise UnsupportedModelError(
                    f"{name} is stored as {entry.dtype}; specrun reads {', '.join(FLOAT_SIZES)}."
                )

    def names(self) -> frozenset[str]:
        """Every tensor that `tensor` gives."""
        return frozenset(self._entries)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32. Raises KeyError for an unknown name."""
        entry = self._entries[name]
        return to_float32(self._raw(entry), entry.dtype, entry.shape)

    def blocks(self, name: str) -> Blocks | None:
        """None: safetensors hold floats. Raises KeyError for an unknown name."""
        self._entries[name]
        return None

    def _raw(self, entry: Entry) -> NDArray[np.uint8]:
        return map_bytes(self.files[entry.file], entry.start, entry.end - entry.start)

    def _drop_inert(self) -> None:
        self._entries = {name: entry for name, entry in self._entries.items() if not _INERT.fullmatch(name)}
        head, embedding = self._entries.get(_HEAD), self._entries.get(_EMBEDDING)
        if not self.config.tied_head or head is None or embedding is None:
            return
        left, right = self._raw(head), self._raw(embedding)
        same = head.dtype == embedding.dtype and left.size == right.size
        starts = range(0, left.size if same else 0, _COMPARED_BYTES)
        if not same or not all(
            np.array_equal(left[start : start + _COMPARED_BYTES], right[start : start + _COMPARED_BYTES])
            for start in starts
        ):
            raise UnsupportedModelError(
                f"config.json ties the head to the embedding, but {_HEAD} differs from {_EMBEDDING}; "
                "set tie_word_embeddings to false if the head is meant."
            )
        del self._entries[_HEAD]


def _weight_files(folder: Path) -> tuple[str, ...]:
    names = check_weights_folder(folder)
    # Without an index, files beside model.safetensors (an adapter, the vendor's own layout) are other models.
    return (_SINGLE,) if _SINGLE in names and not (folder / _INDEX).is_file() else names


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, each checked to lie inside it."""
    length = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > min(length - 8, _MAX_HEADER):
            raise IntegrityError(f"{path.name} ends inside its header ({length} bytes); fetch it again.")
        try:
            header = parse_object(file.read(size).decode("utf-8"))
        except (UnicodeDecodeError, StrictJsonError) as error:
            raise IntegrityError(f"The header of {path.name} is not valid ({error}); fetch it again.") from None
    header.pop("__metadata__", None)
    return {name: _entry(path.name, name, item, 8 + size, length) for name, item in header.items()}


def _entry(file: str, name: str, item: Any, data: int, length: int) -> Entry:
    try:
        dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        numbers = all(type(number) is int and number >= 0 for number in (*shape, start, end))
        whole = isinstance(dtype, str) and numbers and start <= end
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise IntegrityError(f"{file} describes {name} wrongly in its header; fetch it again.")
    if data + end > length:
        raise IntegrityError(f"{file} is truncated: {name} ends at byte {data + end}, the file at {length}.")
    if dtype in FLOAT_SIZES and end - start != math.prod(shape) * FLOAT_SIZES[dtype]:
        raise IntegrityError(f"{file} gives {name} {end - start} bytes, which is not {dtype} {list(shape)}.")
    return Entry(file, dtype, shape, data + start, data + end)
