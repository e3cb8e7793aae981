"""`specrun export`: weights become a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.output import echo_json, note, progress_line
from specrun.cli.types import EXPORT_PRECISION

if TYPE_CHECKING:
    from specrun.export.heads_source import FoundHeads
    from specrun.models_cache import Bundle

LOW_AGREEMENT = 0.9


@click.command()
@click.argument("source")
@click.option(
    "--name",
    help="Keep the model under this name; by default the source's own, with the precision appended unless int8.",
)
@click.option(
    "--precision",
    type=EXPORT_PRECISION,
    help="int8 (the default), int4: blocks of so many bits. source: a GGUF file's own weight blocks, kept exactly. "
    "These three also round activations to 8 bits, so each differs a little from fp32 (32-bit floats). With --device "
    "cuda: fp16 (the default there) or bf16 throughout, or int8, int4 blocks with fp16 between.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="What the graphs are made for: processors, or NVIDIA GPUs.",
)
@click.option("--block", type=int, metavar="N", help="Columns that share a scale (int8, int4).")
@click.option(
    "--output", "-o", type=click.Path(file_okay=False, path_type=Path), help="Write the bundle to this folder instead."
)
@click.option("--force", is_flag=True, help="Export anew even if a model of this name is here.")
@click.option(
    "--draft",
    metavar="SOURCE",
    help="What drafts for the model: Medusa or EAGLE heads, which are attached to it, or a smaller model, which is "
    "exported too.",
)
@click.option(
    "--task",
    type=click.Choice(["generate", "reward"]),
    default="generate",
    show_default=True,
    help="reward: a model that rates texts, for --score reward:NAME of best-of. It needs the extra `optimum`, and is "
    "kept in fp32.",
)
@click.option("--label", help="Of a reward model with several labels, the one whose probability is the reward.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def export(
    ctx: click.Context,
    source: str,
    name: str | None,
    precision: str | None,
    device: str,
    block: int | None,
    output: Path | None,
    force: bool,
    draft: str | None,
    task: str,
    label: str | None,
    as_json: bool,
) -> None:
    """Compile weights to a bundle of ONNX graphs.

    Prints the bundle's path. SOURCE is a folder of safetensors weights in the transformers layout, a .gguf file, a hub
    repository (ORG/NAME or ORG/NAME/FILE.gguf) or a known name (smollm2-135m). Sizes, and how close the graph stays to
    the source's own weights, are shown on stderr.

    With --task reward, SOURCE is a sequence-classification model in the same layout.

    Heads are a folder that `specrun train` wrote, or published ones with safetensors files, here or on the hub.

    \b
    Examples:
      specrun export ./SmolLM2-360M-Instruct --name smollm2-360m
      specrun export model-q4_k_m.gguf --precision source
      specrun export ./big-model --device cuda --precision int4
      specrun export ./big-model --draft ./small-model
      specrun generate --model big-model --draft small-model "Hello"
      specrun export ./big-model --draft ./eagle-heads
      specrun export --task reward ./reward-model
    """
    from specrun.models_cache.errors import UsageError

    if task == "reward":
        given = ctx.get_parameter_source("precision") is not click.core.ParameterSource.DEFAULT
        if block is not None or draft is not None or (given and precision != "fp32"):
            raise UsageError("A reward model stays fp32 and has no draft: leave --precision, --block, --draft out.")
        _export_reward(source, name, label, output, force, as_json)
        return
    if label is not None:
        raise UsageError("--label is an option of reward models: add --task reward.")
    heads = None
    if draft is not None:
        from specrun.export.heads_source import find_heads

        with progress_line() as progress:
            heads = find_heads(draft, progress)
        if heads is None and output is not None:
            raise UsageError("--output names one folder: export the draft with a command of its own.")
    how = {"precision": precision, "block": block, "device": device, "force": force}
    bundles = [_export(source, name, output, how)]
    extra: dict[str, Any] = {}
    if heads is not None:
        extra["speculator"] = _attach(bundles[0], heads, force)
    elif draft is not None:
        bundles.append(_export(draft, None, None, how))
        _check(bundles[0], bundles[1])
        extra["draft"] = _facts(bundles[1])
        note(f"use it with --draft: specrun generate --model {_shown(bundles[0])} --draft {_shown(bundles[1])}")
    if as_json:
        echo_json(_facts(bundles[0]) | extra)
        return
    for bundle in bundles:
        click.echo(str(bundle.path))


def _export_reward(
    source: str, name: str | None, label: str | None, output: Path | None, force: bool, as_json: bool
) -> None:
    from specrun.cli.models import reward_facts
    from specrun.export.reward import export_reward

    with progress_line() as progress:
        bundle = export_reward(source, name=name, label=label, output=output, force=force, progress=progress)
    manifest, facts = bundle.manifest, reward_facts(bundle)
    if not progress.used:
        note(f"{manifest.name} is here already; --force exports it anew")
    reads = "its logit" if len(manifest.labels) == 1 else f"the log-probability of {facts['label']}"
    note(
        f"{manifest.name}: {manifest.family} reward model, {facts['bytes'] / 1e6:.0f} MB, context {manifest.context}, "
        f"reads {reads}; logits within {manifest.error:.1g} of the source's"
    )
    if as_json:
        echo_json({"name": manifest.name, "path": str(bundle.path)} | facts)
    else:
        click.echo(str(bundle.path))


def _attach(bundle: Bundle, heads: FoundHeads, force: bool) -> dict[str, Any]:
    from specrun.models_cache import speculator_facts

    with progress_line() as progress:
        speculator = heads.attach(bundle, force=force, progress=progress)
    facts = speculator_facts(speculator)
    note(
        f"{bundle.manifest.name}/{speculator.name}: {facts['layout']}, {facts['bytes'] / 1e6:.0f} MB; use it with: "
        f"specrun generate --model {_shown(bundle)} --method {facts['method']} --draft {speculator.name}"
    )
    return facts


def _shown(bundle: Bundle) -> str:
    """How a command names a bundle."""
    from specrun.models_cache import models_dir

    return bundle.path.name if bundle.path.parent == models_dir() else str(bundle.path)


def _export(source: str, name: str | None, output: Path | None, how: dict[str, Any]) -> Bundle:
    from specrun.export.bundle import export_bundle

    with progress_line() as progress:
        bundle = export_bundle(source, name=name, output=output, progress=progress, **how)
    if not progress.used:
        note(f"{bundle.manifest.name} is here already; --force exports it anew")
    _summary(bundle)
    return bundle


def _summary(bundle: Bundle) -> None:
    facts = _facts(bundle)
    sizes = bundle.manifest.sizes
    note(
        f"{facts['name']}: {facts['family']}, {facts['precision']}, {facts['bytes'] / 1e6:.0f} MB, "
        f"{sizes.layers} layers, hidden {sizes.hidden}, {sizes.tokens} tokens, context {sizes.context}"
    )
    fidelity = bundle.manifest.fidelity
    if fidelity is None:
        return
    note(
        f"against the source's weights over {fidelity.positions} positions: same most probable token "
        f"{fidelity.argmax_agreement:.1%}, logit RMSE {fidelity.logit_rmse:.3g}, KL {fidelity.mean_kl:.3g} nats"
    )
    if fidelity.argmax_agreement < LOW_AGREEMENT:
        note(
            f"Warning: only {fidelity.argmax_agreement:.0%} of the tokens agree, so the text will suffer: "
            "export with --precision int8, or source for a GGUF file."
        )


def _check(target: Bundle, draft: Bundle) -> None:
    from specrun.runtime.check import check_pair

    for reason in check_pair(target.path, draft.path).reasons:
        note(f"Warning: {reason}")


def _facts(bundle: Bundle) -> dict[str, Any]:
    from dataclasses import asdict

    manifest = bundle.manifest
    return {
        "name": manifest.name,
        "path": str(bundle.path),
        "family": manifest.family,
        "precision": manifest.precision.get("requested"),
        "bytes": sum(info.size for info in manifest.files.values()),
        "fidelity": asdict(manifest.fidelity) if manifest.fidelity else None,
        "licence": manifest.source.licence,
        "digest": bundle.digest,
    }
