"""`specrun train`: from a bundle to a speculator in it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specrun.export.quantize import dequantize_matrix
from specrun.export.speculator_config import (
    DraftConfig,
    EagleConfig,
    MedusaConfig,
    SpeculatorConfig,
    SpeculatorTarget,
    check_config,
)
from specrun.export.speculator_weights import (
    BLOCK,
    Speculator,
    dequantize_rows,
    quantized,
    write_speculator,
)
from specrun.export.speculators import REPORT_NAME, attach_speculator
from specrun.export.target_ends import TargetEnds, read_target_ends, read_target_layer
from specrun.export.training.batches import Batch
from specrun.export.training.draft import DraftModel
from specrun.export.training.eagle import EagleModel
from specrun.export.training.medusa import MedusaModel
from specrun.export.training.report import Earlier, draw_report, read_earlier
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.text_store import TextStore
from specrun.export.training.text_writer import feature_width, write_text
from specrun.export.training.trainer import Losses, Measure, Trainer, TrainingOptions, fastest_dtype
from specrun.models_cache.diskerrors import cache_errors
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError, UsageError
from specrun.models_cache.layout import Bundle, cache_root, check_bundle_name
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.speculator import InstalledSpeculator
from specrun.models_cache.store import hold_lock
from specrun.models_cache.strictjson import StrictJsonError

DRAFT_VOCABULARY = 8192
EOS_SHARE = 10**9  # counts so often, as every answer ends with one
DEPTH = 4  # of the chain whose acceptance is reported
EAGLE_STEPS = 3  # of the training-time test
MEDUSA_BLOCKS = 2
DRAFT_LAYERS = 2
LEARNING_RATES = {"medusa": 1e-3, "eagle": 1e-3, "draft": 1e-3}
CONTINUED_RATE = 0.5  # of the learning rate, where a training goes on from trained weights
PASSES = {"medusa": 3.0, "eagle": 4.0, "draft": 4.0}


@dataclass(frozen=True, slots=True)
class Method:
    """What one method trains. losses: for training; measure: counts of a chain of DEPTH tokens.

    read: the taps of the target's features that training needs
    """

    model: MedusaModel | EagleModel | DraftModel
    losses: Losses
    measure: Measure
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """A speculator in its bundle, and in the folder that `specrun export --draft` takes; the text it was trained on."""

    installed: InstalledSpeculator
    speculator: Speculator
    folder: Path
    text: TextStore


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
    start: Speculator | None = None,
    restart: bool = False,
    force: bool = False,
    keep_features: bool = True,
    progress: Progress | None = None,
) -> Trained:
    """Train a speculator for a bundle and attach it.

    method: medusa, eagle or draft. tokens: of training text, self-written or answers to `prompts` (token ids, each
    once), which the methods share; passes: over it. work: where text and checkpoint are kept, by default under the
    cache root; a killed training goes on from there, unless `restart`. start: a speculator from whose weights to go on,
    with its vocabulary, instead of fresh ones. keep_features: whether what the target computed
    over the text stays on disk for the next training; otherwise it is computed again when it is needed.
    Raises UnsupportedModelError for a bundle without features, UsageError for settings that do not fit or a name that
    is taken (unless `force`), IntegrityError for a start with a damaged report, CacheError where the disk is too small.
    """
    report = progress or no_progress
    if passes is not None and not 0.0 < passes < math.inf:
        raise UsageError(f"passes must be above 0 and finite, not {passes}.")
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must be from 0 to 2**63 - 1, not {seed}.")
    earlier = read_earlier(start)
    name = check_bundle_name(method if name is None else name)
    feature_width(bundle)
    ends = read_target_ends(bundle)
    config, taps = speculator_config(method, bundle, ends)
    if start is not None and (start.method, start.config, start.taps) != (method, config, taps):
        raise UsageError(f"Speculator {start.name!r} is not what `specrun train {method}` makes: train without --from.")
    if not force:
        _refuse_taken(bundle, name)
    folder = work or cache_root() / "training" / bundle.target_digest[:16]
    text = folder / ("text" if prompts is None else f"answers-{_digest(prompts)}")
    checkpoints = folder / method
    # One training at a time: it may delete the features, which the methods share.
    with hold_lock(folder / "training.lock", report), cache_errors(folder):
        if not force:
            _refuse_taken(bundle, name)  # by the training that was waited for
        store = write_text(bundle, text, tokens, seed=seed, threads=threads, prompts=prompts, progress=report)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type == "cpu":
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        vocabulary = draft_vocabulary(store, bundle)
        if start is not None and start.vocabulary is not None:
            vocabulary = start.vocabulary.astype(np.int64)
        parts = target_parts(bundle, ends, vocabulary, device)
        trained = _method(method, bundle, parts, device)
        rate = LEARNING_RATES[method]
        options = TrainingOptions(passes=passes or PASSES[method], learning_rate=rate, seed=seed)
        if start is not None:
            _copy_weights(trained, start)
            options = replace(options, learning_rate=rate * CONTINUED_RATE, start=_weights_digest(start))
        columns = _columns(bundle, trained.read)
        trainer = Trainer(trained.model, trained.losses, trained.measure, store, options, columns, checkpoints, report)
        if restart:
            trainer.forget()
        trainer.run()
        tensors = _stored_tensors(trained, parts)
        scores = trainer.measure()  # of the weights as they are stored
        manifest = bundle.manifest
        speculator = Speculator(
            method=method,
            name=name,
            licence=manifest.source.licence,
            target=_target(bundle),
            taps=taps,
            config=config,
            acceptance=tuple(map(tuple, scores.acceptance())),
            report=_report(scores, trainer, store, earlier),
            tensors=tensors,
        )
        picture = draw_report(speculator).encode("utf-8")
        files = {REPORT_NAME: picture}
        installed = attach_speculator(bundle, speculator, force=force, progress=report, extra_files=files)
        write_speculator(checkpoints / "weights", speculator)
        (checkpoints / "weights" / REPORT_NAME).write_bytes(picture)
        trainer.forget()
        if not keep_features:
            store.drop_features()
    return Trained(installed, speculator, checkpoints / "weights", store)


def _refuse_taken(bundle: Bundle, name: str) -> None:
    if any(found.name == name for found in bundle.speculators()):
        raise UsageError(
            f"{bundle.manifest.name} has a speculator {name!r} already: choose another name (--name), "
            "or --force to replace it."
        )


def draft_vocabulary(store: TextStore, bundle: Bundle) -> NDArray[np.int64]:
    """The commonest tokens of the target's answers, then of all text; ascending.

    Raises IntegrityError for text with tokens that the target does not have.
    """
    sizes = bundle.manifest.sizes
    counts = np.zeros(sizes.vocabulary, np.int64)
    for name in store.names():
        shard = store.load(name)
        if shard.tokens.max() >= sizes.vocabulary:
            raise IntegrityError(f"{store.folder} holds text of another model in {name}.npz: delete that folder.")
        counts += 8 * np.bincount(shard.tokens[shard.answer], minlength=sizes.vocabulary)
        counts += np.bincount(shard.tokens, minlength=sizes.vocabulary)
    counts[list(bundle.manifest.special_ids.eos)] += EOS_SHARE
    size = min(DRAFT_VOCABULARY, sizes.tokens)
    return np.sort(np.argsort(-counts[: sizes.tokens], kind="stable")[:size])


def target_parts(
    bundle: Bundle,
    ends: TargetEnds,
    vocabulary: NDArray[np.int64],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> TargetParts:
    """The frozen tensors, out of the bundle's own graph. dtype: of the matrices, by default `fastest_dtype`."""
    sizes = bundle.manifest.sizes
    dtype = dtype or fastest_dtype(device)
    # Copies: plain float32 weights are a view of the bundle's file.
    return TargetParts(
        torch.tensor(dequantize_matrix(ends.embedding), dtype=dtype, device=device),
        torch.tensor(dequantize_matrix(ends.head, vocabulary), dtype=dtype, device=device),
        torch.from_numpy(ends.final_norm).to(device),
        torch.from_numpy(vocabulary).to(device),
        epsilon=ends.norm_epsilon,
        rope_theta=ends.rope_theta,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate=sizes.intermediate,
    )


