"""`specrun bench`: methods timed against the fastest plain loop."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from specrun.cli.bench_tables import Found, describe, lines
from specrun.cli.opening import ensure_model, open_engine
from specrun.cli.options import engine_values, engines_options
from specrun.cli.output import echo_json, note, progress_line
from specrun.cli.types import ALL_METHODS, chances, numbers, timed_methods

if TYPE_CHECKING:
    from specrun.runtime import Engine
    from specrun.runtime.bench_runs import Bench, BenchPrompt

DEFAULT_METHODS = ("none", "ngram")


@click.command()
@engines_options
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
    help="Methods, such as none,ngram,eagle+ngram; ngram:4 fixes K to 4, lookahead:5/4/5 sets W, N and G; all: every "
    "one that the model can run. By default none,ngram. With --synthetic-acceptance, whose drafting is paid for: by "
    "default draft, or none (which costs nothing) where the model has no draft.",
)
@click.option("--draft-length", "-k", type=click.IntRange(min=1), metavar="K", help="K of methods without one.")
@click.option("--max-tokens", type=click.IntRange(min=2), default=128, show_default=True, help="Tokens of each text.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each; the median counts."
)
@click.option(
    "--synthetic-acceptance",
    "acceptances",
    type=chances,
    metavar="A,...",
    help="Instead of methods, time rounds whose draft tokens stand with chance A, and compare with the cost model.",
)
@click.option(
    "--draft-lengths",
    type=numbers,
    metavar="K,...",
    default="1,2,4,8",
    show_default=True,
    help="Values of K with --synthetic-acceptance.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.jsonl",
    help="Keep each run here; a second call goes on where the first one stopped.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE.html",
    help="Write a page with tables and pictures, which needs no other file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    models: tuple[str, ...],
    prompts_file: Path | None,
    report_file: Path | None,
    as_json: bool,
    per_category: int | None,
    **values: Any,
) -> None:
    """Time methods on this machine, in turn, prompt by prompt.

    The baseline is plain decoding at its fastest, which gives up exactness; "none" is exact plain decoding. `ratio` is
    how much faster than the baseline a method writes a token, with its 95 % interval over prompts; `MAT` the tokens
    that a run of the model commits; `equal` whether its texts are those of "none". Then, for each method, the
    milliseconds of a round by part (`ms over`: outside ONNX Runtime), its memory, and what training its speculator
    took. Several models are timed one after another, each against its own baseline.

    With --synthetic-acceptance: `S` is the speed-up by the clock over the baseline, `predicted` that of
    E / (K phi + v + r), with the costs of drafting, of the run and of the rest in units of the baseline's time a token;
    `got` and `MAT` are what chance made of alpha and E; `by MAT` is predicted with those; `S none` is over "none".

    \b
    Examples:
      specrun bench
      specrun bench --methods none,ngram,ngram:4 --max-tokens 64 --repeats 1
      specrun bench --methods none,lookahead,lookahead:5/4/5
      specrun bench --methods all --prompts questions.jsonl --report report.html
      specrun bench --prompts questions.jsonl --per-category 2 --output runs.jsonl
      specrun bench --synthetic-acceptance 0.5,0.9 --draft-lengths 2,4
    """
    from specrun.runtime.bench import load_prompts
    from specrun.runtime.bench_axes import method_axes
    from specrun.runtime.bench_environment import machine_facts
    from specrun.runtime.bench_summary import summarise
    from specrun.runtime.heads import find_draft
    from specrun.runtime.synthetic import summarise_synthetic

    _check(models, report_file, values)
    prompts = load_prompts(prompts_file, per_category=per_category) if prompts_file is not None else _built_in()
    bundles = [ensure_model(name, yes=values["yes"]) for name in models]
    names = [bundle.manifest.name for bundle in bundles]
    if len(set(names)) < len(names):
        raise click.UsageError(f"Two models have one name ({', '.join(names)}): give each once.")
    benches, rows, axes, cells = [], [], [], []
    for name, bundle in zip(models, bundles, strict=True):
        timed = _time(name, prompts, values)
        benches.append(timed)
        if values["acceptances"]:
            found_cells = summarise_synthetic(timed.runs)
            if values["methods"] is None and all(cell.method == "none" for cell in found_cells):
                note(f"{bundle.manifest.name} has no draft: drafting costs nothing here")
            cells += found_cells
            continue
        summary = summarise(timed.runs)
        rows += summary
        draft = find_draft(bundle, values["draft"]) if values["draft"] is not None else None
        axes += method_axes(summary, bundle, draft)
    found = Found(_command(), machine_facts(), benches, rows, axes, cells)
    if as_json:
        echo_json(found.to_json())
    else:
        _print(found)
    if report_file is not None:  # last: whatever becomes of it, the tables are there
        from specrun.cli.bench_report import write_report

        write_report(report_file, found)


def _print(found: Found) -> None:
    note(", ".join(f"{key} {value}" for key, value in found.machine.items()))
    for timed in found.benches:
        note(describe(timed))
    click.echo("\n\n".join("\n".join(lines(table)) for table in found.tables))
    if found.losing:
        note(f"Slower here than plain decoding: {', '.join(found.losing)}")


def _check(models: tuple[str, ...], report_file: Path | None, values: dict[str, Any]) -> None:
    """What would otherwise come out only after the runs."""
    if report_file is not None:
        _try_report(report_file)
    if values["acceptances"]:
        if values["draft_length"] is not None:
            raise click.UsageError("--synthetic-acceptance takes --draft-lengths in place of --draft-length.")
        for method in values["methods"] or ():
            if method in (ALL_METHODS, "lookahead") or ":" in method or "+" in method:
                raise click.UsageError(f"--synthetic-acceptance times single ways of drafting, not {method}.")


def _try_report(path: Path) -> None:
    """Open it for writing, and leave it as it was."""
    if not path.absolute().parent.is_dir():
        raise click.UsageError(f"There is no folder {path.parent} for the report: make it first.")
    try:
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise click.UsageError(
            f"The report {path} cannot be written ({error.strerror}): choose another --report."
        ) from None


def _time(name: str, prompts: list[BenchPrompt], values: dict[str, Any]) -> Bench:
    """Time one model."""
    from specrun.runtime import METHODS
    from specrun.runtime.bench import run_bench
    from specrun.runtime.synthetic import run_synthetic

    methods, acceptances = values["methods"], values["acceptances"]
    wanted = methods or (("draft",) if acceptances else DEFAULT_METHODS)
    attached = METHODS if wanted == (ALL_METHODS,) else wanted
    options = {key: values[key] for key in ("max_tokens", "repeats", "output")}
    with open_engine(name, **engine_values(values), methods=attached) as engine, progress_line() as progress:
        if acceptances:
            lengths = values["draft_lengths"]
            return run_synthetic(
                engine,
                prompts,
                acceptances=acceptances,
                draft_lengths=lengths,
                methods=methods,
                progress=progress,
                **options,
            )
        chosen = _methods(engine, wanted)
        return run_bench(
            engine, prompts, methods=chosen, draft_length=values["draft_length"], progress=progress, **options
        )


def _methods(engine: Engine, wanted: tuple[str, ...]) -> tuple[str, ...]:
    if wanted == (ALL_METHODS,):
        return engine.methods
    for method in wanted:
        engine.require_method(method.partition(":")[0])
    return wanted


def _built_in() -> list[BenchPrompt]:
    from specrun.runtime.bench import BenchPrompt
    from specrun.runtime.verify import PROMPTS

    return [BenchPrompt(str(number), "built-in", prompt) for number, prompt in enumerate(PROMPTS, 1)]


def _command() -> str:
    """The command line that repeats this call."""
    context = click.get_current_context()
    words = ["specrun", "bench"]
    for parameter in context.command.params:
        name = str(parameter.name)
        if not isinstance(parameter, click.Option) or (
            context.get_parameter_source(name) is not ParameterSource.COMMANDLINE
        ):
            continue
        value, option = context.params[name], max(parameter.opts, key=len)
        if parameter.is_flag:
            words.append(option)
        elif parameter.multiple:
            for entry in value:
                words += [option, str(entry)]
        else:
            words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return shlex.join(words)
