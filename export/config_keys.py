"""Typed reads of a model's configuration, and its rotary parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specrun.models_cache.errors import IntegrityError, UnsupportedModelError
from specrun.models_cache.strictjson import StrictJsonError, parse_object

RopeKind = Literal["default", "linear", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary frequencies: theta ** (-2 i / head_dim), scaled by `kind`. `linear` divides all by `factor`.

    `llama3` divides the low ones by `factor` and blends between the wavelengths `original_context` over
    `low_frequency_factor` and over `high_frequency_factor`.
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context: int = 0


class Keys:
    """Typed reads of a mapping, with errors that name the key and what it holds."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw, self._source, self._prefix = raw, source, prefix

    def _get(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None:
            raise UnsupportedModelError(f"The key {self._prefix}{key} is missing from {self._source}.")
        return default

    def _wrong(self, key: str, wanted: str, value: object) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._prefix}{key} in {self._source} must be {wanted}, and is {value!r}.")

    def integer(self, key: str, default: int | None = None, least: int = 0, limit: int = 2**31) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limit:
            raise self._wrong(key, f"a whole number from {least} to {limit}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def items(self, key: str, length: int, allowed: tuple[object, ...]) -> list[Any] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length or any(item not in allowed for item in value):
            raise self._wrong(key, f"a list of at least {length} of {allowed}", value)
        return value[:length]


def rope_from_json(keys: Keys, default_theta: float, context: int) -> RopeConfig:
    """The rotary parameters of a config.json, of transformers 4 or 5. Raises UnsupportedModelError."""
    # transformers 5 keeps everything in rope_parameters; before, rope_theta stood beside an optional rope_scaling.
    raw = keys.raw.get("rope_scaling") or keys.raw.get("rope_parameters") or {}
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise UnsupportedModelError("Rotary parameters that differ between layer types are not supported.")
    rope = Keys(raw, "the rope parameters of config.json")
    theta = rope.number("rope_theta", keys.number("rope_theta", default_theta))
    for source in (keys, rope):
        if (partial := source.number("partial_rotary_factor", 1.0)) != 1.0:
            raise UnsupportedModelError(f"A partial_rotary_factor of {partial} is not supported; it must be 1.")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", rope.number("factor"))
    if kind == "llama3":
        scaled = RopeConfig(
            theta,
            "llama3",
            rope.number("factor"),
            rope.number("low_freq_factor"),
            rope.number("high_freq_factor"),
            keys.integer("original_max_position_embeddings", rope.integer("original_max_position_embeddings", context)),
        )
        if scaled.low_frequency_factor >= scaled.high_frequency_factor or not scaled.original_context:
            raise UnsupportedModelError("The llama3 rope parameters need low_freq_factor < high_freq_factor.")
        return scaled
    raise UnsupportedModelError(f"The rope type {kind!r} is not supported; specrun knows default, linear and llama3.")


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises IntegrityError when the file is missing or is not JSON."""
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IntegrityError(f"{path.parent} has no {path.name}; it is not a complete model folder.") from None
    except (UnicodeDecodeError, StrictJsonError) as error:
        raise IntegrityError(f"{path} is not valid ({error}); fetch it again.") from None
