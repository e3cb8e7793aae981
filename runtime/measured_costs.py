"""What a model's runs and drafts cost on this machine, as the ratios that the cost model takes."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.models_cache.layout import Bundle
from specrun.models_cache.speculator import InstalledSpeculator
from specrun.runtime.calibration import calibrate
from specrun.runtime.cost_model import equivalent_alpha
from specrun.runtime.device import Device, draft_device
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH
from specrun.runtime.engine import Engine
from specrun.runtime.heads import HEAD_METHODS, Heads
from specrun.runtime.session import session_opener


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """What drafts, and its costs in plain steps of the target.

    first: of the first draft token of a round; phi: of each further one. acceptance: by depth, that the best candidate
    stands if those before it do, as measured in training; empty where nothing was measured. most: the longest K.
    """

    name: str
    method: str
    first: float
    phi: float
    acceptance: tuple[float, ...] = ()
    most: int = MAX_DRAFT_LENGTH

    @property
    def alpha(self) -> float | None:
        """The one alpha with as many tokens a round as that acceptance has, None without one."""
        return equivalent_alpha(self.acceptance) if self.acceptance else None


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """Costs of a model on this machine.

    step_s: seconds of a plain, exact step; v[n]: the cost of a run of n positions, in such steps. Runs are those that
    the loop makes, padded to a width that is bit-equal here, behind a short context.
    """

    model: str
    threads: int
    step_s: float
    v: dict[int, float]
    draft: DraftCosts


NGRAM = DraftCosts("ngram", "ngram", 0.0, 0.0)
"""N-grams are looked up: what that takes is small beside a run."""


def measured_costs(
    engine: Engine, drafting: Bundle | InstalledSpeculator | None = None, *, device: Device | None = None
) -> MeasuredCosts:
    """The kept calibration of an engine, and the costs of what drafts for it: n-grams if nothing is given.

    A head is loaded and timed (well under a second), a draft model calibrated unless that is kept. device: by default
    the engine's.
    """
    device = device or engine.device
    calibration = engine.calibration
    step = calibration.cost(1)
    return MeasuredCosts(
        model=engine.bundle.manifest.name,
        threads=engine.threads,
        step_s=step,
        v={width: calibration.cost(width) / step for width in range(1, MAX_DRAFT_LENGTH + 2)},
        draft=_draft_costs(engine, drafting, step, device),
    )


def _draft_costs(
    engine: Engine, drafting: Bundle | InstalledSpeculator | None, step: float, device: Device
) -> DraftCosts:
    if drafting is None:
        return NGRAM
    if isinstance(drafting, Bundle):
        phi = _model_seconds(drafting, engine.threads, device) / step
        return DraftCosts(drafting.manifest.name, "draft", phi, phi)
    manifest = drafting.manifest
    acceptance = tuple(chances[0] for chances in manifest.acceptance)
    heads = Heads(engine.bundle, engine.threads, device, drafting)
    if manifest.method not in HEAD_METHODS:
        phi = _model_seconds(drafting.draft_bundle(engine.bundle), heads.threads, device) / step
        return DraftCosts(manifest.name, manifest.method, phi, phi, acceptance)
    try:
        first, further = heads.draft_costs(manifest.method)
    finally:
        heads.close()
    most = manifest.sizes.depth if manifest.method == "medusa" else MAX_DRAFT_LENGTH
    return DraftCosts(manifest.name, manifest.method, first / step, further / step, acceptance, most)


def _model_seconds(draft: Bundle, threads: int, device: Device) -> float:
    """Seconds of a step of a draft model, as `Engine` calibrates it."""
    device = draft_device(device, draft)
    return calibrate(draft, threads, session_opener(draft, threads, device, shared_cpu=True), device=device).cost(1)
