"""At which widths a target's graph is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WidthRule:
    """At which widths rows of a run are bit-equal on this machine: `multiple` of positions, rows and logit rows.

    `exact` is False where the probe found no rule; then results are equal only up to rounding. `padded` False is the
    baseline of `bench`: every run at its natural width, the attention's lone-row kernel included. `pinned`: every run
    has just `multiple` positions, and what is longer takes several; for devices with other kernels for other widths.
    """

    multiple: int = 1
    exact: bool = True
    padded: bool = True
    pinned: bool = False
