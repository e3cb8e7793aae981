"""The page of `specrun bench --report`: one HTML file with its style and pictures in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from specrun.cli.bench_pictures import (
    ALPHA,
    PARTS,
    colours,
    parts_picture,
    ratio_picture,
    synthetic_picture,
    tokens_picture,
)
from specrun.cli.bench_tables import (
    NOTHING,
    Cells,
    Found,
    axes_table,
    load,
    megabytes,
    round_table,
    speed_table,
    synthetic_table,
)
from specrun.cli.svg import Picture

_LIGHT = ("#1b6ca8", "#c8553d", "#2f7d43", "#8e5a9b", "#a87900", "#00808a", "#b0366f", "#5b5f66")
_DARK = ("#6fb3e8", "#f08a72", "#74c587", "#c79ad3", "#e0b84c", "#4fc3cc", "#ef86b4", "#aab0b8")

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2126; --soft: #5b636d; --line: #d5d9de; --box: #f4f5f7;
  LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --page: #16191d; --ink: #e6e8eb; --soft: #a3abb5; --line: #3a414a; --box: #1f242a; DARK }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; }
p { max-width: 45rem; } .soft { color: var(--soft); }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.name, td.name { text-align: left; } th { font-weight: 600; }
code { white-space: nowrap; } pre { font-family: ui-monospace, monospace; background: var(--box); padding: .75rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: 1rem 0; } summary { cursor: pointer; } figure { margin: 1rem 0; } figcaption { font-weight: 600; }
svg { width: 100%; min-width: 40rem; height: auto; font-size: 12px; fill: var(--ink); }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .5rem 0; }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; background: var(--c); }
.axis { stroke: var(--soft); } .grid { stroke: var(--line); } polyline { fill: none; }
.fill { fill: var(--c); } .stroke { stroke: var(--c); stroke-width: 2; }
.edge { stroke: var(--ink); stroke-width: 1.5; } .dash { stroke-dasharray: 5 4; }
CLASSES
"""


def write_report(path: Path, found: Found) -> None:
    """Write the page; what UTF-8 cannot hold of a name becomes a question mark."""
    path.write_text(report_page(found), encoding="utf-8", errors="replace")


