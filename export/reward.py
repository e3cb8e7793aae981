"""From a sequence-classification model to the bundle of a reward model, through optimum's ONNX exporter."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from specrun.export.bundle import bundle_name
from specrun.export.config_keys import read_config
from specrun.export.tokenizer import TokenizerFiles, tokenizer_files
from specrun.models_cache.errors import BackendError, SpecrunError, UnsupportedModelError, UsageError
from specrun.models_cache.manifest import GraphSpec, SourceInfo, SpecialIds, TensorSpec
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.reward import (
    GRAPH,
    INPUTS,
    MOST_LABELS,
    TEMPLATE_NAME,
    TOKENIZER_NAME,
    RewardBundle,
    RewardManifest,
    reward_or_build,
)
from specrun.models_cache.sources import FetchedSource, fetch_source

INSTALL_HINT: Final = "Exporting a reward model needs optimum: install it with `pip install 'specrun[optimum]'`."
TASK: Final = "text-classification"
MOST_CONTEXT: Final = 1 << 22
# Their positions are counted from behind the padding id, so that many rows of the table hold no position.
_POSITIONS_AFTER_PAD: Final = frozenset(
    {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "xmod", "mpnet", "data2vec-text"}
)
_TOLERANCE: Final = 1e-3
_CHECKED_LENGTHS: Final = (5, 12, 9)


def export_reward(
    source: str,
    *,
    name: str | None = None,
    label: str | None = None,
    output: Path | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> RewardBundle:
    """Export a sequence-classification model (a folder of safetensors weights, or a hub id) and return its bundle.

    label: the one whose log-probability is the reward, needed where there are two or more. name: by default the
    source's own. output: a folder outside the cache. An existing reward model of that name is returned as it is unless
    `force`. No pickle is read, and no code that comes with a model is run.

    Raises UsageError, also where the extra `optimum` is missing or another model has that name; UnsupportedModelError;
    SourceError, IntegrityError, CacheError.
    """
    report = progress or no_progress
    name = bundle_name(source) if name is None else name

    def build(folder: Path) -> RewardManifest:
        _require_optimum()
        return write_reward(folder, fetch_source(source, progress=report), label=label, progress=report)

    bundle = reward_or_build(name, build, output=output, force=force, progress=report)
    manifest = bundle.manifest
    if bundle_name(manifest.source.name) != bundle_name(source):
        raise UsageError(
            f"{name} is there already, made from {manifest.source.name}: choose another --name, or --force to replace "
            "it."
        )
    if label is not None and _label_index(manifest.labels, label) != manifest.label:
        raise UsageError(
            f"{name} is there already and reads the label {manifest.labels[manifest.label]!r}: choose another --name, "
            "or --force to replace it."
        )
    return bundle


def write_reward(
    folder: Path, fetched: FetchedSource, *, label: str | None = None, progress: Progress = no_progress
) -> RewardManifest:
    """Write graph, tokenizer and template of a fetched source into `folder`; the manifest still lacks `files`."""
    if not fetched.path.is_dir():
        raise UnsupportedModelError(
            f"{fetched.name} is a GGUF file, and a reward model is exported from a folder of safetensors weights in "
            "the transformers layout: give that."
        )
    config = read_config(fetched.path / "config.json")
    _require_classifier(config, fetched.name)
    tokenizer = tokenizer_files(fetched.path)
    progress("Loading the weights", 0, 1)
    with _quiet():
        model = _load(fetched)
        progress("Loading the weights", 1, 1)
        vocabulary = int(model.get_input_embeddings().weight.shape[0])
        if tokenizer.tokens > vocabulary:
            raise UnsupportedModelError(
                f"The tokenizer has {tokenizer.tokens} tokens and the model only {vocabulary}: they do not belong "
                "together."
            )
        labels = _labels(model.config)
        index = _chosen(labels, label, fetched.name)
        pad = _settle_padding(model, tokenizer, vocabulary)
        progress("Exporting with optimum", 0, 1)
        files = _export(model, folder, fetched.name)
        progress("Exporting with optimum", 1, 1)
        graph = _graph_spec(folder, files)
        context = _context(model.config, _read_json(fetched.path / "tokenizer_config.json"))
        progress("Comparing with the source", 0, 1)
        error = _compare(model, folder / graph.file, graph, tokenizer.tokens, pad, context)
        progress("Comparing with the source", 1, 1)
    (folder / TOKENIZER_NAME).write_text(tokenizer.tokenizer_json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (folder / TEMPLATE_NAME).write_text(tokenizer.chat_template, encoding="utf-8")
    licence = fetched.licence or config.get("license")
    return RewardManifest(
        name=fetched.name,
        family=str(model.config.model_type),
        graphs={GRAPH: graph},
        labels=labels,
        label=index,
        vocabulary=vocabulary,
        tokens=tokenizer.tokens,
        context=context,
        pad=pad,
        special_ids=_within(tokenizer.special_ids, vocabulary),
        source=SourceInfo(fetched.name, fetched.kind, fetched.files, licence if isinstance(licence, str) else None),
        error=error,
    )


def _require_optimum() -> None:
    try:
        with _quiet():
            import optimum.exporters.onnx  # noqa: F401
            import torch  # noqa: F401
            import transformers  # noqa: F401
    except ImportError as error:
        raise UsageError(INSTALL_HINT) from error


def _require_classifier(config: Mapping[str, Any], name: str) -> None:
    architectures = config.get("architectures")
    named = [str(entry) for entry in architectures] if isinstance(architectures, list) else []
    if not any(entry.endswith("ForSequenceClassification") for entry in named):
        raise UnsupportedModelError(
            f"{name} is {', '.join(named) or 'of no named architecture'} and no sequence-classification model: give a "
            "reward model, whose architecture ends in ForSequenceClassification."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars, warnings and log lines of the packages that do the work."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    bars = sys.modules.get("transformers.utils.logging")
    shown = bars is not None and bars.is_progress_bar_enabled()
    if bars is not None and shown:
        bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars is not None and shown:
            bars.enable_progress_bar()


def _load(fetched: FetchedSource) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            fetched.path,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except SpecrunError:
        raise
    except Exception as error:  # whatever transformers, torch and safetensors raise for a file that they refuse
        raise UnsupportedModelError(f"transformers cannot load {fetched.name}: {_first_line(error)}") from error
    missing = sorted({*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])})
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UnsupportedModelError(
            f"{fetched.name} lacks the weights {missing[0]}{more}, so its scores would be random: give a model that "
            "was trained as a classifier."
        )
    return model.eval()


def _labels(config: Any) -> tuple[str, ...]:
    count = int(config.num_labels)
    if not 1 <= count <= MOST_LABELS:
        raise UnsupportedModelError(f"The model has {count} labels; specrun reads 1 to {MOST_LABELS}.")
    names = config.id2label or {}
    return tuple(str(names.get(index, f"LABEL_{index}")) for index in range(count))


def _chosen(labels: tuple[str, ...], label: str | None, name: str) -> int:
    if label is None:
        if len(labels) == 1:
            return 0
        raise UsageError(f"{name} has the labels {_list(labels)}: say with --label which one is the reward.")
    return _label_index(labels, label)


def _label_index(labels: tuple[str, ...], label: str) -> int:
    if label in labels:
        return labels.index(label)
    if label.isdecimal() and int(label) < len(labels):
        return int(label)
    raise UsageError(f"There is no label {label!r}: the model has {_list(labels)}.")


def _list(labels: tuple[str, ...]) -> str:
    shown = ", ".join(labels[:8])
    return shown if len(labels) <= 8 else f"{shown} and {len(labels) - 8} more"


def _settle_padding(model: Any, tokenizer: TokenizerFiles, vocabulary: int) -> int | None:
    """The id that fills short rows, set in the model so that its pooling looks for the same one; None: there is none.

    Then the model is told of an id that no text has, so that it pools at the last token, as it does for one text alone.
    """
    pad = model.config.pad_token_id
    if pad is None:
        pad = tokenizer.special_ids.pad
    if isinstance(pad, int) and 0 <= pad < vocabulary:
        model.config.pad_token_id = pad
        return pad
    model.config.pad_token_id = vocabulary
    return None


def _within(ids: SpecialIds, vocabulary: int) -> SpecialIds:
    """The ids that the model has: configurations carry defaults of other vocabularies along."""
    bos = ids.bos if ids.bos is not None and ids.bos < vocabulary else None
    pad = ids.pad if ids.pad is not None and ids.pad < vocabulary else None
    return SpecialIds(bos, tuple(eos for eos in ids.eos if eos < vocabulary), pad, ids.add_bos and bos is not None)


def _export(model: Any, folder: Path, name: str) -> tuple[str, ...]:
    """Export into `folder`; the names of the graph's files, the graph first."""
    from optimum.exporters.onnx import onnx_export_from_model

    work = folder / "optimum"
    try:
        onnx_export_from_model(model, work, task=TASK, do_validation=False, device="cpu")
    except Exception as error:  # whatever optimum, torch and onnx raise for a model that they cannot export
        raise UnsupportedModelError(f"optimum cannot export {name}: {_first_line(error)}") from error
    found = sorted(path.name for path in work.iterdir() if path.name.startswith("model.onnx"))
    if "model.onnx" not in found:
        raise UnsupportedModelError(f"optimum wrote no model.onnx for {name}: it may need a newer release of optimum.")
    for file in found:
        (work / file).rename(folder / file)
    shutil.rmtree(work)
    return ("model.onnx", *(file for file in found if file != "model.onnx"))


