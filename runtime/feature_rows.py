"""The target's features on their way to a head: which columns it reads, and the rows that it has not seen yet."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import ManifestError
from specrun.runtime.proposal import Proposer
from specrun.runtime.target_run import TargetRow

_LEAST_DROP = 128  # rows: dropping moves all others

Columns = slice | NDArray[np.int64]


def pick_columns(bundle_taps: Sequence[int], taps: Sequence[int], hidden: int) -> Columns:
    """The columns of features [n, bundle taps x hidden] that hold `taps`, in their order.

    Raises ManifestError if the bundle's graph does not deliver one of them.
    """
    missing = [tap for tap in taps if tap not in bundle_taps]
    if missing:
        raise ManifestError(
            f"The head reads layer {missing[0]}, which the model's graph does not deliver: export the model again."
        )
    places = [list(bundle_taps).index(tap) for tap in taps]
    if places == list(range(places[0], places[0] + len(places))):
        return slice(places[0] * hidden, (places[-1] + 1) * hidden)
    return np.concatenate([np.arange(place * hidden, (place + 1) * hidden) for place in places])


class FeatureRows:
    """Features f32 [n, width] of the positions from `start` on, without a gap."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._rows = np.empty((0, 0), np.float32)
        self.start = self.end = 0

    def clear(self, position: int = 0) -> None:
        """Hold nothing; the next row expected is that of `position`."""
        self.start = self.end = position

    def take(self, position: int, features: NDArray[np.float32]) -> None:
        """Copy rows for `position` on; later ones held so far are dropped. ValueError if that leaves a gap."""
        if position > self.end:
            raise ValueError(f"features of position {position} came, and those of {self.end} never did")
        if position < self.start or self.start == self.end:
            self.start = position
        self.end = position
        rows = features[:, self._columns]
        held, needed = self.end - self.start, self.end - self.start + len(rows)
        if needed > len(self._rows) or self._rows.shape[1] != rows.shape[1]:
            grown = np.empty((max(64, 2 * needed), rows.shape[1]), np.float32)
            if held:
                grown[:held] = self._rows[:held]
            self._rows = grown
        self._rows[held:needed] = rows
        self.end = position + len(rows)

    def rows(self, first: int, last: int) -> NDArray[np.float32]:
        """The rows of positions first .. last - 1; a view. ValueError if they are not held."""
        if not self.start <= first <= last <= self.end:
            raise ValueError(f"features of positions {first} to {last} are not those held, {self.start} to {self.end}")
        return self._rows[first - self.start : last - self.start]

    def forget_before(self, position: int) -> None:
        """Drop the rows before `position`, or leave them where that would hardly free anything."""
        drop = min(position, self.end) - self.start
        if drop >= _LEAST_DROP:
            kept = self.end - self.start - drop
            self._rows[:kept] = self._rows[drop : drop + kept].copy()
            self.start += drop


def hand_features(
    target: TargetRow, proposer: Proposer | None, root: int, end: int, path: Sequence[int] = (), nodes: int = 0
) -> None:
    """Hand over what the last run found: features of the context's tokens before `root` and of the path there.

    nodes: how many the run had there. Nothing of the context's tokens from `end` on is handed over.
    """
    if proposer is None or not proposer.needs_features:
        return
    features = target.features
    before = len(features) - nodes
    rows = [*range(before), *[before + node for node in path]][: end - (root - before)]
    if rows:
        in_order = rows[-1] == len(rows) - 1
        proposer.take_features(root - before, features[: len(rows)] if in_order else features[rows])
