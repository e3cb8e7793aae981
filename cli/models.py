"""`specrun models`: list, pull, path, verify and rm."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from specrun.models_cache import (
    Bundle,
    IntegrityError,
    ManifestError,
    cache_root,
    find_bundle,
    models_dir,
    remove_bundle,
    scan_bundles,
    verify_bundle,
)


class _ProgressLine:
    """Shows progress on stderr: one line that is redrawn on a terminal, else one line for each label."""

    def __init__(self) -> None:
        self._label = ""
        self._shown = ""
        self._terminal = sys.stderr.isatty()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if not self._terminal:
            if label != self._label:
                click.echo(label, err=True)
            self._label = label
            return
        share = f" {100 * done // total}%" if total else f" {done / 1e6:.1f} MB" if done else ""
        if (text := label + share) != self._shown:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
            self._shown = text

    def close(self) -> None:
        """End the line that is being redrawn."""
        if self._shown:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._shown = ""


@click.group()
def models() -> None:
    """List, get, check and remove the models on this machine."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_command(as_json: bool) -> None:
    """List the models in the cache."""
    entries = scan_bundles()
    if as_json:
        rows = [
            {"name": e.name, "path": str(e.path), "problem": e.problem, **(_facts(e.bundle) if e.bundle else {})}
            for e in entries
        ]
        click.echo(json.dumps({"root": str(cache_root()), "models": rows}, ensure_ascii=False))
        return
    if not entries:
        click.echo(f"no models in {models_dir()}; `specrun models pull smollm2-135m` gets one", err=True)
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        if entry.bundle is None:
            click.echo(f"{entry.name:<{width}}  broken")
            click.echo(f"{entry.name}: {entry.problem}", err=True)
            continue
        facts = _facts(entry.bundle)
        parts = [facts["family"], facts["precision"], f"{facts['bytes'] / 1e6:.0f} MB", *facts["speculators"]]
        click.echo(f"{entry.name:<{width}}  " + "  ".join(part for part in parts if part))


def _facts(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "family": manifest.family,
        "precision": manifest.precision.get("requested"),
        "bytes": sum(info.size for info in manifest.files.values()),
        "speculators": sorted(manifest.speculators),
        "source": manifest.source.name,
        "licence": manifest.source.licence,
        "digest": bundle.digest,
    }


@models.command("pull")
@click.argument("source", metavar="NAME|SOURCE")
@click.option("--name", help="Keep the model under this name.")
@click.option("--precision", help="int8, int4, fp32, fp16 or source; the exporter's default otherwise.")
@click.option("--force", is_flag=True, help="Get and export it anew even if it is here already.")
def pull_command(source: str, name: str | None, precision: str | None, force: bool) -> None:
    """Get a model and export it into the cache; prints the path of its bundle.

    SOURCE is a known name (smollm2-135m), a folder of safetensors weights, a .gguf file, or a hub repository
    (ORG/NAME, ORG/NAME/FILE.gguf).
    """
    from specrun.export import export_bundle

    progress = _ProgressLine()
    try:
        bundle = export_bundle(source, name=name, precision=precision, force=force, progress=progress)
    finally:
        progress.close()
    click.echo(str(bundle.path))


@models.command("path")
@click.argument("name")
def path_command(name: str) -> None:
    """Print the folder of a model."""
    click.echo(str(find_bundle(name).path))


@models.command("verify")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(name: str | None, as_json: bool) -> None:
    """Read every file of a model (of all models without NAME) and compare it with its digest."""
    progress = _ProgressLine()
    rows: list[dict[str, Any]] = []
    try:
        if name is not None:
            rows.append(_verified(find_bundle(name, check=False), progress))
        for entry in scan_bundles() if name is None else ():
            try:
                rows.append(_verified(find_bundle(entry.path, check=False), progress))
            except ManifestError as error:
                problems = [{"file": None, "problem": str(error)}]
                rows.append({"name": entry.name, "path": str(entry.path), "ok": False, "problems": problems})
    finally:
        progress.close()
    bad = [row for row in rows if not row["ok"]]
    if as_json:
        click.echo(json.dumps({"ok": not bad, "models": rows}, ensure_ascii=False))
    else:
        for row in rows:
            click.echo(f"{row['name']}  {'ok' if row['ok'] else 'damaged'}")
            for problem in row["problems"]:
                click.echo(f"{row['name']}: {problem['file'] or ''} {problem['problem']}", err=True)
    if bad:
        names = ", ".join(row["name"] for row in bad)
        raise IntegrityError(f"damaged: {names}; run `specrun models pull NAME --force` to replace a model")


def _verified(bundle: Bundle, progress: _ProgressLine) -> dict[str, Any]:
    problems = verify_bundle(bundle, progress)
    return {
        "name": bundle.manifest.name,
        "path": str(bundle.path),
        "ok": not problems,
        "problems": [{"file": problem.file, "problem": problem.message} for problem in problems],
    }


@models.command("rm")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm_command(name: str, yes: bool) -> None:
    """Remove a model from the cache."""
    if not yes:
        click.confirm(f"Remove {models_dir() / name}?", abort=True, err=True)
    remove_bundle(name)
    click.echo(f"removed {name}", err=True)
