"""From a speculator's weights to its graph in a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specrun.export.graph import build_target
from specrun.export.graph_builder import tensor_specs
from specrun.export.speculator_config import DraftConfig, MedusaConfig
from specrun.export.speculator_graph import build_eagle, build_medusa
from specrun.export.speculator_parts import SpeculatorParts, model_config
from specrun.export.speculator_weights import Speculator, encode_speculator, read_speculator
from specrun.export.target_ends import read_target_ends
from specrun.export.weight_file import WeightFile
from specrun.models_cache.errors import SpecrunError, UnsupportedModelError, UsageError
from specrun.models_cache.layout import Bundle, check_bundle_name
from specrun.models_cache.manifest import GraphSpec, read_manifest_file
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.speculator import (
    SPECULATORS,
    VOCABULARY_NAME,
    InstalledSpeculator,
    SpeculatorManifest,
    SpeculatorSizes,
    speculator_or_build,
)

DATA_FILE = "speculator.onnx.data"
REPORT_NAME = "report.svg"  # a chart that training may leave beside the weights
MAX_REPORT_BYTES = 4 << 20
# As a target has them: name -> (file, whether it takes ragged batches, what the operator schema must have).
_DRAFT_VARIANTS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "target": ("speculator.onnx", True, ("query_seqlens",)),
    "target_batch1": ("speculator_batch1.onnx", False, ()),
}


def attach(
    bundle: Bundle,
    weights_folder: Path,
    name: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> InstalledSpeculator:
    """Make the graph of the speculator in `weights_folder` for a bundle, and publish it in the bundle's speculators/.

    name: the speculator's own by default. The same weights under the same name are not built again, unless `force`;
    other weights replace what has the name only with `force`. Two processes at once wait for each other.
    Raises UsageError where the speculator does not fit the target or the name is taken; UnsupportedModelError for a
    bundle without features; ModelNotFoundError, IntegrityError, CacheError.
    """
    speculator, files = read_speculator(weights_folder), report_files(weights_folder)
    return attach_speculator(bundle, speculator, name, force=force, progress=progress, extra_files=files)


def report_files(weights_folder: Path) -> dict[str, bytes]:
    """The chart beside a speculator's weights, by its name, where there is one."""
    report = weights_folder / REPORT_NAME
    there = report.is_file() and report.stat().st_size <= MAX_REPORT_BYTES
    return {REPORT_NAME: report.read_bytes()} if there else {}


def attach_speculator(
    bundle: Bundle,
    speculator: Speculator,
    name: str | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    extra_files: dict[str, bytes] | None = None,
    shipped: bool = False,
) -> InstalledSpeculator:
    """As `attach`, for weights in memory; `extra_files` are kept beside them. shipped: they come with specrun."""
    step = progress or no_progress
    if name is not None:
        speculator = dataclasses.replace(speculator, name=check_bundle_name(name))
    check_fit(bundle, speculator)
    weights = encode_speculator(speculator)
    label = f"Attaching {speculator.name}"

    def build(folder: Path) -> SpeculatorManifest:
        step(label, 0, 1)
        manifest = dataclasses.replace(_write_graphs(folder, bundle, speculator), shipped=shipped)
        for file, content in (weights | (extra_files or {})).items():
            if content:
                (folder / file).write_bytes(content)
        step(label, 1, 1)
        return manifest

    installed = speculator_or_build(bundle, speculator.name, build, force=force, progress=step)
    digests = {file: info.sha256 for file, info in installed.manifest.files.items()}
    if any(digests.get(file) != hashlib.sha256(content).hexdigest() for file, content in weights.items()):
        raise UsageError(
            f"{bundle.manifest.name} has another speculator {installed.name!r} already: "
            "choose another name, or --force to replace it."
        )
    return installed


def own_speculators(folder: Path) -> list[Speculator]:
    """The weights of the sound speculators in a bundle's folder, without those that came with specrun.

    For a bundle that is about to be replaced: `reattach` brings them into the next.
    """
    found = []
    places = sorted((folder / SPECULATORS).iterdir()) if (folder / SPECULATORS).is_dir() else []
    for place in places:
        try:
            manifest, _ = read_manifest_file(place, SpeculatorManifest.from_json)
            if not manifest.shipped:
                found.append(dataclasses.replace(read_speculator(place), name=manifest.name))
        except SpecrunError:
            continue  # one that cannot be read is not worth failing an export for
    return found


