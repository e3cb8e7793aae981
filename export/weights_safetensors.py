"""Weights from a Hugging Face folder with safetensors files, single or sharded."""

from __future__ import annotations

import json
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
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

_ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 100_000_000  # the limit of the safetensors format itself
_INERT = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Entry:
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
        index, shards = _shards(folder)
        if index is not None:
            self.files[index] = folder / index
        self._entries: dict[str, _Entry] = {}
        for shard, promised in shards.items():
            self.files[shard] = folder / shard
            entries = _read_header(folder / shard)
            if lost := [name for name in promised if name not in entries]:
                raise IntegrityError(f"{shard} lacks {lost[0]}, which {index} places there; fetch it again.")
            if doubled := [name for name in entries if name in self._entries]:
                raise IntegrityError(f"{doubled[0]} is in both {self._entries[doubled[0]].file} and {shard}.")
            self._entries |= entries
        self._drop_inert()
        check_tensors(self.config, {name: entry.shape for name, entry in self._entries.items()}, folder.name)
        for name, entry in self._entries.items():
            if entry.dtype not in _ITEM_SIZES:
                raise UnsupportedModelError(
                    f"{name} is stored as {entry.dtype}; specrun reads {', '.join(_ITEM_SIZES)}."
                )

    def names(self) -> frozenset[str]:
        """Every tensor that `tensor` gives."""
        return frozenset(self._entries)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32. Raises KeyError for an unknown name."""
        entry = self._entries[name]
        raw = self._raw(entry)
        if entry.dtype == "BF16":  # the upper half of a float32
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(entry.shape)
        return raw.view("<f4" if entry.dtype == "F32" else "<f2").astype(np.float32).reshape(entry.shape)

    def blocks(self, name: str) -> Blocks | None:
        """None: safetensors hold floats. Raises KeyError for an unknown name."""
        self._entries[name]
        return None

    def _raw(self, entry: _Entry) -> NDArray[np.uint8]:
        size = entry.end - entry.start
        return np.memmap(self.files[entry.file], np.uint8, "r", entry.start, (size,)).view(np.ndarray)

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


def _shards(folder: Path) -> tuple[str | None, dict[str, list[str]]]:
    """The index file, if there is one, and the tensors that it promises by weight file."""
    if (folder / "model.safetensors").exists():
        return None, {"model.safetensors": []}
    index = "model.safetensors.index.json"
    if not (folder / index).exists():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if len(found) == 1:
            return None, {found[0]: []}
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
            raise UnsupportedModelError(f"{folder.name} holds pickled weights, which are never read; use safetensors.")
        raise IntegrityError(f"{folder.name} has no model.safetensors and no {index}; fetch the weights.")
    try:
        weight_map = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
        pairs = sorted((str(shard), str(name)) for name, shard in weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{index} in {folder.name} cannot be read ({error}); fetch it again.") from error
    shards: dict[str, list[str]] = {}
    for shard, name in pairs:
        if Path(shard).name != shard:
            raise IntegrityError(f"{index} names the shard {shard!r}, which is not a plain file name.")
        shards.setdefault(shard, []).append(name)
    if absent := [shard for shard in shards if not (folder / shard).is_file()]:
        raise IntegrityError(f"{folder.name} lacks the shard {', '.join(absent)}; fetch it.")
    return index, shards


def _read_header(path: Path) -> dict[str, _Entry]:
    """The tensors of one file, each checked to lie inside it."""
    length = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise IntegrityError(f"{path.name} is a Git LFS pointer, not the weights; fetch them with git lfs pull.")
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > min(length - 8, _MAX_HEADER):
            raise IntegrityError(f"{path.name} ends inside its header ({length} bytes); fetch it again.")
        try:
            header: Any = json.loads(file.read(size))
        except ValueError as error:
            raise IntegrityError(f"The header of {path.name} is not JSON ({error}); fetch it again.") from error
    if not isinstance(header, dict):
        raise IntegrityError(f"The header of {path.name} is not a JSON object; fetch it again.")
    header.pop("__metadata__", None)
    return {name: _entry(path.name, name, item, 8 + size, length) for name, item in header.items()}


def _entry(file: str, name: str, item: Any, data: int, length: int) -> _Entry:
    try:
        dtype, shape, (start, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, start, end)) and start <= end
    except (KeyError, TypeError, ValueError):
        whole = False
    if not whole:
        raise IntegrityError(f"{file} describes {name} wrongly in its header; fetch it again.")
    if data + end > length:
        raise IntegrityError(f"{file} is truncated: {name} ends at byte {data + end}, the file at {length}.")
    if dtype in _ITEM_SIZES and end - start != math.prod(shape) * _ITEM_SIZES[dtype]:
        raise IntegrityError(f"{file} gives {name} {end - start} bytes, which is not {dtype} {list(shape)}.")
    return _Entry(file, str(dtype), shape, data + start, data + end)
