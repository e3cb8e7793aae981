"""From the name of a model to a loaded engine; the default model is fetched where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from specrun.cli.options import DEFAULT_MODEL
from specrun.cli.output import is_terminal, note, progress_line, waiting

if TYPE_CHECKING:
    from specrun.models_cache import Bundle
    from specrun.runtime import Engine


OWN_PROCESS = False
"""Whether nothing else runs in this process, so that all sessions may share their threads."""


def open_engine(
    model: str,
    *,
    draft: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    draft_device: str | None = None,
    context: int | None = None,
    yes: bool = False,
    methods: Iterable[str | None] = (),
) -> Engine:
    """Load a model, and what drafts for it, as `Engine.load` does, with the default model fetched.

    methods: what requests will name; a speculator that specrun ships for one of them is attached where it is missing.
    """
    from specrun.runtime import Engine, share_threads
    from specrun.runtime.device import cuda_problem, made_for
    from specrun.runtime.heads import find_draft

    if OWN_PROCESS:
        share_threads()
    bundle = ensure_model(model, yes=yes)
    ensure_speculators(bundle, draft, methods)
    drafting = find_draft(bundle, draft) if draft is not None else None
    with waiting(f"loading {bundle.manifest.name}"):
        engine = Engine(
            bundle, draft=drafting, threads=threads, device=device, draft_device=draft_device, context=context
        )
    if device == "auto" and engine.device.kind == "cpu" and made_for(bundle.manifest) == "cuda":
        note(f"{bundle.manifest.name} was exported for a GPU and runs on the CPU, slowly: {cuda_problem()}")
    return engine


def ensure_speculators(bundle: Bundle, draft: str | None, methods: Iterable[str | None]) -> None:
    """Attach what specrun ships where a method is asked for that nothing in the bundle serves."""
    wanted = {part for method in methods if method for part in method.partition(":")[0].split("+")}
    # --draft names what serves, unless it is the name of one that ships.
    wanted = ({draft} if draft is not None else wanted) & {"medusa", "eagle", "draft"}
    if not wanted - {speculator.manifest.method for speculator in bundle.speculators()}:
        return
    from specrun.export.shipped_speculators import ensure_shipped

    with progress_line() as progress:
        ensure_shipped(bundle, progress)


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
