"""Pictures as SVG inside a page: shapes whose colours the page's style sheet sets, so that they follow dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from html import escape

COLOURS = 8
CHARACTER = 6.6  # width of one at the size of the text, on average

Scale = Callable[[float], float]


class Picture:
    """Shapes in pixels from the upper left corner; `label` says what the picture shows to those who cannot see it.

    Classes: `c0` to `c7` set a colour, which `fill` and `stroke` take; `dash` breaks a line, `faint` makes it thin.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self._size = width, height
        self._label = label
        self._shapes: list[str] = []

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", classes: str = "") -> None:
        """Text whose baseline is at y."""
        self._add("text", classes, escape(text), x=x, y=y, text_anchor=anchor)

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str = "axis") -> None:
        """A straight line."""
        self._add("line", classes, x1=x1, y1=y1, x2=x2, y2=y2)

    def path(self, points: Iterable[tuple[float, float]], classes: str) -> None:
        """Straight lines from point to point."""
        self._add("polyline", classes, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))

    def bar(self, x: float, y: float, width: float, height: float, classes: str, title: str) -> None:
        """A rectangle; `title` is shown when one points at it."""
        self._add("rect", classes, _title(title), x=x, y=y, width=max(0.0, width), height=height)

    def dot(self, x: float, y: float, radius: float, classes: str, title: str) -> None:
        """A circle."""
        self._add("circle", classes, _title(title), cx=x, cy=y, r=radius)

    def _add(self, name: str, classes: str, content: str = "", **attributes: float | str) -> None:
        values = {"class": classes} if classes else {}
        values |= {
            key.replace("_", "-"): value if isinstance(value, str) else f"{value:.1f}"
            for key, value in attributes.items()
        }
        written = " ".join(f'{key}="{escape(value)}"' for key, value in values.items())
        self._shapes.append(f"<{name} {written}>{content}</{name}>")

    def __str__(self) -> str:
        width, height = self._size
        head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(self._label)}">'
        return "\n".join([head, *self._shapes, "</svg>"])


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def scale(low: float, high: float, start: float, end: float) -> Scale:
    """The map of low .. high onto start .. end."""
    spread = high - low or 1.0
    return lambda value: start + (end - start) * (value - low) / spread


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` or below to `high` or above, about `count` steps of 1, 2 or 5 times a power of ten."""
    spread = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(spread / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if spread / (power * factor) <= count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def text_width(texts: Iterable[str]) -> float:
    """Room for the longest of the texts."""
    return CHARACTER * max(map(len, texts), default=0)
