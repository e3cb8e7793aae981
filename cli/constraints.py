"""Options that say what a text must fit (--json-schema, --regex, --grammar) or is likely to be (--prediction)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

_NAMES = ("json_schema", "regex", "grammar")


def constraint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--json-schema, --regex, --grammar, --prediction."""
    for option in (
        click.option(
            "--prediction",
            type=click.Path(exists=True, dir_okay=False),
            metavar="FILE",
            help="Text that is likely to come, such as a file before a small change: drafts are copied from it.",
        ),
        click.option(
            "--grammar",
            type=click.Path(exists=True, dir_okay=False),
            metavar="FILE",
            help="The text fits the grammar in this file (Lark, as llguidance reads it).",
        ),
        click.option("--regex", metavar="REGEX", help="The text fits this regular expression, as a whole."),
        click.option(
            "--json-schema",
            metavar="FILE|JSON",
            help="The text is JSON that fits this schema (a file, or JSON); the prompt should ask for it too.",
        ),
    ):
        command = option(command)
    return command


def constraint_values(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that `Engine.stream` takes, with files read."""
    found: dict[str, Any] = {name: values[name] for name in _NAMES}
    schema, grammar = found["json_schema"], found["grammar"]
    if schema is not None and schema.lstrip()[:1] not in ("{", "[", '"') and schema.strip() not in ("true", "false"):
        found["json_schema"] = read_text(schema, "--json-schema")
    if grammar is not None:
        found["grammar"] = read_text(grammar, "--grammar")
    if values["prediction"] is not None:
        found["prediction"] = read_text(values["prediction"], "--prediction")
    return found


def read_text(path: str, option: str) -> str:
    """The text of a file that an option names; UsageError if it cannot be read or is no UTF-8."""
    from specrun.models_cache.errors import UsageError

    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{option}: {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{option}: {path} is not UTF-8 text (at byte {error.start}): convert it first.") from None
