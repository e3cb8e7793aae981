"""One view of a model's weights, whatever file holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import ModelConfig
from specrun.export.gguf_blocks import Blocks
from specrun.models_cache.errors import ModelNotFoundError

__all__ = ["Blocks", "Weights", "open_weights"]


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

    Raises ModelNotFoundError when there is nothing there, IntegrityError for truncated or missing files,
    UnsupportedModelError for a model, or a tensor, that specrun does not know.
    """
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
