"""From the name of a model to a loaded engine; the default model is fetched where it is missing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from specrun.cli.options import DEFAULT_MODEL
from specrun.cli.output import is_terminal, note, progress_line, waiting

if TYPE_CHECKING:
    from specrun.models_cache import Bundle
    from specrun.runtime import Engine


def open_engine(
    model: str,
    *,
    draft: str | None = None,
    threads: int | None = None,
    device: str = "cpu",
    context: int | None = None,
    yes: bool = False,
) -> Engine:
    """Load a model, and what drafts for it, as `Engine.load` does, with the default model fetched."""
    from specrun.runtime import Engine
    from specrun.runtime.heads import find_draft

    bundle = ensure_model(model, yes=yes)
    drafting = find_draft(bundle, draft) if draft is not None else None
    with waiting(f"loading {bundle.manifest.name}"):
        return Engine(bundle, draft=drafting, threads=threads, device=device, context=context)


def ensure_model(name: str, *, yes: bool = False) -> Bundle:
    """The bundle of that name or path. If it is the default model and missing: ask on a terminal, then pull it."""
    from specrun.models_cache import REGISTRY, ModelNotFoundError, find_bundle

    try:
        return find_bundle(name)
    except ModelNotFoundError:
        if name != DEFAULT_MODEL:
            raise
        size = next(row.size for row in REGISTRY if row.name == DEFAULT_MODEL)
        if not yes and is_terminal(sys.stdin) and is_terminal(sys.stderr):
            question = f"{name} is not here yet: pull it now? ({size / 1e6:.0f} MB)"
            if not click.confirm(question, default=True, err=True):
                raise
        else:
            note(f"{name} is not here yet: pulling it ({size / 1e6:.0f} MB)")
    from specrun.export.bundle import export_bundle

    with progress_line() as progress:
        return export_bundle(name, progress=progress)
