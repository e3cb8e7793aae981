"""`specrun tune`: what pays on this machine, measured once and used from then on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.opening import open_engine
from specrun.cli.options import engine_options, engine_values
from specrun.cli.output import echo_json, note, progress_line
from specrun.cli.types import methods as method_list

if TYPE_CHECKING:
    from specrun.runtime import Engine
    from specrun.runtime.engine import Prompt
    from specrun.runtime.tuning import Tuning


@click.command()
@engine_options
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.jsonl",
    help="A prompt a line (objects with turns, prompt or messages), such as you will ask. By default eight built-in "
    "ones.",
)
@click.option("--per-category", type=click.IntRange(min=1), metavar="N", help="Only the first N of each category.")
@click.option("--methods", type=method_list, metavar="NAME,...", help="Measure these; by default all that may pay.")
@click.option("--max-tokens", type=click.IntRange(min=8), default=96, show_default=True, help="Tokens of each text.")
@click.option("--show", is_flag=True, help="Measure nothing: show what was measured, and what auto makes of it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tune(
    prompts_file: Path | None,
    per_category: int | None,
    methods: tuple[str, ...] | None,
    max_tokens: int,
    show: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure what pays on this machine, for --method auto.

    Times each method on a few prompts and keeps the figures for this model, machine and number of threads below
    SPECRUN_HOME: what a run of each width costs, what each proposer costs and how often it is right. From then on
    requests begin with them, and `auto` takes the fastest method; while a request runs, it still drafts only what pays.
    Do it on a quiet machine: it takes about a minute for the default model.

    \b
    Examples:
      specrun tune
      specrun tune --prompts my-questions.jsonl
      specrun tune --show
    """
    from specrun.runtime.bench import load_prompts
    from specrun.runtime.tune import PROMPTS
    from specrun.runtime.tune import tune as tune_engine

    prompts: list[Prompt] = list(PROMPTS)
    if prompts_file is not None:
        prompts = [entry.prompt for entry in load_prompts(prompts_file, per_category=per_category)]
    with open_engine(**engine_values(values), methods=methods or ()) as engine:
        if show:
            tuning = engine.tuning
        else:
            with progress_line() as progress:
                tuning = tune_engine(engine, prompts, methods=methods, max_tokens=max_tokens, progress=progress)
        _print(engine, tuning, as_json)


def _print(engine: Engine, tuning: Tuning, as_json: bool) -> None:
    automatic = engine.resolve_method("auto")
    widths = (1, 2, 3, 4, 5, 6, 8, 9, 13, 17)
    costs = {width: engine.calibration.cost(width) for width in widths}
    if as_json:
        echo_json(
            {
                "model": engine.bundle.manifest.name,
                "threads": engine.threads,
                "exactness": engine.calibration.exactness,
                "tuned": bool(tuning.methods),
                "auto": automatic,
                "costs_ms": {str(width): 1e3 * cost for width, cost in costs.items()},
                "per_1000_tokens_ms": 1e6 * tuning.beyond,
                "prompts": tuning.prompts,
                "methods": {method: asdict(figures) for method, figures in tuning.methods.items()},
            }
        )
        return
    click.echo("positions   " + "".join(f"{width:>7}" for width in widths))
    click.echo("ms a run    " + "".join(f"{1e3 * cost:>7.2f}" for cost in costs.values()))
    click.echo("of width 1  " + "".join(f"{cost / costs[1]:>7.2f}" for cost in costs.values()))
    if not tuning.methods:
        click.echo(f"auto: {automatic} (nothing was measured yet: run `specrun tune`)")
        return
    click.echo(f"each 1,000 tokens of text add {1e6 * tuning.beyond:.2f} ms to a run")
    click.echo()
    click.echo("method          tokens/s  of plain  MAT   accept  ms draft  ms verify  right by depth")
    for method, row in sorted(tuning.methods.items(), key=lambda item: item[1].seconds_per_token):
        depths = " ".join(f"{chance:.0%}" for chance in row.acceptance)
        click.echo(
            f"{method:<14}{1 / row.seconds_per_token:>10.1f}{row.ratio:>10.2f}{row.mean_accepted_tokens:>6.2f}"
            f"{row.acceptance_rate:>8.0%}{row.draft_ms:>10.2f}{row.verify_ms:>11.2f}  {depths}".rstrip()
        )
    click.echo()
    click.echo(f"auto: {automatic}")
    losing = [method for method, row in tuning.methods.items() if row.ratio < 1.0]
    if losing:
        note(f"slower than plain decoding here: {', '.join(losing)}")
