"""The picture of `specrun plan --plot`: how the speed-up depends on K, by alpha."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from specrun.runtime.plan import SpeedPlan

SUFFIXES = (".png", ".svg")
PLOT_HINT = "Pictures need matplotlib: install it with `pip install 'specrun[plot]'`."
_LONGEST = 16  # K up to which curves are drawn, unless longer ones are asked for
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e6c8a", "#b8860b", "#4a4e69", "#2a9d8f", "#d1495b")


def check_picture(path: Path) -> None:
    """Say before any work if a picture cannot be drawn there. Raises UsageError."""
    from specrun.models_cache.errors import UsageError

    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"A picture is a .png or a .svg file: {path.name} is neither; give a name such as plan.svg.")
    if not path.parent.is_dir():
        raise UsageError(f"There is no folder {path.parent} for the picture: make it first, or name another.")
    try:
        import matplotlib.figure  # noqa: F401  (only to say early that it is missing)
    except ImportError:
        raise UsageError(PLOT_HINT) from None


def draw_speed(plan: SpeedPlan, path: Path) -> None:
    """Draw S over K for each alpha, and beside it with the measured cost of verifying; whole or not at all."""
    from matplotlib.figure import Figure

    panels = 1 if plan.measured is None else 2
    figure = Figure(figsize=(1.5 + 5.0 * panels, 4.6), dpi=150, layout="constrained")
    axes = [figure.add_subplot(1, panels, 1)]
    costs = f"phi = {plan.phi:.3g}" + (f", first {plan.first:.3g}" if plan.first != plan.phi else "")
    _curves(axes[0], plan, False, f"verifying K + 1 positions costs one step\n{costs}")
    if plan.measured is not None:
        axes.append(figure.add_subplot(1, panels, 2, sharey=axes[0]))
        drafts = f", drafts of {plan.draft.name}" if plan.draft is not None else ""
        title = f"verifying costs what was measured\n{plan.measured.model}{drafts}"
        _curves(axes[1], plan, True, title)
    axes[-1].legend(title="alpha", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes[0].set_ylabel("speed-up S over plain decoding")
    axes[0].set_ylim(bottom=0.0)
    drawn = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    figure.savefig(drawn, format=kind, metadata={"Date": None} if kind == "svg" else None)
    _write_whole(path, drawn.getvalue())


def _curves(axes: Axes, plan: SpeedPlan, measured: bool, title: str) -> None:
    from specrun.runtime.plan import speed_row

    lengths = range(min(plan.most, max(_LONGEST, *plan.draft_lengths)) + 1)
    for number, best in enumerate(plan.best):
        rows = [speed_row(best.alpha, k, plan.first, plan.phi, plan.measured) for k in lengths]
        values = [
            row.speedup_measured if measured and row.speedup_measured is not None else row.speedup for row in rows
        ]
        colour = _COLOURS[number % len(_COLOURS)]
        axes.plot(lengths, values, color=colour, marker=".", markersize=5, linewidth=1.5, label=f"{best.alpha:.3g}")
        ring = best.draft_length_measured if measured else best.draft_length
        if ring is not None and ring < len(values):
            axes.plot([ring], [values[ring]], color=colour, marker="o", markersize=8, markerfacecolor="white")
    axes.axhline(1.0, color="#888888", linewidth=1, linestyle="--")
    axes.set_title(title, fontsize=10, parse_math=False)  # a name may hold dollars
    axes.set_xlabel("K, draft tokens a round (ring: the best)")
    axes.grid(alpha=0.3)
    axes.set_xlim(0, lengths[-1])
    axes.locator_params(axis="x", integer=True)


def _write_whole(path: Path, data: bytes) -> None:
    from specrun.models_cache.errors import CacheError

    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CacheError(f"Cannot write {path}: {error.strerror}; choose another folder.") from error
