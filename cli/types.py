"""Lists on the command line: `ngram,draft` and `1,2,4`."""

from __future__ import annotations

import click


def names(value: str) -> tuple[str, ...]:
    """The names of a list."""
    found = tuple(value.replace(",", " ").split())
    if not found:
        raise click.BadParameter(f"{value!r} names nothing: give a list such as ngram,draft.")
    return found


def numbers(value: str) -> tuple[int, ...]:
    """The whole numbers above 0 of a list."""
    try:
        found = tuple(int(number) for number in value.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r} is no list of whole numbers above 0, such as 1,2,4.")
    return found
