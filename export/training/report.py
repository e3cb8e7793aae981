"""A picture of a training, as SVG: how the tokens a round grew, and which candidates are right at which depth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from typing import Final

from specrun.export.speculator_weights import Speculator
from specrun.models_cache.errors import IntegrityError
from specrun.models_cache.strictjson import StrictJsonError, decode

_MOST: Final = 1e15  # of any number of a report

_WIDTH, _HEIGHT = 720, 300
_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 56, 48, 270, 190
_COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e6c8a")
_RANKS = 4


@dataclass(frozen=True, slots=True)
class Earlier:
    """What a report says of the trainings until then; curve: (tokens trained on, loss, MAT) points."""

    tokens_seen: int = 0
    minutes: float = 0.0
    curve: tuple[tuple[float, ...], ...] = ()


def read_earlier(start: Speculator | None) -> Earlier:
    """Of the trainings that `start` comes from; zeros for fresh weights, and for weights that were imported.

    Raises IntegrityError for figures that no training writes.
    """
    if start is None:
        return Earlier()
    names = [field.name for field in fields(Earlier)]
    try:
        earlier: Earlier = decode(Earlier, {name: start.report[name] for name in names if name in start.report})
        numbers = [earlier.tokens_seen, earlier.minutes, *itertools.chain(*earlier.curve)]
        if any(len(point) != 3 for point in earlier.curve) or not all(0 <= number <= _MOST for number in numbers):
            raise StrictJsonError("its curve or a number of it is none")
    except (StrictJsonError, RecursionError) as error:
        raise IntegrityError(
            f"The report of speculator {start.name!r} is not valid ({error}): train without --from."
        ) from None
    return replace(earlier, curve=tuple((int(point[0]), *point[1:]) for point in earlier.curve))


def draw_report(speculator: Speculator) -> str:
    """The SVG text of a trained speculator's report."""
    report = speculator.report
    curve: Sequence[Sequence[float]] = report["curve"]
    head = (
        f"{speculator.method} for {speculator.target.name}: {report['held_out']['mean_accepted_tokens']:.2f} tokens a "
        f"round on held-out text, as a chain of {len(speculator.acceptance)}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 20, head, size=13),
        *_curve(curve),
        *_bars(speculator.acceptance),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _curve(curve: Sequence[Sequence[float]]) -> list[str]:
    """Tokens a round over millions of tokens trained on."""
    if not curve:
        return []
    most_tokens = max(point[0] for point in curve)
    top = max(1.2, *(point[2] for point in curve))

    def place(tokens: float, value: float) -> tuple[float, float]:
        x = _LEFT + _PLOT_WIDTH * tokens / most_tokens
        return x, _TOP + _PLOT_HEIGHT * (1 - (value - 1) / (top - 1))

    points = " ".join("{:.1f},{:.1f}".format(*place(tokens, value)) for tokens, _, value in curve)
    shapes = [
        *_frame(_LEFT, "tokens a round by tokens trained on (millions)"),
        f'<polyline points="{points}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>',
    ]
    for value in (1.0, (1 + top) / 2, top):
        shapes.append(_text(_LEFT - 6, place(0, value)[1] + 4, f"{value:.2f}", anchor="end"))
    for share in (0.0, 0.5, 1.0):
        x, y = place(most_tokens * share, 1.0)
        shapes.append(_text(x, y + 16, f"{most_tokens * share / 1e6:.1f}", anchor="middle"))
    return shapes


def _bars(acceptance: Sequence[Sequence[float]]) -> list[str]:
    """By depth, the chance that the candidate of each rank is right where the path so far was."""
    left = _LEFT + _PLOT_WIDTH + 70
    shapes = _frame(left, "chance of a candidate by depth, ranks 1 to 4")
    group = _PLOT_WIDTH / max(len(acceptance), 1)
    for depth, row in enumerate(acceptance):
        for rank, chance in enumerate(row[:_RANKS]):
            width = group / (_RANKS + 1)
            height = _PLOT_HEIGHT * chance
            x, y = left + depth * group + (rank + 0.5) * width, _TOP + _PLOT_HEIGHT - height
            shapes.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_COLOURS[rank]}"/>'
            )
        shapes.append(_text(left + (depth + 0.5) * group, _TOP + _PLOT_HEIGHT + 16, str(depth + 1), anchor="middle"))
    for value in (0.0, 0.5, 1.0):
        shapes.append(_text(left - 6, _TOP + _PLOT_HEIGHT * (1 - value) + 4, f"{value:.1f}", anchor="end"))
    return shapes


def _frame(left: float, title: str) -> list[str]:
    return [
        f'<rect x="{left}" y="{_TOP}" width="{_PLOT_WIDTH}" height="{_PLOT_HEIGHT}" fill="none" stroke="#999"/>',
        _text(left, _TOP + _PLOT_HEIGHT + 36, title),
    ]


def _text(x: float, y: float, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
