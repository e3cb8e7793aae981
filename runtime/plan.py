"""What `specrun plan` shows: the cost model applied to a set of alphas and draft lengths, to memory, to samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.models_cache.errors import UsageError
from specrun.runtime import cost_model
from specrun.runtime.kv_shape import KVShape
from specrun.runtime.measured_costs import DraftCosts, MeasuredCosts

DEFAULT_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
DEFAULT_PHI = 0.1
MOST = 64  # K up to which the best one is looked for where no model sets the limit
FORMULA = "S = (1 - alpha^(K+1)) / ((1 - alpha)(K phi + 1))"
MEASURED_FORMULA = "S = (1 - alpha^(K+1)) / ((1 - alpha)(K phi + v(K+1)))"


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """One alpha and K. speedup: verifying costs one step; speedup_measured: it costs v(K+1), None if unmeasured."""

    alpha: float
    draft_length: int
    tokens_per_round: float
    speedup: float
    speedup_measured: float | None


@dataclass(frozen=True, slots=True)
class BestLength:
    """The best K of 0 .. most for an alpha, in both forms; 0 where drafting does not pay."""

    alpha: float
    draft_length: int
    draft_length_measured: int | None


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """Speed-ups for the alphas of `best`.

    phi: cost of a draft token, first: of a round's first one, in plain steps. most: the largest K that was looked at.
    draft_lengths: those that were asked for; the rows have the best ones too.
    """

    phi: float
    first: float
    most: int
    draft_lengths: tuple[int, ...]
    rows: tuple[SpeedRow, ...]
    best: tuple[BestLength, ...]
    measured: MeasuredCosts | None

    @property
    def draft(self) -> DraftCosts | None:
        """What drafts, where its measured costs are those of this plan."""
        draft = self.measured.draft if self.measured is not None else None
        return draft if draft is not None and (draft.first, draft.phi) == (self.first, self.phi) else None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of KV. dual_bytes: target's and draft's buffers; naive_bytes: three buffers of the target's size."""

    target: KVShape
    draft: KVShape | None
    batch: int
    positions: int
    target_bytes: int
    draft_bytes: int
    dual_bytes: int
    naive_bytes: int

    @property
    def share_of_naive(self) -> float:
        """dual_bytes / naive_bytes."""
        return self.dual_bytes / self.naive_bytes if self.naive_bytes else 0.0


@dataclass(frozen=True, slots=True)
class SamplesPlan:
    """Best of n. saving: share of the KV positions that one stored prefix saves; coverage: `coverage_bound`.

    None where what it takes was not given.
    """

    n: int
    prefix: int | None
    suffix: int | None
    saving: float | None
    p: float | None
    coverage: float | None


@dataclass(frozen=True, slots=True)
class PassAtK:
    """c of n samples were right; pass_at_k: the unbiased estimate that one of k is."""

    n: int
    c: int
    k: int
    pass_at_k: float


def plan_speed(
    alphas: Sequence[float] | None = None,
    draft_lengths: Sequence[int] | None = None,
    phi: float | None = None,
    measured: MeasuredCosts | None = None,
) -> SpeedPlan:
    """Speed-ups for each alpha and K, with the best K of each alpha among the rows.

    What is not given comes from what was measured, or else is a range of usual values. Raises UsageError: a value out
    of range, or a K that the loop, or what drafts, does not reach.
    """
    draft = measured.draft if measured is not None else None
    most = draft.most if draft is not None else max(MOST, *(draft_lengths or (0,)))
    if draft is not None and draft_lengths and max(draft_lengths) > most:
        raise UsageError(f"{draft.name} drafts at most {most} tokens a round: give a K up to {most}.")
    if alphas is None:
        alphas = (draft.alpha,) if draft is not None and draft.alpha is not None else DEFAULT_ALPHAS
    if draft_lengths is None:
        draft_lengths = [k for k in (range(1, 9) if len(alphas) == 1 else (1, 2, 4, 8)) if k <= most]
    first, phi = _draft_ratios(phi, draft)
    best = tuple(_best(alpha, first, phi, most, measured) for alpha in alphas)
    rows = []
    for found in best:
        lengths = {*draft_lengths, found.draft_length}
        if found.draft_length_measured is not None:
            lengths.add(found.draft_length_measured)
        rows += [speed_row(found.alpha, k, first, phi, measured) for k in sorted(lengths)]
    return SpeedPlan(phi, first, most, tuple(draft_lengths), tuple(rows), best, measured)


def speed_row(alpha: float, k: int, first: float, phi: float, measured: MeasuredCosts | None) -> SpeedRow:
    """Both forms for one alpha and K."""
    extended = None
    if measured is not None:
        extended = cost_model.speedup_measured(alpha, k, phi, measured.v, first=first)
    return SpeedRow(alpha, k, cost_model.expected_tokens(alpha, k), _theorem(alpha, k, first, phi), extended)


def plan_memory(target: KVShape, draft: KVShape | None, *, batch: int, positions: int) -> MemoryPlan:
    """Bytes of the KV of target and draft. Raises UsageError for a value out of range."""
    target_bytes = target.kv_bytes(positions, batch)
    draft_bytes = draft.kv_bytes(positions, batch) if draft is not None else 0
    return MemoryPlan(
        target=target,
        draft=draft,
        batch=batch,
        positions=positions,
        target_bytes=target_bytes,
        draft_bytes=draft_bytes,
        dual_bytes=cost_model.dual_kv_bytes(target_bytes, draft_bytes),
        naive_bytes=cost_model.naive_kv_bytes(target_bytes),
    )


def plan_samples(
    n: int, *, prefix: int | None = None, suffix: int | None = None, p: float | None = None
) -> SamplesPlan:
    """What n samples of one prompt save and reach. Raises UsageError: nothing to compute, or a value out of range."""
    if (prefix is None) != (suffix is None):
        raise UsageError("The saving takes both lengths: give --prefix and --suffix.")
    if prefix is None and p is None:
        raise UsageError("Best of n takes more: give --prefix and --suffix for its memory, --p for its coverage.")
    saving = cost_model.prefix_saving(prefix, suffix, n) if prefix is not None and suffix is not None else None
    coverage = cost_model.coverage_bound(p, n) if p is not None else None
    return SamplesPlan(n, prefix, suffix, saving, p, coverage)


def plan_pass_at_k(n: int, c: int, k: int) -> PassAtK:
    """`cost_model.pass_at_k` with what it was computed from."""
    return PassAtK(n, c, k, cost_model.pass_at_k(n, c, k))


def _draft_ratios(phi: float | None, draft: DraftCosts | None) -> tuple[float, float]:
    """(cost of the first draft token, of each further one); a phi that was given is the cost of each."""
    if phi is None and draft is not None:
        return draft.first, draft.phi
    phi = DEFAULT_PHI if phi is None else phi
    return phi, phi


def _theorem(alpha: float, k: int, first: float, phi: float) -> float:
    if first == phi:
        return cost_model.speedup(alpha, k, phi)
    return cost_model.speedup_measured(alpha, k, phi, lambda width: 1.0, first=first)


def _best(alpha: float, first: float, phi: float, most: int, measured: MeasuredCosts | None) -> BestLength:
    if first == phi:
        best = cost_model.best_draft_length(alpha, phi, most)
    else:
        best = cost_model.best_draft_length_measured(alpha, phi, lambda width: 1.0, most, first=first)
    extended = None
    if measured is not None:
        extended = cost_model.best_draft_length_measured(alpha, phi, measured.v, most, first=first)
    return BestLength(alpha, best, extended)
