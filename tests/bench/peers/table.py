"""The table: a row for each mode, from its runs and those that were paired with them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specrun.runtime.kv_cache import shared_prefix

from .runs import Record, Run
from .sides import BASELINE, SPECRUN, Mode

MAX_IDLE_LOAD = 0.05

Cell = Mapping[str, Mapping[int, Run]]
"""A mode's runs by prompt and repeat."""


@dataclass(frozen=True, slots=True)
class Row:
    """A mode over all prompts.

    tokens_per_s: the median over prompts of the median over repeats. to_baseline, to_own_plain: how many times as fast
    as specrun's unpadded width 1 and as the side's plain mode; specrun: how many times as fast each of specrun's modes
    is as this one. Ratios are the median over prompts of the median over repeats of ratios within a repeat.
    text_kept: on how many of `prompts` every run wrote what the side's plain mode writes. equal_first: tokens that its
    text shares with the fp32 text before the first difference, the median. next_token: how often, of how many times,
    the side goes on as the fp32 text does; for plain modes.
    """

    mode: str
    side: str
    prompts: int
    tokens_per_s: float
    to_baseline: float | None
    to_own_plain: float | None
    text_kept: int
    equal_first: float | None
    next_token: tuple[int, int] | None
    specrun: dict[str, float]


def rows(modes: Sequence[Mode], record: Record) -> list[Row]:
    """A row for each mode that has runs."""
    cells: dict[str, dict[str, dict[int, Run]]] = {}
    for run in record.runs:
        cells.setdefault(run.mode, {}).setdefault(run.prompt, {})[run.repeat] = run
    return [_row(mode, modes, cells, record) for mode in modes if mode.label in cells]


def _row(mode: Mode, modes: Sequence[Mode], cells: Mapping[str, Cell], record: Record) -> Row:
    own = cells[mode.label]
    kept = 0
    shared = []
    plain = cells.get(mode.reference, {})
    for prompt, repeats in own.items():
        texts = [run.token_ids for run in repeats.values()]
        expected = next((run.token_ids for run in plain.get(prompt, {}).values()), None)
        kept += all(text == expected for text in texts)
        if ("reference", prompt) in record.facts:
            shared.append(shared_prefix(texts[0], record.facts["reference", prompt]))
    agreement = record.facts.get(("agreement", mode.side)) if mode.label == mode.reference else None
    return Row(
        mode=mode.label,
        side=mode.side,
        prompts=len(own),
        tokens_per_s=_medians(own, lambda run: 1 / run.seconds_per_token),
        to_baseline=speed_ratio(own, cells.get(BASELINE, {})),
        to_own_plain=speed_ratio(own, plain),
        text_kept=kept,
        equal_first=statistics.median(shared) if shared else None,
        next_token=tuple(agreement) if agreement else None,
        specrun={
            other.label.removeprefix(f"{SPECRUN} "): ratio
            for other in modes
            if other.side == SPECRUN
            and other.label != BASELINE
            and (ratio := speed_ratio(cells.get(other.label, {}), own)) is not None
        },
    )


def speed_ratio(own: Cell, other: Cell) -> float | None:
    """How many times as fast `own` is as `other`, over the prompts and repeats that both have."""
    ratios = []
    for prompt, repeats in own.items():
        pairs = [(run, other[prompt][repeat]) for repeat, run in repeats.items() if repeat in other.get(prompt, {})]
        if pairs:
            ratios.append(statistics.median(their.seconds_per_token / our.seconds_per_token for our, their in pairs))
    return statistics.median(ratios) if ratios else None


def _medians(runs: Cell, value: Callable[[Run], float]) -> float:
    return statistics.median(statistics.median(map(value, repeats.values())) for repeats in runs.values())


def idle_loads(runs: Sequence[Run]) -> dict[str, float]:
    """What each side used of a core while another one worked."""
    totals: dict[str, list[float]] = {}
    for run in runs:
        for side, (waited, used) in run.idle.items():
            total = totals.setdefault(side, [0.0, 0.0])
            total[0] += waited
            total[1] += used
    return {side: used / waited if waited else 0.0 for side, (waited, used) in totals.items()}


def fastest_peer(table: Sequence[Row]) -> Row | None:
    """The peers' row with the highest ratio to specrun's baseline."""
    peers = [row for row in table if row.side != SPECRUN and row.to_baseline is not None]
    return max(peers, key=lambda row: row.to_baseline or 0.0, default=None)


def format_table(table: Sequence[Row]) -> str:
    """The table as text, with a line on the fastest peer."""
    names = [*dict.fromkeys(name for row in table for name in row.specrun)]
    head = ["mode", "tokens/s", "to baseline", "to own plain", "text kept", "next token", "equal first"]
    lines = [[*head, *(f"{name} x" for name in names)]]
    for row in table:
        lines.append(
            [
                row.mode,
                f"{row.tokens_per_s:.1f}",
                _number(row.to_baseline, ".3f"),
                _number(row.to_own_plain, ".3f"),
                f"{row.text_kept} of {row.prompts}",
                f"{row.next_token[0] / row.next_token[1]:.1%}" if row.next_token else "",
                _number(row.equal_first, ".0f"),
                *(_number(row.specrun.get(name), ".2f") for name in names),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    best = fastest_peer(table)
    if best is not None and best.specrun:
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in best.specrun.items())
        text.append(f"Fastest of the peers: {best.mode}. Times as fast as it, specrun: {ratios}")
    return "\n".join(line.rstrip() for line in text)


def _number(value: float | None, layout: str) -> str:
    return "" if value is None else format(value, layout)


def as_json(table: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as `--json` prints them."""
    return [asdict(row) for row in table]