def _graph_spec(folder: Path, files: tuple[str, ...]) -> GraphSpec:
    graph = onnx.load(folder / files[0], load_external_data=False).graph
    names = {tensor.name for tensor in graph.initializer}
    inputs = tuple(_tensor(value) for value in graph.input if value.name not in names)
    outputs = tuple(_tensor(value) for value in graph.output)
    for entry in inputs:
        if entry.name not in INPUTS:
            raise UnsupportedModelError(f"The exported graph wants {entry.name}, which specrun does not give it.")
    return GraphSpec(files[0], files[1:], (), None, inputs, outputs)


def _tensor(value: onnx.ValueInfoProto) -> TensorSpec:
    kind = value.type.tensor_type
    dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
    return TensorSpec(value.name, dtype, tuple(d.dim_param or int(d.dim_value) for d in kind.shape.dim))


def _context(config: Any, tokenizer_config: Mapping[str, Any]) -> int:
    """The most tokens of a text: what the positions of the model and its tokenizer's own limit allow."""
    named = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx")]
    limits = [limit for limit in named if isinstance(limit, int) and limit > 0][:1]
    if config.model_type in _POSITIONS_AFTER_PAD and limits:
        limits = [limits[0] - int(config.pad_token_id) - 1]
    own = tokenizer_config.get("model_max_length")
    if isinstance(own, int | float) and 0 < own <= MOST_CONTEXT:
        limits.append(int(own))
    return max(1, min([*limits, MOST_CONTEXT]))


