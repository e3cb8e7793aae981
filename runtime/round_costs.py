"""What a round costs: what each width was seen to take, what the length of the text adds, the rest of the round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from specrun.models_cache.layout import Bundle
from specrun.runtime.kv_shape import KVShape

STEEPEST: Final = 8.0
"""How many times the time a byte of weights takes a byte of KV may take: attention reads it less evenly."""
_MEMORY: Final = 0.99  # weight of a run against the one after it
_CAUTION: Final = 8 * 256.0**2  # the first runs count for little: their weight is this much without a residual
_MOST: Final = 4.0  # a run that took so many times what the table says was disturbed: it counts as that many
_WIDEST: Final = 17
_TABLE: Final = 8.0  # a width's figure in the table weighs like so many runs of it
_WIDTH_MEMORY: Final = 0.95  # weight of what was seen of a width, at each further run of it
_PACE_MEMORY: Final = 0.98  # the same of the ratio to the table, over runs of all widths
_MOST_OF_A_WIDTH: Final = 1.5  # a run that took so many times what its width takes counts as that many
_REST_MEMORY: Final = 0.95
_MOST_REST: Final = 0.5  # of a run of width 1: what took longer was disturbed


class RoundCosts:
    """Costs in seconds that follow what is seen. table(width): of a run behind a short text, as calibrated.

    Attention makes a run dearer in proportion to the text before it, and by how much depends on the model and the
    machine: the slope is the least-squares one over the runs so far, the latest counting most. slope: where it begins;
    steepest: what of it can be, so that runs behind a short text on a busy machine are not taken for a slope.
    What a width takes beside that follows the runs too, as what shares a machine makes wide runs dearer or cheaper for
    hours; widths not seen of late go with the ratio by which the others differ from the table.
    The rest of a round, judging and committing, costs the same for few draft tokens as for many.
    """

    def __init__(self, table: Callable[[int], float], slope: float = 0.0, *, steepest: float = math.inf) -> None:
        self._table = table
        self._steepest = steepest
        slope = min(slope, steepest)
        self._products, self._squares = slope * _CAUTION, _CAUTION
        self._seen: dict[int, tuple[float, float]] = {}  # by width: seconds, runs
        self._pace = 1.0
        self._rest = 0.0

    @property
    def slope(self) -> float:
        """Seconds that a token of text adds to each run behind it."""
        return max(0.0, self._products / self._squares)

    def width(self, width: int) -> float:
        """Of a run of `width` positions behind a short text."""
        seconds, runs = self._seen.get(width, (0.0, 0.0))
        return (_TABLE * self._pace * self._table(width) + seconds) / (_TABLE + runs)

    def beyond(self, length: int) -> float:
        """What a round behind a text of `length` tokens costs more than its run behind a short one."""
        return self.slope * length + self._rest

    def note(self, width: int, length: int, seconds: float) -> None:
        """A run of `width` positions behind `length` took so long."""
        if width > _WIDEST:
            return
        known = self.width(width)
        more = min(min(seconds, _MOST * known) - known, self._steepest * length)
        self._products = _MEMORY * self._products + more * length
        self._squares = _MEMORY * self._squares + float(length) ** 2
        own = min(max(seconds - self.slope * length, known / _MOST_OF_A_WIDTH), known * _MOST_OF_A_WIDTH)
        before, runs = self._seen.get(width, (0.0, 0.0))
        self._seen[width] = _WIDTH_MEMORY * before + own, _WIDTH_MEMORY * runs + 1.0
        self._pace = _PACE_MEMORY * self._pace + (1.0 - _PACE_MEMORY) * own / self._table(width)

    def note_rest(self, seconds: float) -> None:
        """After its run a round took so long."""
        rest = min(seconds, _MOST_REST * self._table(1))
        self._rest = rest if not self._rest else _REST_MEMORY * self._rest + (1.0 - _REST_MEMORY) * rest


def costs_of(bundle: Bundle, table: Callable[[int], float], slope: float) -> RoundCosts:
    """The costs of a bundle's runs: each reads the weights once, and of each token of text its KV."""
    read = KVShape.of_bundle(bundle).kv_bytes(1) / max(1, bundle.weights_bytes)
    return RoundCosts(table, slope, steepest=STEEPEST * read * table(1))
