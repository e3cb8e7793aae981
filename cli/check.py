"""`specrun check`: does this draft go with this target?"""

from __future__ import annotations

import click

from specrun.cli.output import echo_json, note


@click.command()
@click.argument("target")
@click.argument("draft")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(target: str, draft: str, as_json: bool) -> None:
    """Say whether one model can draft for another.

    TARGET and DRAFT are names or folders. Exit code 1, and the reasons on stderr, if DRAFT does not fit TARGET.

    \b
    Example:
      specrun check big-model small-model
    """
    from specrun.runtime.check import check_pair

    found = check_pair(target, draft)
    if as_json:
        echo_json({"fits": found.fits, "reasons": list(found.reasons), "facts": found.facts})
    else:
        click.echo(f"{draft} {'fits' if found.fits else 'does not fit'} {target}")
        for reason in found.reasons:
            note(reason)
    if not found.fits:
        raise click.exceptions.Exit(1)
