"""`specrun plan`: the cost model of speculative decoding as a tool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specrun.cli.output import echo_json, note
from specrun.cli.types import ranges, shares

if TYPE_CHECKING:
    from specrun.runtime.kv_shape import KVShape
    from specrun.runtime.measured_costs import MeasuredCosts

SECTIONS = {
    "Speed": ("alpha", "draft_length", "phi", "model", "draft", "threads"),
    "KV memory": ("shape", "draft_shape", "batch", "positions"),
    "Best of N": ("best_of", "prefix", "suffix", "p", "pass_at"),
    "Output": ("plot", "as_json"),  # and --help
}


class _Sectioned(click.Command):
    """Lists its options by what they are about."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections = {name: title for title, names in SECTIONS.items() for name in names}
        records: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for option in self.get_params(ctx):
            if (record := option.get_help_record(ctx)) is not None:
                records[sections.get(str(option.name), "Output")].append(record)
        for title, listed in records.items():
            with formatter.section(title):
                formatter.write_dl(listed)


@click.command(cls=_Sectioned)
@click.option("--alpha", type=shares, metavar="A,...", help="Chances that a draft token stands, 0 to 1.")
@click.option(
    "--draft-length", "-k", "draft_length", type=ranges, metavar="K,...", help="Draft tokens a round: 4, 1-8 or 0-4,8."
)
@click.option("--phi", type=float, metavar="PHI", help="Cost of a draft token in plain steps of the model; else 0.1.")
@click.option(
    "-m", "--model", help="Take costs from this model on this machine: of each width of a run, and of what drafts."
)
@click.option(
    "--draft",
    "--draft-model",
    "-md",
    metavar="NAME|PATH",
    help="With --model: what drafts, a speculator of it (alpha then comes from its training) or a smaller model; "
    "n-grams if left out, which cost nothing.",
)
@click.option("--threads", type=int, help="With --model: processor threads; by default one for each core.")
@click.option(
    "--shape", metavar="NAME|LxHxD", help="Of a model without a bundle: llama-7b, or layers x KV heads x size."
)
@click.option("--draft-shape", metavar="NAME|LxHxD", help="With --shape: of what drafts for it. Shapes hold fp16.")
@click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Texts at once; 1 if left out.")
@click.option("--positions", type=click.IntRange(min=1), metavar="N", help="Length of each; else the context, or 2048.")
@click.option("--best-of", type=click.IntRange(min=1), metavar="N", help="Samples of one prompt.")
@click.option("--prefix", type=click.IntRange(min=0), metavar="TOKENS", help="With --best-of: what all have in common.")
@click.option("--suffix", type=click.IntRange(min=0), metavar="TOKENS", help="With --best-of: what each adds to that.")
@click.option("--p", type=float, metavar="P", help="With --best-of: the chance that one sample is right.")
@click.option(
    "--pass-at-k",
    "pass_at",
    type=int,
    nargs=3,
    metavar="N C K",
    help="Estimate that one of K samples is right from C right ones among N.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png|svg",
    help="Draw S over K for each alpha. Needs matplotlib.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    alpha: tuple[float, ...] | None,
    draft_length: tuple[int, ...] | None,
    phi: float | None,
    model: str | None,
    draft: str | None,
    threads: int | None,
    shape: str | None,
    draft_shape: str | None,
    batch: int | None,
    positions: int | None,
    best_of: int | None,
    prefix: int | None,
    suffix: int | None,
    p: float | None,
    pass_at: tuple[int, int, int] | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Compute what speculation would bring.

    S(alpha, K, phi) is how many times as fast as plain decoding a round of K draft tokens makes it, if verifying them
    costs one step of the model (Leviathan et al. 2023, theorem 3.8). On a processor it costs more: with --model, S is
    computed with the measured cost v(n) of n positions as well. The best K is marked with a star.

    KV memory and best-of-N, with its pass@k, have options of their own.

    Without options: the figures of the essay that specrun began with, beside the right ones.

    \b
    Examples:
      specrun plan
      specrun plan --alpha 0.7,0.9 --draft-length 1-8 --phi 0.05
      specrun plan --model smollm2-135m --draft eagle --plot eagle.svg
      specrun plan --shape llama-7b --draft-shape 2x12x64 --batch 32 --positions 2048
      specrun plan --best-of 16 --prefix 768 --suffix 512 --p 0.7
      specrun plan --pass-at-k 200 37 10
    """
    from specrun.cli import plan_output as show
    from specrun.runtime.kv_shape import KVShape
    from specrun.runtime.plan import plan_memory, plan_pass_at_k, plan_samples, plan_speed

    _require("--model", model, {"--draft": draft, "--threads": threads})
    _require("--shape", shape, {"--draft-shape": draft_shape})
    _require("--model or --shape", model or shape, {"--batch": batch, "--positions": positions})
    _require("--best-of", best_of, {"--prefix": prefix, "--suffix": suffix, "--p": p})
    if model is not None and shape is not None:
        raise click.UsageError("--model and --shape each name a model: leave one of them out.")
    shapes = [KVShape.parse(text) if text is not None else None for text in (shape, draft_shape)]
    if plot is not None:
        from specrun.cli.plan_picture import check_picture

        check_picture(plot)
    sections: list[show.Section] = []
    # What needs no model comes first: a wrong value is said before one is loaded.
    if best_of is not None:
        sections.append(show.samples(plan_samples(best_of, prefix=prefix, suffix=suffix, p=p)))
    if pass_at is not None:
        sections.append(show.pass_at_k(plan_pass_at_k(*pass_at)))
    measured, context = None, 2048
    if model is not None:
        measured, context, shapes = _measure(model, draft, threads, positions)
    if shapes[0] is not None and (shape is not None or batch is not None or positions is not None):
        memory = plan_memory(shapes[0], shapes[1], batch=batch or 1, positions=positions or context)
        sections.insert(0, show.memory(memory))
    if measured is not None or any(value is not None for value in (alpha, draft_length, phi, plot)):
        speed = plan_speed(alpha, draft_length, phi, measured)
        sections.insert(0, show.speed(speed))
        if plot is not None:
            from specrun.cli.plan_picture import draw_speed

            draw_speed(speed, plot)
            note(f"picture: {plot}")
    sections = sections or [show.essay()]
    if as_json:
        echo_json({section.key: section.value for section in sections})
        return
    click.echo("\n\n".join("\n".join(section.lines) for section in sections))


def _require(names: str, given: object, options: dict[str, object]) -> None:
    """Refuse an option that says nothing without another one."""
    for option, value in options.items():
        if value is not None and given is None:
            raise click.UsageError(f"{option} says nothing without {names}: give that too.")


def _measure(
    model: str, draft: str | None, threads: int | None, positions: int | None
) -> tuple[MeasuredCosts, int, list[KVShape | None]]:
    """(costs of a model and of what drafts for it, its context, the shapes of both)."""
    from specrun.cli.opening import open_engine
    from specrun.models_cache.errors import UsageError
    from specrun.runtime.heads import find_draft
    from specrun.runtime.kv_shape import KVShape
    from specrun.runtime.measured_costs import measured_costs

    with open_engine(model, draft=draft, threads=threads) as engine:
        bundle, context = engine.bundle, engine.context
        if positions is not None and positions > context:
            raise UsageError(
                f"{bundle.manifest.name} has a context of {context} positions: give --positions up to that."
            )
        drafting = find_draft(bundle, draft) if draft is not None else None
        costs = measured_costs(engine, drafting)
    return costs, context, [KVShape.of_bundle(bundle), KVShape.of_drafting(drafting, bundle)]
