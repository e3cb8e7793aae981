"""What a part found, as text for a person."""

from __future__ import annotations

from typing import Any, Final

from gpu_checks.runner import Outcome

WIDEST: Final = 56  # characters of a cell


def lines_of(outcome: Outcome) -> list[str]:
    """A heading, then each figure as `name: value`, and lists of rows as tables."""
    lines = [f"== {outcome.title}: {outcome.status}, {outcome.seconds:g} s"]
    if outcome.error is not None:
        lines.append(f"   {outcome.error}")
    for name, value in outcome.figures.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            lines += [f"   {name}:", *_table(value)]
        elif isinstance(value, dict):
            lines += [f"   {name}.{key}: {_text(entry)}" for key, entry in value.items()]
        elif value not in (None, [], {}):
            lines.append(f"   {name}: {_text(value)}")
    return lines


def _table(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *[[_cell(row.get(column)) for column in columns] for row in rows]]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    numbers = [all(not isinstance(row.get(column), str) for row in rows) for column in columns]
    return [
        "     "
        + "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in cells
    ]


def _cell(value: Any) -> str:
    text = _text(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(entry)}" for key, entry in value.items())
    return str(value)
