"""`specrun train`: heads or a small draft for a model, with no data needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from specrun.cli.opening import ensure_model
from specrun.cli.options import DEFAULT_MODEL
from specrun.cli.output import echo_json, note, progress_line

MOST_PASSES = 10_000
TRAIN_HINT = "Training needs torch: install it with `pip install 'specrun[train]'`."


def _number_of_passes(text: str) -> float:
    try:
        passes = float(text)
    except ValueError:
        passes = 0.0
    if not 0.0 < passes <= MOST_PASSES:  # which NaN is not either
        raise click.BadParameter(f"{text!r} is no number above 0 and up to {MOST_PASSES:,}, such as 2.5.")
    return passes


@click.command()
@click.argument("method", type=click.Choice(["medusa", "eagle", "draft"]))
@click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, help="A model's name, or its folder.")
@click.option("--name", help="Keep the speculator under this name; by default that of the method.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=1_500_000,
    show_default=True,
    help="Length of the training text. The text is kept, and serves every method.",
)
@click.option("--passes", type=_number_of_passes, metavar="NUMBER", help="Over the text; by default 3 to 4.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Train on answers to these prompts, a line each (objects with turns, prompt or messages), instead of "
    "self-written ones. Each is answered once, so it takes thousands of them.",
)
@click.option(
    "--from",
    "start_name",
    metavar="NAME",
    help="Go on from the weights of this speculator of the model, on more text or for more passes, at half the "
    "learning rate. With --force it may be replaced by what it becomes.",
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of text and training.")
@click.option("--threads", type=click.IntRange(min=1), help="Processor threads; by default one for each core.")
@click.option(
    "--keep-features/--no-keep-features",
    default=False,
    help="Keep what the model computed over the text, for training another method; by default it is deleted at the "
    "end, and computed again from the text when it is needed.",
)
@click.option("--restart", is_flag=True, help="Begin the training anew instead of going on from its checkpoint.")
@click.option("--force", is_flag=True, help="Replace a speculator of that name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def train(
    method: str,
    model: str,
    name: str | None,
    tokens: int,
    passes: float | None,
    prompts_file: Path | None,
    start_name: str | None,
    seed: int,
    threads: int | None,
    keep_features: bool,
    restart: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Train heads that guess a model's next tokens, or a small draft.

    \b
    medusa  heads on top of the model, each for one place ahead: cheap, and the quickest to train
    eagle   one layer on top of the model that is run once for each place ahead: guesses best
    draft   a small model that shares the target's vocabulary: needs nothing of the model while it runs

    The model writes the training text itself. Text and checkpoint are kept below SPECRUN_HOME/training: after Ctrl-C or
    a crash the same command goes on where it was. The default model takes about two hours on two cores.

    What the model computes over the text is large: for the default model and --tokens it takes 6.9 GB of disk until the
    end of the training.

    Prints the name that --method and --draft take. The report, with the acceptance that was measured on held-out text,
    is kept with the speculator.

    \b
    Examples:
      specrun train medusa --model mine
      specrun train eagle --model mine --tokens 3000000
      specrun train eagle --model mine --tokens 4000000 --from eagle --force
      specrun generate --model mine --method eagle+ngram "Hello"
    """
    from specrun.models_cache.errors import UsageError
    from specrun.runtime.backend import default_threads

    try:
        import torch  # noqa: F401  (only to say early that it is missing)
    except ImportError:
        raise UsageError(TRAIN_HINT) from None
    from specrun.export.shipped_speculators import ensure_shipped
    from specrun.export.speculator_weights import read_speculator
    from specrun.export.training.text_writer import fitting_prompts
    from specrun.export.training.train import train_speculator
    from specrun.models_cache.speculator import find_speculator
    from specrun.runtime.bench import load_prompts

    bundle = ensure_model(model)
    start = None
    if start_name is not None:
        ensure_shipped(bundle)
        start = read_speculator(find_speculator(bundle, start_name).path)
    prompts = None
    if prompts_file is not None:
        prompts = fitting_prompts(bundle, [entry.prompt for entry in load_prompts(prompts_file)])
    with _says_what_is_kept(), progress_line() as progress:
        trained = train_speculator(
            bundle,
            method,
            name=name,
            tokens=tokens,
            passes=passes,
            seed=seed,
            threads=threads or default_threads(),
            keep_features=keep_features,
            prompts=prompts,
            start=start,
            restart=restart,
            force=force,
            progress=progress,
        )
    report, features_bytes = trained.speculator.report, trained.text.features_bytes()
    facts = {
        "name": trained.installed.name,
        "method": method,
        "model": bundle.manifest.name,
        "path": str(trained.installed.path),
        "weights": str(trained.folder),
        "text": str(trained.text.folder),
        "features_bytes": features_bytes,
        "acceptance": trained.speculator.acceptance,
        "report": report,
    }
    if as_json:
        echo_json(facts)
        return
    held_out = report["held_out"]["mean_accepted_tokens"]
    note(f"{held_out:.2f} tokens a round on held-out text, as a chain of {len(trained.speculator.acceptance)}")
    note(
        "chance that a guess is right by depth: " + ", ".join(f"{row[0]:.0%}" for row in trained.speculator.acceptance)
    )
    note(f"weights and report: {trained.folder}")
    if features_bytes:
        note(f"features for the next training: {features_bytes / 1e9:.2f} GB in {trained.text.folder}")
    click.echo(trained.installed.name)


@contextmanager
def _says_what_is_kept() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        note("Interrupted: the text and the last checkpoint are kept, and the same command goes on from there.")
        raise