def speculator_config(method: str, bundle: Bundle, ends: TargetEnds) -> tuple[SpeculatorConfig, tuple[int, ...]]:
    """What is trained for a bundle, and the taps that it reads.

    Raises UsageError for another method, UnsupportedModelError where a speculator cannot have the target's sizes.
    """
    sizes, features = bundle.manifest.sizes, bundle.manifest.features
    assert features is not None
    shape: dict[str, Any] = {
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate": sizes.intermediate,
        "rope_theta": ends.rope_theta,
        "norm_epsilon": ends.norm_epsilon,
    }
    config: SpeculatorConfig
    taps: tuple[int, ...] = ()
    if method == "medusa":
        config, taps = MedusaConfig(DEPTH, MEDUSA_BLOCKS, "medusa-joined", ends.norm_epsilon), features.taps
    elif method == "eagle":
        config, taps = EagleConfig("joined", **shape), features.taps
    elif method == "draft":
        config = DraftConfig(min(DRAFT_LAYERS, sizes.layers), **shape)
    else:
        raise UsageError(f"There is no method {method!r} to train: choose medusa, eagle or draft.")
    try:
        check_config(config, _target(bundle), taps)
    except StrictJsonError as error:
        raise UnsupportedModelError(f"{bundle.manifest.name} cannot have a speculator of its sizes: {error}.") from None
    if features.taps[-1:] != (sizes.layers,):
        raise UnsupportedModelError(
            f"The graph of {bundle.manifest.name} lacks the last residual stream: export it again, with --force."
        )
    return config, taps


