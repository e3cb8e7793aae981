"""`specrun verify`: the proof, on this machine, that speculation changes no text."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.opening import open_engine
from specrun.cli.options import LOOKAHEAD, engine_options, engine_values
from specrun.cli.output import echo_json, note, progress_line
from specrun.cli.types import methods as method_names
from specrun.cli.types import numbers

if TYPE_CHECKING:
    from specrun.runtime.calibration import Calibration


@click.command()
@engine_options
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.jsonl",
    help="A prompt a line: objects with turns, prompt or messages. By default four built-in prompts.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens of each text.")
@click.option(
    "--methods",
    type=method_names,
    metavar="NAME,...",
    help="Methods, such as ngram,eagle+ngram; by default all that can run with what the model has and --draft.",
)
@click.option(
    "--draft-lengths",
    type=numbers,
    metavar="K,...",
    default="1,2,3,4,5,8,16",
    show_default=True,
    help="Values of K; adaptive is added.",
)
@click.option(
    "--batch-sizes",
    type=numbers,
    metavar="N,...",
    default="1,3",
    show_default=True,
    help="Prompts that run together; 1 runs each alone.",
)
@LOOKAHEAD
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify(
    prompts_file: Path | None,
    limit: int | None,
    max_tokens: int,
    methods: tuple[str, ...] | None,
    draft_lengths: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    lookahead: tuple[int, ...] | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Prove that speculation changes no text.

    Every method, draft length and batch is compared with plain decoding alone, greedy and sampled, token by token;
    medusa and eagle propose chains in a batch and with a draft length, and token trees where it is adaptive, lookahead
    trees of that depth. Ends with exit code 1 at the first text that differs, and says where; only where the probe
    found no width at which rows are equal to the last bit, tokens nearer to each other than rounding may turn can
    change places.

    \b
    Examples:
      specrun verify
      specrun verify --model big-model --draft small-model --methods draft --draft-lengths 2,4
      specrun verify --prompts questions.jsonl --limit 10 --max-tokens 32
    """
    from specrun.runtime.bench import load_prompts
    from specrun.runtime.verify import PROMPTS
    from specrun.runtime.verify import verify as verify_engine

    prompts = [entry.prompt for entry in load_prompts(prompts_file)] if prompts_file is not None else list(PROMPTS)
    rows = []
    failed = None
    with open_engine(**engine_values(values), methods=methods or ()) as engine, progress_line() as progress:
        for method in methods or ():
            engine.require_method(method)
        if not as_json:
            click.echo(_row("method", "K", "batch", "sampling", "prompts", "tokens", "equal"))
        cases = verify_engine(
            engine,
            prompts[:limit],
            methods=methods,
            draft_lengths=draft_lengths,
            batch_sizes=batch_sizes,
            lookahead=lookahead,
            max_tokens=max_tokens,
            progress=progress.on_terminal,
        )
        with closing(cases):  # type: ignore[type-var]
            for case in cases:
                rows.append(asdict(case))
                progress.close()
                if not as_json:
                    k = "-" if case.method == "none" else str(case.draft_length or "adaptive")
                    equal = "yes" if case.equal else "near" if case.rounding else "NO"
                    counts = (str(case.prompts), str(case.tokens))
                    click.echo(_row(case.method, k, str(case.batch), case.sampling, *counts, equal))
                if not case.holds:
                    failed = case
                    break
        name, calibration, device = engine.bundle.manifest.name, engine.calibration, engine.device
    exactness, bound = calibration.exactness, calibration.bound_of(max((row["batch"] for row in rows), default=1))
    if as_json:
        facts = {"model": name, "ok": failed is None, "exactness": exactness, "bound": bound, "device": device.name}
        echo_json({**facts, "cases": rows})
    if failed is not None:
        batch = f" in a batch of {failed.batch}" if failed.batch > 1 else ""
        k = str(failed.draft_length or "adaptive")
        note(f"Error: {failed.method} with K {k}{batch} differs: {failed.difference}")
        raise click.exceptions.Exit(1)
    if not as_json:
        near = sum(not row["equal"] for row in rows)
        if near:
            note(
                f"{name}: {len(rows) - near} of {len(rows)} cases equal plain decoding, and {near} differ from it only "
                f"where two tokens were nearer than rounding may turn: logits of runs of different shapes differ by up "
                f"to {bound:.2g} on {device.name} (rounding)"
            )
        else:
            note(f"{name}: all {len(rows)} cases equal plain decoding ({_held(calibration, device.name)})")


def _held(calibration: Calibration, device: str) -> str:
    """What the probe found, in a few words."""
    if calibration.exactness == "rounding":
        return f"rounding: logits of runs of different widths differ by up to {calibration.bound:.2g} on {device}"
    alone = "" if calibration.batches else "; rows of a batch are equal only up to rounding"
    return (
        f"bitwise, every run of {calibration.width_multiple} positions{alone}"
        if calibration.pinned
        else (f"bitwise{alone}")
    )


def _row(*cells: str) -> str:
    widths = (12, 8, 5, 8, 7, 7, 5)
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
