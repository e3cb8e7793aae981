"""`specrun models`: list, pull, path, verify and rm."""

from __future__ import annotations

import sys
from typing import Any

import click

from specrun.cli.output import ProgressLine, echo_json, is_terminal, progress_line
from specrun.cli.types import PRECISION
from specrun.models_cache import (
    Bundle,
    IntegrityError,
    ManifestError,
    RewardBundle,
    SpeculatorEntry,
    UsageError,
    cache_root,
    find_bundle,
    find_model,
    load_model,
    models_dir,
    remove_bundle,
    remove_speculator,
    scan_bundles,
    scan_speculators,
    speculator_facts,
    verify_bundle,
    verify_reward,
)


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
            {"name": e.name, "path": str(e.path), "problem": e.problem}
            | (_facts(e.bundle) if e.bundle else {})
            | (reward_facts(e.reward) if e.reward else {})
            for e in entries
        ]
        echo_json({"root": str(cache_root()), "models": rows})
        return
    if not entries:
        click.echo(f"no models in {models_dir()}; `specrun models pull smollm2-135m` gets one", err=True)
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        if entry.reward is not None:
            facts = reward_facts(entry.reward)
            click.echo(f"{entry.name:<{width}}  {facts['family']}  reward model  {facts['bytes'] / 1e6:.0f} MB")
            continue
        if entry.bundle is None:
            click.echo(f"{entry.name:<{width}}  broken")
            click.echo(f"{entry.name}: {entry.problem}", err=True)
            continue
        facts = _facts(entry.bundle)
        parts = [facts["family"], facts["precision"], f"{facts['bytes'] / 1e6:.0f} MB"]
        click.echo(f"{entry.name:<{width}}  " + "  ".join(part for part in parts if part))
        for speculator in scan_speculators(entry.bundle):
            _list_speculator(entry.name, speculator)


def _list_speculator(model: str, entry: SpeculatorEntry) -> None:
    name = f"{model}/{entry.name}"
    if entry.speculator is None:
        click.echo(f"  {name}  broken")
        click.echo(f"{name}: {entry.problem}", err=True)
        return
    facts = speculator_facts(entry.speculator)
    click.echo(f"  {name}  {facts['method']}  {facts['bytes'] / 1e6:.0f} MB")


def _facts(bundle: Bundle) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "family": manifest.family,
        "precision": manifest.precision.get("requested"),
        "bytes": sum(info.size for info in manifest.files.values()),
        "source": manifest.source.name,
        "licence": manifest.source.licence,
        "digest": bundle.digest,
        "speculators": [
            {"name": e.name, "path": str(e.path), "problem": e.problem}
            | (speculator_facts(e.speculator) if e.speculator else {})
            for e in scan_speculators(bundle)
        ],
    }


def reward_facts(bundle: RewardBundle) -> dict[str, Any]:
    """What lists show of a reward model, as JSON has it."""
    manifest = bundle.manifest
    return {
        "kind": manifest.kind,
        "family": manifest.family,
        "bytes": sum(info.size for info in manifest.files.values()),
        "labels": list(manifest.labels),
        "label": manifest.labels[manifest.label],
        "context": manifest.context,
        "error": manifest.error,
        "source": manifest.source.name,
        "licence": manifest.source.licence,
        "digest": bundle.digest,
    }


@models.command("pull")
@click.argument("source", metavar="NAME|SOURCE")
@click.option("--name", help="Keep the model under this name; by default as export does.")
@click.option("--precision", type=PRECISION, help="As for export; by default int8.")
@click.option("--force", is_flag=True, help="Get and export it anew even if it is here already.")
def pull_command(source: str, name: str | None, precision: str | None, force: bool) -> None:
    """Get a model and export it into the cache.

    Prints the path of its bundle. SOURCE is a known name (smollm2-135m), a folder of safetensors weights, a .gguf file,
    or a hub repository (ORG/NAME, ORG/NAME/FILE.gguf).
    """
    from specrun.export.bundle import export_bundle

    with progress_line() as progress:
        bundle = export_bundle(source, name=name, precision=precision, force=force, progress=progress)
    click.echo(str(bundle.path))


@models.command("path")
@click.argument("name")
def path_command(name: str) -> None:
    """Print the folder of a model."""
    click.echo(str(find_model(name).path))


@models.command("verify")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def verify_command(name: str | None, as_json: bool) -> None:
    """Read a model's files and check their digests.

    Those of its speculators too. Without NAME all models are read.
    """
    rows: list[dict[str, Any]] = []
    with progress_line() as progress:
        if name is not None:
            rows.append(_verified(find_model(name, check=False), progress))
        for entry in scan_bundles() if name is None else ():
            try:
                rows.append(_verified(load_model(entry.path, check=False), progress))
            except ManifestError as error:
                problems = [{"file": None, "problem": str(error)}]
                rows.append({"name": entry.name, "path": str(entry.path), "ok": False, "problems": problems})
    bad = [row for row in rows if not row["ok"]]
    if as_json:
        echo_json({"ok": not bad, "models": rows})
    else:
        for row in rows:
            click.echo(f"{row['name']}  {'ok' if row['ok'] else 'damaged'}")
            for problem in row["problems"]:
                click.echo(f"{row['name']}: {problem['file'] or ''} {problem['problem']}", err=True)
    if bad:
        names = ", ".join(row["name"] for row in bad)
        raise IntegrityError(f"damaged: {names}; run `specrun models pull NAME --force` to replace a model")


def _verified(bundle: Bundle | RewardBundle, progress: ProgressLine) -> dict[str, Any]:
    problems = verify_reward(bundle, progress) if isinstance(bundle, RewardBundle) else verify_bundle(bundle, progress)
    return {
        "name": bundle.manifest.name,
        "path": str(bundle.path),
        "ok": not problems,
        "problems": [{"file": problem.file, "problem": problem.message} for problem in problems],
    }


@models.command("rm")
@click.argument("name", metavar="NAME|NAME/SPECULATOR")
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
def rm_command(name: str, yes: bool) -> None:
    """Remove a model from the cache, or one speculator of a model."""
    model, _, speculator = name.partition("/")
    if not yes:
        if not is_terminal(sys.stdin):
            raise UsageError(f"Nobody can be asked whether to remove {name!r}: add --yes.")
        where = models_dir() / model
        click.confirm(f"Remove {where / 'speculators' / speculator if speculator else where}?", abort=True, err=True)
    if speculator:
        remove_speculator(find_bundle(model, check=False), speculator)
    else:
        remove_bundle(name)
    click.echo(f"removed {name}", err=True)
