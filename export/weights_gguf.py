"""Weights from a GGUF file (versions 2 and 3, little-endian)."""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from specrun.export.config import ModelConfig, config_from_gguf
from specrun.export.families import check_tensors
from specrun.export.gguf_blocks import BLOCK_TYPES, Blocks, decode_blocks
from specrun.export.rotary import ROPE_FACTORS
from specrun.export.weights import FLOAT_SIZES, map_bytes, to_float32
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError
from specrun.models_cache.integrity import check_gguf

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` has the outermost dimension first; `type_name` is ggml's ("Q4_K", "F32")."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    size: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a GGUF file: metadata as Python values, tensors by their GGUF names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, outermost dimension first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


class GGUFWeights:
    """The weights of a GGUF file; it is mapped into memory, and tensors are decoded one at a time.

    `names`, `tensor` and `blocks` are those of `Weights`; `header` has the metadata (the tokenizer is in there).
    Raises IntegrityError for a truncated or malformed file, naming the tensor, UnsupportedModelError for tensors or
    types that specrun does not know.
    """

    def __init__(self, path: Path) -> None:
        self.header = read_gguf(path)
        self.files: dict[str, Path] = {path.name: path}
        if self.header.metadata.get("split.count", 1) != 1:
            raise UnsupportedModelError(f"{path.name} is one part of a split GGUF file; join the parts first.")
        self.config: ModelConfig = config_from_gguf(self.header)
        self._tensors: dict[str, GGUFTensor] = {}
        for name, tensor in self.header.tensors.items():
            if tensor.type_name not in FLOAT_SIZES and tensor.type_name not in BLOCK_TYPES:
                known = ", ".join([*FLOAT_SIZES, *BLOCK_TYPES])
                raise UnsupportedModelError(f"{name} is stored as {tensor.type_name}; specrun reads {known}.")
            canonical = canonical_name(name)
            if canonical in self._tensors:
                raise IntegrityError(f"{path.name} holds {name} under two names.")
            self._tensors[canonical] = tensor
        check_tensors(
            self.config,
            {name: tensor.shape for name, tensor in self._tensors.items() if name != ROPE_FACTORS},
            path.name,
        )

    def names(self) -> frozenset[str]:
        """Every tensor that `tensor` gives."""
        return frozenset(self._tensors)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, dequantised. Raises KeyError for an unknown name."""
        tensor = self._tensors[name]
        raw = self._rows(name)
        if tensor.type_name in FLOAT_SIZES:
            return to_float32(raw.ravel(), tensor.type_name, tensor.shape)
        values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType[tensor.type_name])
        return values.reshape(tensor.shape)

    def blocks(self, name: str) -> Blocks | None:
        """The exact quantised form, or None for a float tensor. Raises KeyError for an unknown name."""
        tensor = self._tensors[name]
        if tensor.type_name in FLOAT_SIZES:
            return None
        blocks = decode_blocks(tensor.type_name, self._rows(name))
        for part in (blocks.scales, blocks.offsets):
            if part is not None and not np.isfinite(part).all():
                raise IntegrityError(f"{tensor.name} has a scale that is not finite; fetch the file again.")
        return blocks

    def _rows(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, uint8 [rows, bytes per row], in the row order of Hugging Face."""
        tensor = self._tensors[name]
        rows = map_bytes(self.header.path, tensor.offset, tensor.size).reshape(tensor.shape[0], -1)
        part = name.rsplit(".", 2)[-2]
        if not self.config.family.gguf_permuted_qk or part not in ("q_proj", "k_proj"):
            return rows
        # llama.cpp rotates neighbours, Hugging Face halves: [heads, d / 2, 2] becomes [heads, 2, d / 2].
        heads = self.config.heads if part == "q_proj" else self.config.kv_heads
        order = np.arange(rows.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
        return rows[order]


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one stays as it is.

    >>> canonical_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return name
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file, without its weights.

    Raises IntegrityError when it is not a GGUF file, or ends before its header or one of its tensors does.
    """
    check_gguf(path)
    length = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(data, path.name)
        _, version, tensor_count, key_count = struct.unpack("<4sIQQ", reader.take(24))
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{path.name} is of GGUF version {version}; specrun reads 2 and 3, little-endian."
            )
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            reader.place = f"its metadata, after {list(metadata)[-1] if metadata else 'the start'}"
            key = reader.string()
            if key in metadata:
                raise IntegrityError(f"{path.name} has the metadata key {key} twice.")
            metadata[key] = reader.value(reader.scalar("I"))
        described: list[tuple[str, int, tuple[int, ...], int]] = []
        for _ in range(tensor_count):
            reader.place = f"its list of tensors, after {described[-1][0] if described else 'the start'}"
            name, dimensions = reader.string(), reader.scalar("I")
            if dimensions > _MAX_DIMENSIONS:
                raise IntegrityError(
                    f"{path.name} gives {name} {dimensions} dimensions; at most {_MAX_DIMENSIONS} exist."
                )
            inner_first = tuple(reader.scalar("Q") for _ in range(dimensions))
            described.append((name, reader.scalar("I"), inner_first[::-1], reader.scalar("Q")))
        start = reader.position
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise IntegrityError(f"{path.name} sets general.alignment to {alignment!r}, which is not a power of two.")
    start += -start % alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, type_id, shape, offset in sorted(described, key=lambda item: item[3]):
        if name in tensors:
            raise IntegrityError(f"{path.name} has the tensor {name} twice.")
        tensors[name] = _tensor(path.name, name, type_id, shape, start + offset, length)
    return GGUFFile(path, metadata, tensors)


def _tensor(file: str, name: str, type_id: int, shape: tuple[int, ...], offset: int, length: int) -> GGUFTensor:
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise UnsupportedModelError(f"{name} in {file} has the unknown tensor type {type_id}.") from None
    block, block_size = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    if not shape or elements == 0 or shape[-1] % block:
        raise IntegrityError(f"{name} in {file} has the shape {list(shape)}, which {kind.name} cannot have.")
    size = elements // block * block_size
    if offset + size > length:
        raise IntegrityError(f"{file} is truncated: {name} ends at byte {offset + size}, the file at {length}.")
    return GGUFTensor(name, kind.name, shape, offset, size)


class _Reader:
    """Reads the header front to back; every length is checked against the file before anything is allocated."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self.position = data, name, 0
        self.place = "its header"

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self._data):
            raise IntegrityError(f"{self._name} is truncated: it ends inside {self.place}; fetch it again.")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise IntegrityError(f"{self._name} has text that is not UTF-8 in {self.place}.") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise IntegrityError(f"{self._name} has a value of the unknown type {kind} in {self.place}.")
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return [self.string() for _ in range(count)]
        if item not in _SCALARS:
            raise IntegrityError(f"{self._name} has an array of the unknown type {item} in {self.place}.")
        dtype = np.dtype(f"<{_SCALARS[item]}") if item != 7 else np.dtype(np.bool_)
        return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
