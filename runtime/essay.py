"""The figures of the essay that specrun began with, each beside what its own formula gives.

The essay's table of speed-ups (phi = 0.1) and its memory figures do not follow from the formulas it names. They stand
here so that nobody plans with them; every right value is computed by `cost_model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from specrun.runtime import cost_model
from specrun.runtime.kv_shape import SHAPES

PHI: Final = 0.1
BATCH: Final = 32
POSITIONS: Final = 2048


@dataclass(frozen=True, slots=True)
class EssaySpeedup:
    """A row of the essay's table: what it prints for S(alpha, K, 0.1), and what the formula gives."""

    alpha: float
    draft_length: int
    printed: float

    @property
    def phi(self) -> float:
        """The cost ratio of every row."""
        return PHI

    @property
    def tokens_per_round(self) -> float:
        """`cost_model.expected_tokens`."""
        return cost_model.expected_tokens(self.alpha, self.draft_length)

    @property
    def speedup(self) -> float:
        """`cost_model.speedup`."""
        return cost_model.speedup(self.alpha, self.draft_length, PHI)


@dataclass(frozen=True, slots=True)
class EssayFigure:
    """Another figure: what the essay prints, the formula that is meant, and its value, as a number and in words."""

    figure: str
    printed: str
    formula: str
    value: float
    right: str


SPEEDUPS: Final = (
    EssaySpeedup(0.5, 2, 1.35),
    EssaySpeedup(0.7, 5, 1.86),
    EssaySpeedup(0.75, 5, 2.03),
    EssaySpeedup(0.9, 8, 2.59),
)


def figures() -> tuple[EssayFigure, ...]:
    """The essay's other figures; the last one is right as it is printed."""
    kv = SHAPES["llama-7b"].kv_bytes(POSITIONS, BATCH)
    naive, dual = cost_model.naive_kv_bytes(kv), cost_model.dual_kv_bytes(kv, kv)
    coverage = cost_model.coverage_bound(0.7, 16)
    saving = cost_model.prefix_saving(768, 512, 16)
    agreement = cost_model.agreement_phi(5)
    return (
        EssayFigure(
            f"KV of LLaMA-7B, {BATCH} x {POSITIONS}, fp16",
            "7.73 (and 16.90) GB",
            "2 x 32 x 4096 x 2 bytes x 65,536",
            kv,
            f"{kv / 1e9:.1f} GB ({kv / 2**30:.0f} GiB)",
        ),
        EssayFigure(
            "the naive scheme for it",
            "O(3 L d b)",
            "3 x 2 L d b x 2 bytes x 2048",
            naive,
            f"{naive / 1e9:.1f} GB; two buffers {dual / 1e9:.1f}",
        ),
        EssayFigure(
            "(1-a) K = (1-a)(K phi + 1)", "phi = 1", "phi = (K-1)/K", agreement, f"phi = {agreement:g} (K = 5)"
        ),
        EssayFigure("best of 16 at p = 0.7", "99.2 %", "1 - (1-p)^N", coverage, f"{coverage:.9f} (99.2 % is N = 4)"),
        EssayFigure(
            "prefix of 768, 512 each, N = 16", "56.25 %", "(N-1) p / (N (p+l))", saving, f"{100 * saving:.2f} % (right)"
        ),
    )
