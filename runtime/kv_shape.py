"""What decides how much memory keys and values take: of a known model, of a bundle, of a speculator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from specrun.models_cache.errors import UsageError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.speculator import InstalledSpeculator
from specrun.runtime.cost_model import kv_bytes

FP16_BYTES: Final = 2


def value_bytes(dtype: str) -> int:
    """Bytes of a key's or value's number, by the type's name in a manifest."""
    return 4 if dtype == "float32" else FP16_BYTES


@dataclass(frozen=True, slots=True)
class KVShape:
    """`layers` with keys and values of `kv_heads` x `head_dim` values at each position."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    bytes_per_value: int = FP16_BYTES

    def kv_bytes(self, positions: int, batch: int = 1) -> int:
        """Bytes for `batch` texts of so many positions."""
        return kv_bytes(self.layers, self.kv_heads, self.head_dim, positions, batch, self.bytes_per_value)

    @classmethod
    def parse(cls, text: str) -> KVShape:
        """A name of `SHAPES`, or LAYERSxKV_HEADSxHEAD_DIM, of fp16 values. Raises UsageError."""
        if text.lower() in SHAPES:
            return SHAPES[text.lower()]
        found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})x([1-9]\d{0,5})", text)
        if found is None:
            raise UsageError(
                f"{text!r} is no shape: give {', '.join(SHAPES)}, or layers x KV heads x head size such as 32x8x128."
            )
        return cls(text, *map(int, found.groups()))

    @classmethod
    def of_bundle(cls, bundle: Bundle) -> KVShape:
        """The buffers of a bundle."""
        manifest, sizes = bundle.manifest, bundle.manifest.sizes
        value = value_bytes(manifest.kv.dtype)
        return cls(manifest.name, sizes.layers, sizes.kv_heads, sizes.head_dim, value)

    @classmethod
    def of_drafting(cls, drafting: Bundle | InstalledSpeculator | None, bundle: Bundle) -> KVShape | None:
        """The buffers of what drafts for `bundle`, None for nothing; those of Medusa's heads have no layers."""
        if drafting is None or isinstance(drafting, Bundle):
            return cls.of_bundle(drafting) if drafting is not None else None
        sizes = drafting.manifest.sizes
        value = value_bytes(bundle.manifest.kv.dtype)
        return cls(drafting.name, sizes.layers, sizes.kv_heads, sizes.head_dim, value)


SHAPES: Final = {shape.name: shape for shape in (KVShape("llama-7b", layers=32, kv_heads=32, head_dim=128),)}
"""Models that are known by name: LLaMA-7B (Touvron et al. 2023)."""
