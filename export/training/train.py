"""`specrun train`: from a bundle to a speculator in it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrun.export.speculator_config import (
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    SpeculatorConfig,
    SpeculatorTarget,
)
from specrun.export.speculator_weights import (
    BLOCK,
    Speculator,
    dequantize_rows,
    quantized,
    write_speculator,
)
from specrun.export.speculators import REPORT_NAME, attach_speculator
from specrun.export.target_ends import TargetEnds, dequantize_matrix, read_target_ends, read_target_layer
from specrun.export.training.batches import Batch
from specrun.export.training.draft import DraftModel
from specrun.export.training.eagle import EagleModel
from specrun.export.training.medusa import MedusaModel
from specrun.export.training.report import draw_report
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.text_store import TextStore
from specrun.export.training.text_writer import write_text
from specrun.export.training.trainer import Losses, Trainer, TrainingOptions
from specrun.models_cache.errors import UnsupportedModelError, UsageError
from specrun.models_cache.layout import Bundle, cache_root
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.speculator import InstalledSpeculator

DRAFT_VOCABULARY = 8192
EOS_SHARE = 10**9  # counts so often, as every answer ends with one
DEPTH = 4  # of the chain whose acceptance is reported
EAGLE_STEPS = 3  # of the training-time test
MEDUSA_BLOCKS = 2
DRAFT_LAYERS = 2
LEARNING_RATES = {"medusa": 1e-3, "eagle": 1e-3, "draft": 1e-3}
PASSES = {"medusa": 3.0, "eagle": 4.0, "draft": 4.0}


@dataclass(frozen=True, slots=True)
class Method:
    """What one method trains. losses: for training; measure: of a chain of DEPTH tokens.

    taps: those of the target's features that the speculator reads; read: those that training needs.
    """

    model: MedusaModel | EagleModel | DraftModel
    losses: Losses
    measure: Losses
    config: SpeculatorConfig
    taps: tuple[int, ...]
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """A speculator in its bundle, and in the folder that `specrun export --draft` takes."""

    installed: InstalledSpeculator
    speculator: Speculator
    folder: Path


def train_speculator(
    bundle: Bundle,
    method: str,
    *,
    name: str | None = None,
    tokens: int = 1_500_000,
    passes: float | None = None,
    seed: int = 0,
    threads: int,
    prompts: Sequence[Sequence[int]] | None = None,
    work: Path | None = None,
    restart: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Trained:
    """Train a speculator for a bundle and attach it.

    method: medusa, eagle or draft. tokens: of training text, self-written or answers to `prompts` (token ids), which
    the methods share; passes: over it. work: where text and checkpoint are kept, by default under the cache root; a
    killed training goes on from there, unless `restart`.
    Raises UnsupportedModelError for a bundle without features, UsageError for settings that do not fit.
    """
    report = progress or no_progress
    if bundle.manifest.features is None:
        raise UnsupportedModelError(
            f"{bundle.manifest.name} was exported before learned heads were known: export it again, with --force."
        )
    folder = work or cache_root() / "training" / bundle.target_digest[:16]
    text = folder / ("text" if prompts is None else f"answers-{_digest(prompts)}")
    store = write_text(bundle, text, tokens, seed=seed, threads=threads, prompts=prompts, progress=report)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    ends = read_target_ends(bundle)
    parts = target_parts(bundle, ends, draft_vocabulary(store, bundle), device)
    trained = _method(method, bundle, parts, device)
    rate = LEARNING_RATES[method]
    options = TrainingOptions(passes=passes or PASSES[method], learning_rate=rate, seed=seed)
    checkpoints = folder / method
    if restart:
        (checkpoints / "checkpoint.safetensors").unlink(missing_ok=True)
    columns = _columns(bundle, trained.read)
    trainer = Trainer(trained.model, trained.losses, trained.measure, store, options, columns, checkpoints, report)
    trainer.run()
    tensors = _stored_tensors(trained, parts)
    scores = trainer.measure()  # of the weights as they are stored
    speculator = _speculator(bundle, method, name or method, trained, tensors, scores, trainer, store)
    picture = draw_report(speculator).encode("utf-8")
    installed = attach_speculator(bundle, speculator, force=force, progress=report, extra_files={REPORT_NAME: picture})
    (checkpoints / "weights").mkdir(parents=True, exist_ok=True)
    (checkpoints / "weights" / REPORT_NAME).write_bytes(picture)
    write_speculator(checkpoints / "weights", speculator)
    return Trained(installed, speculator, checkpoints / "weights")


def draft_vocabulary(store: TextStore, bundle: Bundle) -> NDArray[np.int64]:
    """The commonest tokens of the target's answers, then of all text; ascending."""
    sizes = bundle.manifest.sizes
    counts = np.zeros(sizes.vocabulary, np.int64)
    for shard in map(store.load, store.names()):
        counts += 8 * np.bincount(shard.tokens[shard.answer], minlength=sizes.vocabulary)
        counts += np.bincount(shard.tokens, minlength=sizes.vocabulary)
    counts[list(bundle.manifest.special_ids.eos)] += EOS_SHARE
    size = min(DRAFT_VOCABULARY, sizes.tokens)
    return np.sort(np.argsort(-counts[: sizes.tokens], kind="stable")[:size])


