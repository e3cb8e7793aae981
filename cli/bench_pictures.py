"""The pictures of a bench report: ratios, parts of a round, tokens a round against speed, the cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specrun.cli.bench_tables import interval
from specrun.cli.svg import COLOURS, Picture, Scale, scale, text_width, ticks

if TYPE_CHECKING:
    from specrun.runtime.bench_summary import Summary
    from specrun.runtime.synthetic import SyntheticCell

WIDTH = 720.0
AXIS = 36.0  # below a plot: its numbers and its name
PARTS = ("draft", "verify", "rest", "prefill")
ALPHA = "alpha {:g}"


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour class for each name."""
    return {name: f"c{index % COLOURS}" for index, name in enumerate(dict.fromkeys(names))}


def ratio_picture(rows: Sequence[Summary], colour: dict[str, str]) -> Picture:
    """Ratio by category and method, with its interval."""
    categories = [*dict.fromkeys(row.category for row in rows)]
    band, step = 12.0 * len(colour) + 12, 12.0
    bottom = 10 + band * len(categories)
    picture = Picture(WIDTH, bottom + AXIS, "Speed over the baseline by category and method")
    left = text_width(categories) + 16
    bounds = [value for row in rows for value in (row.ratio, row.ratio_low, row.ratio_high) if value is not None]
    marks = ticks(min([1.0, *bounds]), max([1.0, *bounds]))
    across = scale(marks[0], marks[-1], left, WIDTH - 16)
    _bottom_axis(picture, across, marks, 10, bottom, "times as fast as the baseline")
    picture.line(across(1.0), 10, across(1.0), bottom, "axis")
    for number, category in enumerate(categories):
        top = 10 + number * band
        picture.line(left, top, WIDTH - 16, top, "grid")
        picture.text(left - 8, top + band / 2 + 4, category, anchor="end")
        for row in (row for row in rows if row.category == category):
            y = top + 12 + step * list(colour).index(row.method)
            if row.ratio_low is not None and row.ratio_high is not None:
                picture.line(across(row.ratio_low), y, across(row.ratio_high), y, f"{colour[row.method]} stroke")
                for end in (row.ratio_low, row.ratio_high):
                    picture.line(across(end), y - 3, across(end), y + 3, f"{colour[row.method]} stroke")
            title = f"{category}, {row.method}: {row.ratio:.2f} ({interval(row)})"
            picture.dot(across(row.ratio), y, 4, f"{colour[row.method]} fill", title)
    return picture


def parts_picture(rows: Sequence[Summary]) -> Picture:
    """Milliseconds of a round by part, a bar for each method."""
    colour = colours(PARTS)
    bottom = 10 + 26.0 * len(rows)
    picture = Picture(WIDTH, bottom + AXIS, "Time of a round by part and method")
    left = text_width(row.method for row in rows) + 16
    parts = [(row.draft_ms, row.verify_ms, row.rest_ms, row.prefill_ms) for row in rows]
    marks = ticks(0.0, max(map(sum, parts), default=1.0))
    across = scale(0.0, marks[-1], left, WIDTH - 16)
    _bottom_axis(picture, across, marks, 10, bottom, "milliseconds a round")
    for number, (row, times) in enumerate(zip(rows, parts, strict=True)):
        y, done = 14 + 26.0 * number, 0.0
        picture.text(left - 8, y + 13, row.method, anchor="end")
        for part, time in zip(PARTS, times, strict=True):
            width = across(done + time) - across(done)
            picture.bar(across(done), y, width, 18, f"{colour[part]} fill", f"{row.method}, {part}: {time:.2f} ms")
            done += time
    return picture


def tokens_picture(rows: Sequence[Summary], totals: Sequence[Summary], colour: dict[str, str]) -> Picture:
    """Ratio over MAT, a point for each category and method and a larger one for all prompts."""
    height = 340.0
    picture = Picture(WIDTH, height + AXIS, "Speed over the baseline against tokens a round")
    ratios = [1.0, *[row.ratio for row in rows]]
    across_marks = ticks(1.0, max([1.2, *[row.mean_accepted_tokens for row in rows]]))
    up_marks = ticks(min(ratios), max(ratios))
    across = scale(across_marks[0], across_marks[-1], 60, WIDTH - 16)
    up = scale(up_marks[0], up_marks[-1], height, 24)
    _bottom_axis(picture, across, across_marks, 24, height, "MAT: tokens that a run of the model commits")
    _left_axis(picture, up, up_marks, 60, WIDTH - 16, "ratio")
    end = min(across_marks[-1], up_marks[-1])
    start = max(across_marks[0], up_marks[0])
    picture.path([(across(value), up(value)) for value in (start, end)], "axis dash")
    large = {id(row) for row in totals}
    for row in sorted(rows, key=lambda row: id(row) in large):
        title = f"{row.category}, {row.method}: MAT {row.mean_accepted_tokens:.2f}, ratio {row.ratio:.2f}"
        x, y = across(row.mean_accepted_tokens), up(row.ratio)
        classes = f"{colour[row.method]} fill"
        picture.dot(x, y, 7 if id(row) in large else 3.5, f"{classes} edge" if id(row) in large else classes, title)
    return picture


def synthetic_picture(cells: Sequence[SyntheticCell], colour: dict[str, str]) -> Picture:
    """S over K: for each alpha a line as predicted and points as measured."""
    height = 340.0
    picture = Picture(WIDTH, height + AXIS, "Speed over the baseline by draft length, measured and predicted")
    lengths = sorted({cell.draft_length for cell in cells})
    values = [value for cell in cells for value in (cell.speedup, cell.predicted)]
    marks = ticks(min([1.0, *values]), max([1.0, *values]))
    across = scale(0, max(len(lengths) - 1, 1), 90, WIDTH - 40)
    up = scale(marks[0], marks[-1], height, 24)
    _left_axis(picture, up, marks, 60, WIDTH - 16, "S")
    for place, length in enumerate(lengths):
        picture.text(across(place), height + 16, str(length), anchor="middle")
    picture.text((60 + WIDTH - 16) / 2, height + 32, "K: draft tokens a round", anchor="middle")
    picture.line(60, up(1.0), WIDTH - 16, up(1.0), "axis")
    for alpha, classes in colour.items():
        line = sorted((cell for cell in cells if ALPHA.format(cell.acceptance) == alpha), key=lambda c: c.draft_length)
        points = [(across(lengths.index(cell.draft_length)), cell) for cell in line]
        picture.path([(x, up(cell.predicted)) for x, cell in points], f"{classes} stroke")
        for x, cell in points:
            title = f"{alpha}, K {cell.draft_length}: measured {cell.speedup:.2f}, predicted {cell.predicted:.2f}"
            picture.dot(x, up(cell.speedup), 5, f"{classes} fill", title)
    return picture


def _bottom_axis(picture: Picture, across: Scale, marks: Sequence[float], top: float, bottom: float, name: str) -> None:
    for mark in marks:
        picture.line(across(mark), top, across(mark), bottom, "grid")
        picture.text(across(mark), bottom + 16, f"{mark:g}", anchor="middle")
    picture.text((across(marks[0]) + across(marks[-1])) / 2, bottom + 32, name, anchor="middle")


def _left_axis(picture: Picture, up: Scale, marks: Sequence[float], left: float, right: float, name: str) -> None:
    for mark in marks:
        picture.line(left, up(mark), right, up(mark), "grid")
        picture.text(left - 8, up(mark) + 4, f"{mark:g}", anchor="end")
    picture.text(left - 8, up(marks[-1]) - 10, name, anchor="end")
