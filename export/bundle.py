"""From a source to a bundle: fetch, read, quantise, build the graphs, measure fidelity, publish."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specrun.export.config import ModelConfig
from specrun.export.fidelity import TEXT, measure_fidelity
from specrun.export.graph import build_target, feature_taps
from specrun.export.graph_builder import tensor_specs
from specrun.export.quantize import DEFAULT_BLOCKS, check_precision
from specrun.export.shipped_speculators import ensure_shipped
from specrun.export.speculator_weights import Speculator
from specrun.export.speculators import own_speculators, reattach
from specrun.export.tokenizer import TokenizerFiles, tokenizer_files
from specrun.export.weight_file import WeightFile
from specrun.export.weight_store import SPARE_POSITIONS, store_weights
from specrun.export.weights import open_weights
from specrun.models_cache.errors import UsageError
from specrun.models_cache.layout import Bundle, models_dir
from specrun.models_cache.manifest import (
    SHARED_GRAPH,
    FeaturesSpec,
    Fidelity,
    GraphSpec,
    KVSpec,
    Manifest,
    Sizes,
    SourceInfo,
)
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.sources import FetchedSource, fetch_source
from specrun.models_cache.store import bundle_or_build

DEFAULT_PRECISION = "int8"
DEFAULT_PRECISIONS = {"cpu": DEFAULT_PRECISION, "cuda": "fp16"}
DATA_FILE = "target.onnx.data"
# Graph name -> (file, whether it takes ragged batches, what the operator schema must have).
VARIANTS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "target": ("target.onnx", True, ("query_seqlens",)),
    "target_batch1": ("target_batch1.onnx", False, ()),
    SHARED_GRAPH: ("target_shared.onnx", True, ("query_seqlens",)),
}
# For the CUDA provider the first two run chains only, and a token tree has a graph of its own, for one row. Its
# attention gives no softmax weights, which the graph of best-of-N needs.
TREES = "target_tree"
CUDA_VARIANTS = {name: variant for name, variant in VARIANTS.items() if name != SHARED_GRAPH} | {
    TREES: ("target_tree.onnx", False, ("attention_bias", "position_ids"))
}


def export_bundle(
    source: str,
    *,
    name: str | None = None,
    precision: str | None = None,
    block: int | None = None,
    device: str = "cpu",
    output: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Bundle:
    """Export `source` (a folder, a .gguf file, a hub id or a known name) and return its bundle.

    precision: int8 (default), int4, fp32, or source: a GGUF's own quantisation kept exactly. block: columns that share
    a scale (int8, int4). device: "cpu", or "cuda" for graphs that compute in 16 bits, where precision is fp16
    (default), bf16, or int8 or int4 with fp16 between. name: the source's own name, with -cuda for such graphs, and
    with the precision after it unless it is the default.
    output: a folder outside the cache. An existing bundle of that name is returned as it is unless `force`; then its
    speculators are made anew for the next. Those that specrun ships for these weights are attached.

    Raises UsageError, also where a bundle of that name was made from another source or in another precision;
    SourceError, IntegrityError, UnsupportedModelError, CacheError.
    """
    report = progress or no_progress
    precision = precision or DEFAULT_PRECISIONS.get(device, DEFAULT_PRECISION)
    check_precision(precision, block, device)
    if name is None:
        parts = [bundle_name(source), *(["cuda"] if device == "cuda" else [])]
        name = "-".join([*parts, *([] if precision == DEFAULT_PRECISIONS[device] else [precision])])

    target = models_dir() / name if output is None else output.expanduser()
    kept: list[Speculator] = []

    def build(folder: Path) -> Manifest:
        kept.extend(own_speculators(target))
        fetched = fetch_source(source, progress=report)
        return write_bundle(folder, fetched, precision=precision, block=block, device=device, progress=report)

    bundle = bundle_or_build(name, build, output=output, force=force, progress=report)
    manifest = bundle.manifest
    made = bundle_name(manifest.source.name), manifest.precision.get("requested")
    if made != (bundle_name(source), _requested(precision, block, device)):
        raise UsageError(
            f"{name} is there already, made from {manifest.source.name} as {made[1]}: "
            "choose another --name, or --force to replace it."
        )
    reattach(bundle, kept, report)
    ensure_shipped(bundle, report)
    return bundle


def _requested(precision: str, block: int | None, device: str) -> str:
    """What was asked for: the precision, the block size where it is not the default, and a device that is not the CPU.

    The manifest needs no more: graphs are for the CUDA provider where their keys and values have 16 bits.
    """
    size = "" if block in (None, DEFAULT_BLOCKS.get(precision)) else f", block {block}"
    return precision + size + (", cuda" if device == "cuda" and precision in DEFAULT_BLOCKS else "")


def bundle_name(source: str) -> str:
    """The default bundle name of a source: its last part in lower case, without `.gguf`."""
    if Path(source).exists():
        source = str(Path(source).absolute())
    last = re.split(r"[/\\]", source.rstrip("/\\"))[-1]
    return re.sub(r"\.gguf$", "", last, flags=re.IGNORECASE).lower()


def write_bundle(
    folder: Path,
    fetched: FetchedSource,
    *,
    precision: str,
    block: int | None,
    device: str = "cpu",
    progress: Progress = no_progress,
) -> Manifest:
    """Write graphs, weights and tokenizer of a fetched source into `folder`; the manifest still lacks `files`."""
    weights = open_weights(fetched.path)
    config = weights.config
    if precision == "source" and fetched.path.suffix.lower() != ".gguf":
        raise UsageError("Precision 'source' keeps the blocks of a GGUF file: take int8, int4 or fp32 for this source.")
    tokenizer = tokenizer_files(fetched.path)
    if tokenizer.tokens > config.vocabulary:
        raise UsageError(
            f"The tokenizer has {tokenizer.tokens} tokens and the model only {config.vocabulary}: "
            "they do not belong together."
        )
    taps = feature_taps(config.layers)
    cuda = device == "cuda"
    floats = graph_floats(precision) if cuda else np.dtype(np.float32)
    with WeightFile(folder / DATA_FILE, floats) as file:
        stored = store_weights(weights, file, precision, block, progress)
        graphs = {}
        for graph_name, (graph_file, ragged, requires) in (CUDA_VARIANTS if cuda else VARIANTS).items():
            shared, trees = graph_name == SHARED_GRAPH, not cuda or graph_name == TREES
            if shared and _narrowest_window(config) is not None:
                continue  # the prefix part sees everything
            model = build_target(
                config, stored, file, ragged=ragged, taps=taps, trees=trees, dummy_row=not cuda, shared=shared
            )
            ir.save(model, folder / graph_file)
            inputs, outputs = tensor_specs(model.graph.inputs), tensor_specs(model.graph.outputs)
            max_batch = None if ragged else 1
            graphs[graph_name] = GraphSpec(graph_file, (DATA_FILE,), requires, max_batch, inputs, outputs)
    _write_tokenizer(folder, tokenizer)
    fidelity: Fidelity | None = None
    widths: tuple[int, ...] = ()
    if floats.name != "bfloat16":  # the CPU provider has no attention of that type
        progress("Measuring fidelity", 0, 1)
        # The variant that every ONNX Runtime build loads; all compute the same.
        fidelity, widths = measure_fidelity(weights, folder / VARIANTS["target_batch1"][0], _fidelity_ids(tokenizer))
        progress("Measuring fidelity", 1, 1)
    return Manifest(
        name=fetched.name,
        family=config.family.name,
        sizes=_sizes(config, tokenizer),
        special_ids=tokenizer.special_ids,
        graphs=graphs,
        precision={"requested": _requested(precision, block, device), **stored.type_names()},
        kv=KVSpec(floats.name, config.context + SPARE_POSITIONS, _narrowest_window(config)),
        features=FeaturesSpec(taps),
        source=SourceInfo(fetched.name, fetched.kind, fetched.files, fetched.licence or config.licence),
        fidelity=fidelity,
        widths_validated=widths,
    )


def graph_floats(precision: str) -> np.dtype[np.generic]:
    """What a graph for the CUDA provider computes in, by its precision."""
    return ir.DataType.BFLOAT16.numpy() if precision == "bf16" else np.dtype(np.float16)


def _write_tokenizer(folder: Path, tokenizer: TokenizerFiles) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
    generation = {"eos_token_id": list(tokenizer.special_ids.eos), "bos_token_id": tokenizer.special_ids.bos}
    (folder / "generation.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _fidelity_ids(tokenizer: TokenizerFiles) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_str(tokenizer.tokenizer_json).encode(TEXT, add_special_tokens=False).ids
    return ids


def _narrowest_window(config: ModelConfig) -> int | None:
    windows = [layer.sliding_window for layer in config.layer_configs if layer.sliding_window is not None]
    return min(windows, default=None)


def _sizes(config: ModelConfig, tokenizer: TokenizerFiles) -> Sizes:
    return Sizes(
        hidden=config.hidden,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocabulary=config.vocabulary,
        tokens=tokenizer.tokens,
        context=config.context,
    )