def target_parts(bundle: Bundle, ends: TargetEnds, vocabulary: NDArray[np.int64], device: torch.device) -> TargetParts:
    """The frozen tensors, out of the bundle's own graph."""
    sizes = bundle.manifest.sizes
    embedding = torch.from_numpy(dequantize_matrix(ends.embedding)).bfloat16()
    head = torch.from_numpy(dequantize_matrix(ends.head, vocabulary)).bfloat16()
    return TargetParts(
        embedding.to(device),
        head.to(device),
        torch.from_numpy(ends.final_norm).to(device),
        torch.from_numpy(vocabulary),
        epsilon=ends.norm_epsilon,
        rope_theta=ends.rope_theta,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate=sizes.intermediate,
    )


def _method(method: str, bundle: Bundle, parts: TargetParts, device: torch.device) -> Method:
    sizes = bundle.manifest.sizes
    last = (sizes.layers,)
    shape: dict[str, Any] = {
        "heads": parts.heads,
        "kv_heads": parts.kv_heads,
        "head_dim": parts.head_dim,
        "intermediate": parts.intermediate,
        "rope_theta": parts.rope_theta,
        "norm_epsilon": parts.epsilon,
    }
    if method == "medusa":
        medusa = MedusaModel(parts, DEPTH, MEDUSA_BLOCKS).to(device)
        return Method(medusa, medusa.losses, medusa.losses, MedusaConfig(DEPTH, MEDUSA_BLOCKS), last, last)
    if method == "eagle":
        assert bundle.manifest.features is not None
        taps = bundle.manifest.features.taps
        eagle = EagleModel(parts, len(taps)).to(device)
        return Method(
            eagle,
            lambda batch: eagle.losses(batch, EAGLE_STEPS),
            lambda batch: eagle.losses(batch, DEPTH),
            EagleConfig("joined", **shape),
            taps,
            taps,
        )
    if method != "draft":
        raise UsageError(f"There is no method {method!r} to train: choose medusa, eagle or draft.")
    layers = min(DRAFT_LAYERS, sizes.layers)
    draft = DraftModel(parts, layers).to(device)
    draft.start_from([read_target_layer(bundle, index) for index in _spread(layers, sizes.layers)])

    def losses(batch: Batch) -> tuple[torch.Tensor, Scores]:
        return draft.losses(batch, DEPTH)

    return Method(draft, losses, losses, DraftConfig(layers, **shape), (), last)


def _spread(count: int, layers: int) -> list[int]:
    """`count` of the target's layers, the first and the last among them."""
    return [round(index * (layers - 1) / max(count - 1, 1)) for index in range(count)]


def _columns(bundle: Bundle, taps: Sequence[int]) -> NDArray[np.int64]:
    """The columns of the bundle's features that hold `taps`."""
    assert bundle.manifest.features is not None
    hidden = bundle.manifest.sizes.hidden
    places = [bundle.manifest.features.taps.index(tap) for tap in taps]
    return np.concatenate([np.arange(place * hidden, (place + 1) * hidden) for place in places])


@torch.no_grad()
def _stored_tensors(trained: Method, parts: TargetParts) -> dict[str, NDArray[Any]]:
    """The tensors as they are stored; the model gets the rounded values too, so that they are what is measured."""
    stored: dict[str, NDArray[Any]] = {"vocabulary": parts.vocabulary.numpy().astype(np.int32)}
    for name, tensor in trained.model.tensors().items():
        array = tensor.detach().float().cpu().numpy()
        if tensor.ndim < 2 or name == "tap_norms" or array.shape[1] % BLOCK:
            stored[name] = array.astype(np.float16)
            continue
        stored |= quantized(name, array)
        tensor.copy_(torch.from_numpy(dequantize_rows(stored[f"{name}.codes"], stored[f"{name}.scales"])))
    return stored


def _speculator(
    bundle: Bundle,
    method: str,
    name: str,
    trained: Method,
    tensors: dict[str, NDArray[Any]],
    scores: Scores,
    trainer: Trainer,
    store: TextStore,
) -> Speculator:
    manifest = bundle.manifest
    target = SpeculatorTarget(
        manifest.name, manifest.sizes.hidden, manifest.sizes.layers, manifest.sizes.vocabulary, manifest.source.files
    )
    options = trainer.options
    report = {
        "text_tokens": store.tokens(),
        "tokens_seen": trainer.state.step * options.rows * options.length,
        "passes": options.passes,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "minutes": round(trainer.state.seconds / 60, 1),
        "held_out": {
            "places": int(scores.counts[0, 0]),
            "mean_accepted_tokens": round(scores.mean_accepted_tokens(), 3),
        },
        "curve": [list(point) for point in trainer.state.curve],
    }
    return Speculator(
        method=method,
        name=name,
        licence=manifest.source.licence,
        target=target,
        taps=trained.taps,
        config=trained.config,
        acceptance=tuple(map(tuple, scores.acceptance())),
        report=report,
        tensors=tensors,
    )


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
