"""Lists on the command line: `ngram,draft`, `none,ngram:4,lookahead:5/4/5`, `1,2,4`, `0-8,16` and `0.5,0.7`."""

from __future__ import annotations

import click

ALL_METHODS = "all"
PRECISION = click.Choice(["int8", "int4", "fp32", "source"])
EXPORT_PRECISION = click.Choice(["int8", "int4", "fp32", "source", "fp16", "bf16"])


def methods(value: str) -> tuple[str, ...]:
    """The methods of a list."""
    from specrun.runtime.request import METHODS, canonical_method

    found = tuple(map(canonical_method, value.replace(",", " ").split()))
    if not found:
        raise click.BadParameter(f"{value!r} names nothing: give a list such as ngram,eagle+ngram.")
    for method in found:
        if method not in METHODS:
            raise click.BadParameter(f"there is no method {method!r}: choose from {', '.join(METHODS)}.")
    return found


def timed_methods(value: str) -> tuple[str, ...]:
    """The methods of a list, each with a K of its own if it has one, `ngram:4`, or a shape, `lookahead:5/4/5`.

    Or `ALL_METHODS` alone.
    """
    if value.strip() == ALL_METHODS:
        return (ALL_METHODS,)
    parts = [entry.partition(":") for entry in value.replace(",", " ").split()]
    names = methods(",".join(name for name, _, _ in parts))
    found = tuple(f"{name}{colon}{k}" for name, (_, colon, k) in zip(names, parts, strict=True))
    for entry in found:
        method, colon, k = entry.partition(":")
        if colon:
            if method == "none":
                raise click.BadParameter("'none' drafts nothing and takes no K.")
            if method == "lookahead" and "/" in k:
                lookahead_shape(k.replace("/", ","))
            elif len(numbers(k)) != 1:
                raise click.BadParameter(f"{entry!r} must have one K, as in ngram:4.")
    return found


def lookahead_shape(value: str) -> tuple[int, ...]:
    """W, N and G of lookahead decoding."""
    from specrun.models_cache.errors import UsageError
    from specrun.runtime.lookahead import LookaheadShape

    shape = numbers(value)
    try:
        LookaheadShape.of(shape)
    except UsageError as error:
        raise click.BadParameter(str(error)) from None
    return shape


def numbers(value: str) -> tuple[int, ...]:
    """The whole numbers above 0 of a list."""
    try:
        found = tuple(int(number) for number in value.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r} is no list of whole numbers above 0, such as 1,2,4.")
    return found


def ranges(value: str) -> tuple[int, ...]:
    """The whole numbers, 0 or more, of a list of numbers and ranges such as `0-8,16`, ascending."""
    from specrun.runtime.cost_model import MOST_DRAFT_TOKENS

    found: set[int] = set()
    for entry in value.replace(",", " ").split():
        low, dash, high = entry.partition("-")
        try:
            first, last = int(low), int(high if dash else low)
        except ValueError:
            first, last = 1, 0
        if not 0 <= first <= last <= MOST_DRAFT_TOKENS:
            raise click.BadParameter(
                f"{entry!r} is no number or range from 0 to {MOST_DRAFT_TOKENS}, such as 4 or 1-8."
            )
        found.update(range(first, last + 1))
    if not found:
        raise click.BadParameter(f"{value!r} names nothing: give a list such as 1-8,16.")
    return tuple(sorted(found))


def shares(value: str) -> tuple[float, ...]:
    """The numbers from 0 to 1 of a list, ascending."""
    return tuple(sorted(set(chances(value))))


def chances(value: str) -> tuple[float, ...]:
    """The numbers from 0 to 1 of a list."""
    try:
        found = tuple(float(number) for number in value.replace(",", " ").split())
    except ValueError:
        found = ()
    if not found or not all(0 <= number <= 1 for number in found):
        raise click.BadParameter(f"{value!r} is no list of numbers from 0 to 1, such as 0.5,0.9.")
    return found