def reattach(bundle: Bundle, speculators: Iterable[Speculator], progress: Progress = no_progress) -> None:
    """Attach those that fit the target; a bundle of another model under the same name has no use for the others."""
    for speculator in speculators:
        try:
            check_fit(bundle, speculator)
        except (UsageError, UnsupportedModelError):
            progress(f"{speculator.name} does not fit the new model and is dropped", 0, None)
            continue
        attach_speculator(bundle, speculator, force=True, progress=progress)


def check_fit(bundle: Bundle, speculator: Speculator) -> None:
    """Compare a speculator's target with a bundle. Raises UsageError, UnsupportedModelError."""
    sizes, target = bundle.manifest.sizes, speculator.target
    ours = (sizes.hidden, sizes.layers, sizes.vocabulary)
    theirs = (target.hidden, target.layers, target.vocabulary)
    if ours != theirs:
        raise UsageError(
            f"{speculator.name} was made for {target.name}, and {bundle.manifest.name} is another model: "
            f"hidden, layers and vocabulary are {theirs} there and {ours} here."
        )
    if speculator.vocabulary is not None and speculator.vocabulary[0] >= sizes.tokens:
        raise UsageError(
            f"{speculator.name} knows no token of {bundle.manifest.name}: its vocabulary begins at "
            f"{speculator.vocabulary[0]}, and the tokens end at {sizes.tokens - 1}."
        )
    if not speculator.taps:
        return
    features = bundle.manifest.features
    if features is None:
        raise UnsupportedModelError(
            f"{bundle.manifest.name} was exported before learned heads were known: export it again, with --force."
        )
    if missing := sorted(set(speculator.taps) - set(features.taps)):
        raise UsageError(
            f"{speculator.name} reads the input of layer {missing[0]}, and the graph of {bundle.manifest.name} gives "
            f"those of {', '.join(map(str, features.taps))} only; train one for this model with `specrun train`."
        )


def _write_graphs(folder: Path, bundle: Bundle, speculator: Speculator) -> SpeculatorManifest:
    """Write graphs, their data and the vocabulary; the manifest still lacks `files`."""
    config, positions = speculator.config, bundle.manifest.kv.positions
    ends = read_target_ends(bundle)
    graphs = {}
    # Beside a target for the CUDA provider a draft is of the same kind, and heads take an attention that is.
    floats = ir.DataType[bundle.manifest.kv.dtype.upper().replace("FLOAT32", "FLOAT")]
    drafts = isinstance(config, DraftConfig)
    with WeightFile(folder / DATA_FILE, floats.numpy() if drafts else np.float32) as file:
        cuda = floats != ir.DataType.FLOAT
        parts = SpeculatorParts(speculator, ends, file, positions, cuda=cuda)
        if isinstance(config, DraftConfig):
            stored = parts.draft(config)
            model = model_config(speculator, config, bundle.manifest.sizes.context)
            for graph, (name, ragged, requires) in _DRAFT_VARIANTS.items():
                built = build_target(model, stored, file, ragged=ragged, trees=not cuda, dummy_row=not cuda)
                graphs[graph] = _save(built, folder / name, requires, None if ragged else 1)
        else:
            built = (
                build_medusa(config, parts, file)
                if isinstance(config, MedusaConfig)
                else build_eagle(config, parts, file, floats)
            )
            graphs["speculator"] = _save(built, folder / "speculator.onnx", (), 1)
    if speculator.vocabulary is not None and speculator.draft_vocabulary < speculator.target.vocabulary:
        (folder / VOCABULARY_NAME).write_bytes(speculator.vocabulary.astype("<i4").tobytes())
    return SpeculatorManifest(
        name=speculator.name,
        method=speculator.method,
        layout=speculator.layout,
        target_digest=bundle.target_digest,
        graphs=graphs,
        sizes=_sizes(speculator, positions),
        taps=speculator.taps,
        acceptance=speculator.acceptance,
        licence=speculator.licence,
    )


def _save(model: ir.Model, path: Path, requires: tuple[str, ...], max_batch: int | None) -> GraphSpec:
    ir.save(model, path)
    inputs, outputs = tensor_specs(model.graph.inputs), tensor_specs(model.graph.outputs)
    return GraphSpec(path.name, (DATA_FILE,), requires, max_batch, inputs, outputs)


def _sizes(speculator: Speculator, positions: int) -> SpeculatorSizes:
    config, target = speculator.config, speculator.target
    layers = (
        (0, 0, 0, 0, 0, 0)
        if isinstance(config, MedusaConfig)
        else (
            config.layers if isinstance(config, DraftConfig) else 1,
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.intermediate,
            positions,
        )
    )
    depth = config.heads if isinstance(config, MedusaConfig) else 1
    return SpeculatorSizes(target.hidden, target.vocabulary, speculator.draft_vocabulary, depth, *layers)