def _method(method: str, bundle: Bundle, parts: TargetParts, device: torch.device) -> Method:
    sizes = bundle.manifest.sizes
    last = (sizes.layers,)
    assert bundle.manifest.features is not None
    taps = bundle.manifest.features.taps
    if method == "medusa":
        medusa = MedusaModel(parts, len(taps), DEPTH, MEDUSA_BLOCKS).to(device)
        return Method(medusa, medusa.losses, _counting(medusa.losses), taps)
    if method == "eagle":
        eagle = EagleModel(parts, len(taps)).to(device)
        return Method(
            eagle,
            lambda batch: eagle.losses(batch, EAGLE_STEPS),
            _counting(lambda batch, scores: eagle.losses(batch, DEPTH, scores)),
            taps,
        )
    layers = min(DRAFT_LAYERS, sizes.layers)
    draft = DraftModel(parts, layers).to(device)
    draft.start_from([read_target_layer(bundle, index) for index in _spread(layers, sizes.layers)])
    return Method(draft, draft.losses, _counting(lambda batch, scores: draft.losses(batch, DEPTH, scores)), last)


def _counting(losses: Callable[[Batch, Scores], torch.Tensor]) -> Measure:
    def measure(batch: Batch) -> Scores:
        scores = Scores(DEPTH)
        losses(batch, scores)
        return scores

    return measure


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
    stored: dict[str, NDArray[Any]] = {"vocabulary": parts.vocabulary.cpu().numpy().astype(np.int32)}
    for name, tensor in trained.model.tensors().items():
        array = tensor.detach().float().cpu().numpy()
        if tensor.ndim < 2 or name == "tap_norms" or array.shape[1] % BLOCK:
            stored[name] = array.astype(np.float16)
            continue
        stored |= quantized(name, array)
        tensor.copy_(torch.from_numpy(dequantize_rows(stored[f"{name}.codes"], stored[f"{name}.scales"])))
    return stored


@torch.no_grad()
def _copy_weights(trained: Method, start: Speculator) -> None:
    """Raises UsageError if `start` lacks a tensor, or has one of another shape."""
    for name, tensor in trained.model.tensors().items():
        if name not in start or start.tensor(name).shape != tuple(tensor.shape):
            raise UsageError(f"Speculator {start.name!r} has no {name} of the right shape: train without --from.")
        tensor.copy_(torch.from_numpy(start.tensor(name)))


def _weights_digest(speculator: Speculator) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(speculator.tensors.items()):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _target(bundle: Bundle) -> SpeculatorTarget:
    manifest = bundle.manifest
    sizes = manifest.sizes
    return SpeculatorTarget(manifest.name, sizes.hidden, sizes.layers, sizes.vocabulary, manifest.source.files)


def _report(scores: Scores, trainer: Trainer, store: TextStore, earlier: Earlier) -> dict[str, Any]:
    """Tokens, minutes and the curve count from the first training, where this one went on from another."""
    options = trainer.options
    seen = earlier.tokens_seen
    curve = [list(point) for point in earlier.curve]
    curve += [[seen + tokens, *rest] for tokens, *rest in trainer.state.curve]
    return {
        "text_tokens": store.tokens(),
        "tokens_seen": seen + trainer.state.step * options.rows * options.length,
        "tokens_seen_before": seen,
        "passes": options.passes,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "minutes": round(earlier.minutes + trainer.state.seconds / 60, 1),
        "held_out": {
            "places": int(scores.counts[0, 0]),
            "mean_accepted_tokens": round(scores.mean_accepted_tokens(), 3),
        },
        "curve": curve,
    }


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
