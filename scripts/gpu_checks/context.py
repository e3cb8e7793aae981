"""What every part is told: the device, the models, and how much to measure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is measured.

    precisions: of the device's graphs; the speed of the first `timed` is measured, all other times of the first alone.
    big: the shape of the random model, a key of `random_model.SHAPES`; big_draft: of what drafts for it. kv_batch,
    kv_positions: whose KV buffers are measured.
    """

    precisions: tuple[str, ...]
    timed: int
    prompts: int
    max_tokens: int
    repeats: int
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    pinned: tuple[int, ...]
    methods: tuple[str, ...]
    verify_tokens: int
    verify_lengths: tuple[int, ...]
    verify_batches: tuple[int, ...]
    big: str
    big_draft: str
    big_widths: tuple[int, ...]
    big_batches: tuple[int, ...]
    acceptances: tuple[float, ...]
    draft_lengths: tuple[int, ...]
    synthetic_tokens: int
    kv_batch: int
    kv_positions: int
    requests: int
    samples: int


METHODS: Final = (
    "none",
    "ngram",
    "lookahead",
    "medusa",
    "eagle",
    "draft",
    "medusa+ngram",
    "eagle+ngram",
    "draft+ngram",
    "auto",
)

FULL: Final = Amounts(
    precisions=("fp16", "int4", "int8", "bf16"),
    timed=2,
    prompts=4,
    max_tokens=96,
    repeats=2,
    widths=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 48, 64, 128, 256, 512),
    batches=(1, 2, 4, 8, 16, 32),
    pinned=(1, 2, 3, 4, 5, 8, 9, 16, 17),
    methods=METHODS,
    verify_tokens=32,
    verify_lengths=(4,),
    verify_batches=(1, 3),
    big="llama-7b",
    big_draft="llama-68m",
    big_widths=(1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64, 128, 256, 512),
    big_batches=(1, 2, 4, 8, 16, 32),
    acceptances=(0.5, 0.7, 0.8, 0.9),
    draft_lengths=(2, 5, 8),
    synthetic_tokens=96,
    kv_batch=32,
    kv_positions=2048,
    requests=48,
    samples=16,
)
"""For one NVIDIA GPU."""

ON_CPU: Final = replace(
    FULL,
    precisions=("int8", "fp32", "int4"),
    prompts=3,
    repeats=1,
    timed=3,
    widths=(1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 64),
    batches=(1, 2, 4, 8),
    big="small",
    big_draft="small-draft",
    big_widths=(1, 2, 3, 4, 5, 8, 9, 16, 32),
    big_batches=(1, 4),
    requests=8,
    samples=4,
)
"""For a processor: the same with the real model, and a random model of a size that it can run."""

DRY: Final = replace(
    ON_CPU,
    precisions=("int8", "fp32"),
    prompts=1,
    max_tokens=12,
    widths=(1, 2, 5),
    batches=(1, 2),
    pinned=(1, 2, 5),
    methods=("none", "ngram", "medusa", "eagle", "draft", "auto"),
    verify_tokens=8,
    verify_batches=(1,),
    big="tiny",
    big_draft="tiny-draft",
    big_widths=(1, 2, 5),
    big_batches=(1, 2),
    acceptances=(0.5, 0.9),
    draft_lengths=(2,),
    synthetic_tokens=12,
    kv_batch=4,
    kv_positions=256,
    requests=3,
    samples=3,
)
"""A walk through every part with a tiny model."""


@dataclass(frozen=True, slots=True)
class Context:
    """device: "cuda" or "cpu". source: the weights of the model. work: a folder of this check's own.

    wheels: those to be installed below `work`. threads: of the processor, None as the runtime chooses.
    """

    device: str
    dry_run: bool
    source: Path
    work: Path
    wheels: tuple[Path, ...]
    threads: int | None
    amounts: Amounts

    @property
    def site(self) -> Path:
        """Where the wheels are unpacked."""
        return self.work / "site"

    @property
    def precision(self) -> str:
        """Of the graphs that are timed."""
        return self.amounts.precisions[0]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Context:
        """The context that `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        amounts: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw["amounts"].items()
        }
        raw |= {name: Path(raw[name]) for name in ("source", "work")}
        raw |= {"amounts": Amounts(**amounts), "wheels": tuple(map(Path, raw["wheels"]))}
        return cls(**raw)