def _compare(model: Any, path: Path, graph: GraphSpec, tokens: int, pad: int | None, context: int) -> float:
    """The largest difference of logits between the source and its graph, on a padded batch and on one row alone."""
    import torch

    session = _session(path)
    rng = np.random.default_rng(0)
    allowed = np.array([token for token in range(min(tokens, 4096)) if token != pad])
    lengths = [min(length, context) for length in _CHECKED_LENGTHS]
    if pad is None:
        lengths = [lengths[0]] * len(lengths)
    rows = [rng.choice(allowed, length) for length in lengths]
    ids = np.full((len(rows), max(lengths)), 0 if pad is None else pad, np.int64)
    mask = np.zeros_like(ids)
    for row, values in enumerate(rows):
        ids[row, : len(values)] = values
        mask[row, : len(values)] = 1
    wanted = {entry.name for entry in graph.inputs}
    worst = 0.0
    for chosen in (slice(0, len(rows)), slice(0, 1)):
        width = int(mask[chosen].sum(1).max())
        feed: dict[str, NDArray[np.int64]] = {"input_ids": ids[chosen, :width], "attention_mask": mask[chosen, :width]}
        feed["token_type_ids"] = np.zeros_like(feed["input_ids"])
        feed = {name: values for name, values in feed.items() if name in wanted}
        with torch.no_grad():
            theirs = model(**{name: torch.from_numpy(values.copy()) for name, values in feed.items()}).logits.numpy()
        ours = session.run(["logits"], feed)[0]
        if ours.shape != theirs.shape or not np.isfinite(ours).all():
            raise UnsupportedModelError("The exported graph does not give the source's logits; optimum may be too old.")
        worst = max(worst, float(np.abs(ours - theirs).max() / (1.0 + np.abs(theirs).max())))
    if worst > _TOLERANCE:
        raise UnsupportedModelError(
            f"The exported graph's logits differ from the source's by {worst:.2g}, so it is not kept; optimum may be "
            "too old for this model."
        )
    return worst


def _session(path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError("ONNX Runtime is not installed: install it with `pip install 'specrun[cpu]'`.") from error
    ort: Any = onnxruntime  # it ships no type information
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") + "." if text else f"{type(error).__name__}."