def report_page(found: Found) -> str:
    """The page's text. It names no address, so nothing is loaded from anywhere."""
    names = ", ".join(bench.model["model"] for bench in found.benches)
    body = [
        f"<h1>specrun bench: {escape(names)}</h1>",
        "<p>Every figure is of the machine below. Methods are timed in turn, prompt by prompt; models one "
        "after another, each against its own baseline: plain decoding at width 1 and unpadded, the fastest plain loop, "
        "which gives up exactness. “none” is exact plain decoding.</p>",
        *(_methods(found) if found.rows else []),
        *(_synthetic(found) if found.cells else []),
        *_conditions(found),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>specrun bench: {escape(names)}</title>\n<style>{_style()}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _methods(found: Found) -> list[str]:
    from specrun.runtime.bench_runs import BASELINE
    from specrun.runtime.bench_summary import totals

    timed = [row for row in found.rows if row.method != BASELINE]
    colour = colours([row.method for row in timed])
    legend = _legend(colour)
    return [
        "<h2>Speed</h2>",
        "<p>How many times as fast as the baseline a method writes a token, the prefill left out; of a prompt's runs "
        "the median counts, and prompts weigh the same. Whiskers: the 95 % interval over prompts (bootstrap of the "
        "paired ratio; of a handful of prompts it is too narrow).</p>",
        *_by_model(found, legend, lambda model: ratio_picture([row for row in timed if row.model == model], colour)),
        _table(found.shown(speed_table(totals(found.rows)))),
        "<details><summary>By category</summary>",
        _table(found.shown(speed_table(found.rows))),
        "</details>",
        "<p class=soft>MAT: tokens that a run of the model commits. accept: draft tokens that stood, of those decided. "
        "equal: whether every text is that of “none”.</p>",
        "<h2>A round by its parts</h2>",
        "<p>Milliseconds a round: drafting; the run of the model that verifies; the rest (accepting, committing, "
        "writing the text); and the prefill, shared out over the rounds.</p>",
        *_by_model(
            found,
            _legend(colours(PARTS)),
            lambda model: parts_picture([row for row in totals(found.rows) if row.model == model]),
        ),
        _table(found.shown(round_table(found.rows))),
        "<p class=soft>ms over: of drafting, verifying and the rest, what passed outside ONNX Runtime. MB KV: the "
        "buffers as they had grown.</p>",
        "<h2>Tokens a round and speed</h2>",
        "<p>A point for each category, a large one for all prompts. On the dashed line a round would cost what a plain "
        "step costs.</p>",
        *_by_model(
            found,
            legend,
            lambda model: tokens_picture(
                [row for row in timed if row.model == model],
                [row for row in totals(timed) if row.model == model],
                colour,
            ),
        ),
        "<h2>Memory, acceptance, training</h2>",
        "<p>What a method needs beyond the model itself: MB more are its weights and KV buffers (tables of n-grams, "
        "less than a kB a token of text, are not counted); training is that of its speculator, as its own report says; "
        "“-” where that is not known.</p>",
        _table(found.shown(axes_table(found.axes))),
    ]


def _synthetic(found: Found) -> list[str]:
    cells = found.cells
    drawn = [cell for cell in cells if cell.acceptance > 0] or cells
    colour = colours([ALPHA.format(cell.acceptance) for cell in drawn])
    parts = [
        "<h2>The cost model against the clock</h2>",
        "<p>Draft tokens that stand with chance alpha, each by itself, at the cost of the drafting named; where that "
        "is “none”, drafting costs nothing. The texts stay those of plain decoding. Predicted is "
        "<code>S = E / (K phi + v + r)</code>: E = 1 + alpha + … + alpha<sup>K</sup> tokens a round; K phi, v and r "
        "are the times of drafting, of the model's run over K + 1 positions and of the rest, in units of the "
        "baseline's time a token. They were measured in turn with the rounds that they predict, over the same texts, "
        "in rounds whose draft tokens are all wrong.</p>",
        _legend(colour),
    ]
    for model, method in dict.fromkeys((cell.model, cell.method) for cell in drawn):
        members = [cell for cell in drawn if (cell.model, cell.method) == (model, method)]
        caption = f"{model}, drafting of {method}: line predicted, points measured"
        parts.append(_figure(synthetic_picture(members, colour), caption))
    return [
        *parts,
        _table(found.shown(synthetic_table(cells))),
        "<p class=soft>got, MAT: what chance made of alpha and E (± its standard deviation). by MAT: predicted from "
        "the MAT that came. S none: over exact plain decoding. theorem: E / (K phi + 1), as if a run cost the same at "
        "any width and the rest nothing. Rows with alpha 0 are those that the costs come from.</p>",
    ]


def _fact(key: str, value: Any) -> str:
    """A fact of a model; of digests the beginning."""
    if key == "speculators":
        return ", ".join(f"{method} {digest[:16]}" for method, digest in value.items()) or NOTHING
    return str(value)[:16] if key == "digest" else str(value)


def _conditions(found: Found) -> list[str]:
    models: list[Cells] = [(*found.benches[0].model, "peak memory")]
    sittings: list[Cells] = [("model", "timed from", "load average")]
    for bench in found.benches:
        peak = NOTHING if bench.peak_bytes is None else f"{megabytes(bench.peak_bytes)} MB"
        facts = [_fact(key, value) for key, value in bench.model.items()]
        models.append((*facts, peak))
        sittings += [(bench.model["model"], at.started, load(at.load_average)) for at in bench.sittings]
    return [
        "<h2>Machine and models</h2>",
        _table([("machine", ""), *[(key, str(value)) for key, value in found.machine.items()]]),
        _table(models),
        "<h3>When, and how busy the machine was</h3>",
        _table(sittings),
        "<h2>To repeat it</h2>",
        f"<pre>{escape(found.command)}</pre>",
    ]


def _by_model(found: Found, legend: str, draw: Callable[[str], Picture]) -> list[str]:
    return [legend, *[_figure(draw(bench.model["model"]), bench.model["model"]) for bench in found.benches]]


def _figure(picture: Picture, caption: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption><div class=wide>{picture}</div></figure>"


def _legend(colour: dict[str, str]) -> str:
    entries = [f"<li class={kind}><span class=swatch></span>{escape(name)}</li>" for name, kind in colour.items()]
    return f"<ul class=legend>{''.join(entries)}</ul>"


def _table(table: Sequence[Cells]) -> str:
    """A table with its header first; columns of numbers stand right."""
    columns = zip(*table, strict=True)
    kinds = ["" if all(map(_is_number, column[1:])) else " class=name" for column in columns]

    def row(cells: Cells, tag: str) -> str:
        written = [f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)]
        return f"<tr>{''.join(written)}</tr>"

    body = "\n".join(row(cells, "td") for cells in table[1:])
    return f"<div class=wide><table><thead>{row(table[0], 'th')}</thead>\n<tbody>{body}</tbody></table></div>"


def _is_number(cell: str) -> bool:
    return cell == NOTHING or cell.lstrip("+-")[:1].isdigit()


def _style() -> str:
    def palette(values: Sequence[str]) -> str:
        return " ".join(f"--c{index}: {value};" for index, value in enumerate(values))

    classes = " ".join(f".c{index} {{ --c: var(--c{index}); }}" for index in range(len(_LIGHT)))
    return _STYLE.replace("LIGHT", palette(_LIGHT)).replace("DARK", palette(_DARK)).replace("CLASSES", classes)
