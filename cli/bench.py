"""`specrun bench`: methods timed against the fastest plain loop."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.opening import open_engine
from specrun.cli.options import engine_options, engine_values
from specrun.cli.output import echo_json, note, progress_line
from specrun.cli.types import timed_methods

if TYPE_CHECKING:
    from specrun.runtime.bench import BenchPrompt, Summary


@click.command()
@engine_options
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.jsonl",
    help="A prompt a line: objects with turns, prompt or messages, and category. By default four built-in prompts.",
)
@click.option("--per-category", type=click.IntRange(min=1), metavar="N", help="Only the first N of each category.")
@click.option(
    "--methods",
    type=timed_methods,
    metavar="NAME,...",
    default="none,ngram",
    show_default=True,
    help="Methods, such as none,ngram,eagle+ngram; ngram:4 fixes K to 4, lookahead:5/4/5 sets W, N and G.",
)
@click.option("--draft-length", "-k", type=click.IntRange(min=1), metavar="K", help="K of methods without one.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of each text.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each; the median counts."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.jsonl",
    help="Keep each run here; a second call goes on where the first one stopped.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    prompts_file: Path | None,
    per_category: int | None,
    methods: tuple[str, ...],
    draft_length: int | None,
    max_tokens: int,
    repeats: int,
    output: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Time methods on this machine, in turn, prompt by prompt.

    The baseline is plain decoding at its fastest, which gives up exactness; "none" is exact plain decoding. `ratio` is
    how much faster than the baseline a method writes a token, `MAT` the tokens that a run of the model commits, `ms
    draft` and `ms verify` the milliseconds a round of drafting and of that run, `ms over` those outside ONNX Runtime,
    `equal` whether its texts are those of "none".

    \b
    Examples:
      specrun bench
      specrun bench --methods none,ngram,ngram:4 --max-tokens 64 --repeats 1
      specrun bench --methods ngram,eagle,eagle+ngram
      specrun bench --methods none,lookahead,lookahead:5/4/5
      specrun bench --prompts questions.jsonl --per-category 2 --output runs.jsonl
    """
    from specrun.runtime.bench import environment, load_prompts, run_bench, summarise

    prompts = load_prompts(prompts_file, per_category=per_category) if prompts_file is not None else _built_in()
    with open_engine(**engine_values(values), methods=methods) as engine, progress_line() as progress:
        for method in methods:
            engine.require_method(method.partition(":")[0])
        runs = run_bench(
            engine,
            prompts,
            methods=methods,
            draft_length=draft_length,
            max_tokens=max_tokens,
            repeats=repeats,
            output=output,
            progress=progress,
        )
        settings = environment(engine)
    rows = summarise(runs)
    if as_json:
        echo_json({"environment": settings, "summary": [asdict(row) for row in rows]})
        return
    note(", ".join(f"{key} {value}" for key, value in settings.items() if key != "digest"))
    names = ("category", "method", "prompts", "tokens/s", "ratio", "MAT", "accept", "ms draft", "ms verify", "ms over")
    click.echo(_line(*names, "equal"))
    for row in rows:
        click.echo(_line(*_cells(row)))
    losing = [row.method for row in rows if row.category == rows[-1].category and row.loses]
    if losing:
        note(f"Slower here than plain decoding: {', '.join(losing)}")


def _built_in() -> list[BenchPrompt]:
    from specrun.runtime.bench import BenchPrompt
    from specrun.runtime.verify import PROMPTS

    return [BenchPrompt(str(number), "built-in", prompt) for number, prompt in enumerate(PROMPTS, 1)]


def _cells(row: Summary) -> tuple[str, ...]:
    return (
        row.category,
        row.method,
        str(row.prompts),
        f"{row.tokens_per_s:.1f}",
        f"{row.ratio:.2f}",
        f"{row.mean_accepted_tokens:.2f}",
        f"{row.acceptance_rate:.0%}",
        f"{row.draft_ms:.2f}",
        f"{row.verify_ms:.2f}",
        f"{row.overhead_ms:.2f}",
        {True: "yes", False: "NO", None: "-"}[row.equal],
    )


def _line(*cells: str) -> str:
    widths = (14, 16, 7, 8, 5, 5, 6, 8, 9, 7, 5)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
