"""One view of a model's weights, whatever file holds them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import ModelConfig
from specrun.export.gguf_blocks import Blocks
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError, SourceError

__all__ = ["FLOAT_SIZES", "Blocks", "Weights", "map_bytes", "open_weights", "to_float32"]

FLOAT_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


class Weights(Protocol):
    """Weights by their canonical Hugging Face names ("model.layers.0.self_attn.q_proj.weight").

    Projections are [out, in] and the rows of q and k stand in the order of Hugging Face, whatever the file does.
    A GGUF file may add "rope_freqs.weight", the divisors of the rotary frequencies.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def files(self) -> dict[str, Path]:
        """File name to path, of every file that holds weights or configuration."""
        ...

    def names(self) -> frozenset[str]:
        """Every tensor that `tensor` gives. A tied head has no "lm_head.weight"."""
        ...

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor as float32, dequantised. Raises KeyError for a name not in `names()`."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """The exact quantised form of a GGUF tensor, or None where the file holds floats."""
        ...


def open_weights(path: Path) -> Weights:
    """Open a GGUF file (or a folder that holds one) or a Hugging Face folder with safetensors; only headers are read.

    Raises ModelNotFoundError when there is nothing there, SourceError when it cannot be read, IntegrityError for
    truncated or missing files, UnsupportedModelError for a model, or a tensor, that specrun does not know.
    """
    try:
        return _open(path)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}.") from error


def _open(path: Path) -> Weights:
    # Here, since both modules need the helpers below.
    from specrun.export.weights_gguf import GGUFWeights
    from specrun.export.weights_safetensors import SafetensorsWeights

    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1 and not (path / "config.json").exists():
            return GGUFWeights(files[0])
        return SafetensorsWeights(path)
    if path.is_file():
        if path.suffix == ".safetensors":
            return SafetensorsWeights(path.parent)
        return GGUFWeights(path)
    raise ModelNotFoundError(f"There is no model at {path}; give a .gguf file or a folder with safetensors.")


def map_bytes(path: Path, offset: int, size: int) -> NDArray[np.uint8]:
    """`size` bytes of a file as a read-only view, not yet read.

    Raises IntegrityError when the file no longer has them.
    """
    try:
        return np.memmap(path, np.uint8, "r", offset, (size,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} changed while it was being read ({error}).") from error


def to_float32(raw: NDArray[np.uint8], type_name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A copy of little-endian values of a type of `FLOAT_SIZES`, as float32 of `shape`."""
    if raw.size != math.prod(shape) * FLOAT_SIZES[type_name]:
        raise ValueError(f"{raw.size} bytes are not {type_name} {list(shape)}")
    if type_name == "BF16":  # the upper half of a float32
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(shape)
    return raw.view("<f4" if type_name == "F32" else "<f2").astype(np.float32).reshape(shape)
