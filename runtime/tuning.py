"""What `specrun tune` measured of a bundle on this machine, kept beside its calibration, and where requests begin."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.layout import Bundle
from specrun.runtime.calibration import kept_path, write_kept
from specrun.runtime.device import CPU, Device
from specrun.runtime.head_estimate import Learnt
from specrun.runtime.proposers.ngram import PRIORS, Cell
from specrun.runtime.request import METHODS

VERSION: Final = 2
_NOISE: Final = 0.95  # of two methods whose times differ by less, another run may find the other one faster
_MOST: Final = 1e12  # of any figure
_INSTANT: Final = 1e-9  # seconds that a token takes at least


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """A method over the prompts: tokens and seconds of decoding a token, and what its rounds were like.

    ratio: exact plain decoding's time a token / the method's. draft_ms and verify_ms: of a round. acceptance: by
    depth, the chance that the head's best candidate stands if those before it do; empty for other methods.
    """

    tokens: int
    seconds_per_token: float
    ratio: float
    mean_accepted_tokens: float
    acceptance_rate: float
    draft_ms: float
    verify_ms: float
    acceptance: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Tuning:
    """Figures of each method, and the estimates that their requests ended with.

    beyond: seconds that a token of text adds to each run behind it. ngram: chances of copied tokens, as
    `AcceptanceEstimate` takes them. heads: what was learnt of each head, by the digest of its speculator. lifts: what
    asking the head of a method beside n-grams brought (`Lift`).
    """

    methods: dict[str, MethodFigures]
    beyond: float = 0.0
    ngram: dict[Cell, float] = field(default_factory=dict)
    heads: dict[str, Learnt] = field(default_factory=dict)
    prompts: int = 0
    lifts: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The fastest method."""
        return min(self.methods, key=lambda method: self.methods[method].seconds_per_token)

    def fastest_of(self, methods: Sequence[str]) -> str | None:
        """The first one of these that is the fastest but for noise; None if none was measured."""
        seconds = {method: self.methods[method].seconds_per_token for method in methods if method in self.methods}
        return next((method for method in seconds if _NOISE * seconds[method] <= min(seconds.values())), None)


UNTUNED: Final = Tuning({})


def tuning_path(bundle: Bundle, threads: int, device: Device = CPU) -> Path:
    """Where the tuning of a bundle on this machine is kept."""
    return kept_path("tuning", VERSION, bundle, threads, device)


def load_tuning(bundle: Bundle, threads: int, device: Device = CPU) -> Tuning:
    """The kept tuning; `UNTUNED` where there is none, or one that cannot be read."""
    try:
        return _read(json.loads(tuning_path(bundle, threads, device).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return UNTUNED


def save_tuning(bundle: Bundle, threads: int, tuning: Tuning, device: Device = CPU) -> Path:
    """Keep a tuning; returns where. Raises CacheError if the cache cannot be written."""
    raw = asdict(tuning)
    raw["ngram"] = [[length, agreement, chance] for (length, agreement), chance in tuning.ngram.items()]
    path = tuning_path(bundle, threads, device)
    write_kept(path, raw)
    return path


def _read(raw: Mapping[str, Any]) -> Tuning:
    """Raises ValueError, KeyError, TypeError or OverflowError for anything that `save_tuning` does not write."""
    methods = {}
    for name, figures in raw["methods"].items():
        acceptance = tuple(_number(chance, 1.0) for chance in figures.pop("acceptance"))
        tokens, seconds = _count(figures.pop("tokens")), _number(figures.pop("seconds_per_token"), least=_INSTANT)
        if name not in METHODS:
            raise ValueError(f"there is no method {name!r}")
        rest = {key: _number(value) for key, value in figures.items()}
        methods[name] = MethodFigures(tokens, seconds, **rest, acceptance=acceptance)
    chances = {(length, agreement): _number(chance, 1.0) for length, agreement, chance in raw["ngram"]}
    ngram = {cell: chances[cell] for cell in PRIORS} if chances else {}
    heads = {str(digest): Learnt.read(learnt) for digest, learnt in raw["heads"].items()}
    lifts = {str(method): tuple(_number(lift, 10.0) for lift in values) for method, values in raw["lifts"].items()}
    return Tuning(methods, _number(raw["beyond"]), ngram, heads, _count(raw["prompts"]), lifts)


def _number(value: Any, most: float = _MOST, *, least: float = 0.0) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError("this is no such number")
    return float(value)


def _count(value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError("this is no whole number")
    return int(_number(value))
