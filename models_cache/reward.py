"""Bundles of reward models: a graph that rates a text, with its tokenizer and a manifest of its own kind.

They live beside the language models, below models/, and are written, checked and removed in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from specrun.models_cache.errors import IntegrityError, ManifestError, OtherKindError, UsageError
from specrun.models_cache.integrity import Problem, check_sizes, verify_files
from specrun.models_cache.layout import Bundle, check_bundle_name, find_folder, load_bundle, models_dir
from specrun.models_cache.manifest import (
    MANIFEST_NAME,
    MAX_SIZE,
    REWARD_KIND,
    FileInfo,
    GraphSpec,
    SourceInfo,
    SpecialIds,
    check_digest,
    check_files,
    check_links,
    check_range,
    other_version,
    read_manifest_file,
)
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.store import new_bundle
from specrun.models_cache.strictjson import StrictJsonError, decode, parse_object

REWARD_SCHEMA: Final = 1
GRAPH: Final = "reward"
TEMPLATE_NAME: Final = "chat_template.jinja"
TOKENIZER_NAME: Final = "tokenizer.json"
# What such a graph may take: i64 [batch, positions] each.
INPUTS: Final = ("input_ids", "attention_mask", "token_type_ids")
MOST_LABELS: Final = 4096
_AGAIN: Final = "export it again with `specrun export --task reward SOURCE`"


@dataclass(frozen=True, slots=True)
class RewardManifest:
    """Everything that the runtime must know of a reward model.

    The graph `reward` takes `INPUTS`, or some of them, and gives `logits` f32 [batch, labels]. labels: their names;
    label: the one to read (its log-softmax; the logit itself where there is one label only). vocabulary: rows of the
    embedding; tokens: ids of the tokenizer; context: the most tokens of one text. pad: fills shorter rows of a batch;
    None where only rows of one length go together. error: the largest difference from the source's own logits seen.
    """

    name: str
    family: str
    graphs: dict[str, GraphSpec]
    labels: tuple[str, ...]
    label: int
    vocabulary: int
    tokens: int
    context: int
    pad: int | None
    special_ids: SpecialIds
    source: SourceInfo
    error: float
    files: dict[str, FileInfo] = field(default_factory=dict)
    kind: str = REWARD_KIND
    schema_version: int = REWARD_SCHEMA

    @classmethod
    def from_json(cls, text: str) -> RewardManifest:
        """Decode and check the text of a manifest.

        Raises ManifestError as `Manifest.from_json` does; OtherKindError for the manifest of a language model.
        """
        try:
            value = parse_object(text)
            if value.get("kind") != REWARD_KIND:
                raise OtherKindError(
                    "it is no reward model; make one with `specrun export --task reward SOURCE`, and name that"
                )
            version = value.get("schema_version")
            if version != REWARD_SCHEMA or type(version) is not int:
                raise ManifestError(other_version(version, REWARD_SCHEMA))
            manifest: RewardManifest = decode(cls, value)
        except StrictJsonError as error:
            raise ManifestError(f"{MANIFEST_NAME} is not valid: {error}; {_AGAIN}") from None
        _check(manifest)
        return manifest


def _check(manifest: RewardManifest) -> None:
    try:
        check_bundle_name(manifest.name)
    except UsageError as error:
        raise ManifestError(f"{MANIFEST_NAME}: {error}") from None
    check_files(manifest.files, manifest.graphs)
    if set(manifest.graphs) != {GRAPH}:
        raise ManifestError(f"{MANIFEST_NAME}: a reward model has one graph, {GRAPH!r}; {_AGAIN}")
    if TOKENIZER_NAME not in manifest.files:
        raise ManifestError(f"{MANIFEST_NAME}: files does not list {TOKENIZER_NAME}; {_AGAIN}")
    graph = manifest.graphs[GRAPH]
    names = [tensor.name for tensor in graph.inputs]
    if "input_ids" not in names or len(set(names)) != len(names) or not set(names) <= set(INPUTS):
        raise ManifestError(f"{MANIFEST_NAME}: the inputs {', '.join(names)} are not those of a reward model; {_AGAIN}")
    if [tensor.name for tensor in graph.outputs] != ["logits"]:
        raise ManifestError(f"{MANIFEST_NAME}: a reward model has one output, logits; {_AGAIN}")
    check_range("number of labels", len(manifest.labels), 1, MOST_LABELS)
    check_range("label", manifest.label, 0, len(manifest.labels) - 1)
    check_range("vocabulary", manifest.vocabulary, 1, MAX_SIZE)
    check_range("tokens", manifest.tokens, 1, manifest.vocabulary)
    check_range("context", manifest.context, 1, MAX_SIZE)
    ids = manifest.special_ids
    for number in (manifest.pad, ids.bos, ids.pad, *ids.eos):
        if number is not None:
            check_range("special_ids", number, 0, manifest.vocabulary - 1)
    for name, digest in manifest.source.files.items():
        check_digest(f"source file {name}", digest)


def reward_manifest_to_json(manifest: RewardManifest) -> str:
    """Encode a complete manifest. Raises ManifestError where `from_json` would refuse the text."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"
    RewardManifest.from_json(text)
    return text


@dataclass(frozen=True, slots=True)
class RewardBundle:
    """A reward model on disk; `digest` is the sha256 (hex) of the bytes of its manifest.json."""

    path: Path
    manifest: RewardManifest
    digest: str

    @property
    def graph_path(self) -> Path:
        """The file of its graph."""
        return self.path / self.manifest.graphs[GRAPH].file

    def text(self, name: str) -> str | None:
        """The text of one of its files, None where the manifest does not list it.

        Raises ManifestError for a file that is there and not listed; IntegrityError for one that cannot be read.
        """
        path = self.path / name
        if name not in self.manifest.files:
            if os.path.lexists(path):
                raise ManifestError(f"{self.path}: the manifest does not list {name}; {_AGAIN}")
            return None
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"{path} cannot be read ({error}): {_AGAIN}") from error


def load_reward(path: Path, *, check: bool = True) -> RewardBundle:
    """Load the reward model in a folder; with `check`, look also at presence and size of each file.

    Raises ManifestError; OtherKindError for a language model; IntegrityError naming the first file that is wrong.
    """
    path = Path(os.path.abspath(path))
    manifest, digest = read_manifest_file(path, RewardManifest.from_json, "reward model")
    if check:
        check_links(path, manifest)
        if problems := check_sizes(path, manifest):
            first = problems[0]
            raise IntegrityError(f"{path / first.file} {first.message}; {_AGAIN}")
    return RewardBundle(path, manifest, digest)


def find_reward(name_or_path: str | Path, *, root: Path | None = None, check: bool = True) -> RewardBundle:
    """Find a reward model by its name in the cache or by the path of its folder, and load it as `load_reward` does.

    Raises ModelNotFoundError too.
    """
    return load_reward(find_folder(name_or_path, root=root), check=check)


def find_model(name_or_path: str | Path, *, root: Path | None = None, check: bool = True) -> Bundle | RewardBundle:
    """Find a model of either kind. Raises as `find_bundle` does, but never OtherKindError."""
    return load_model(find_folder(name_or_path, root=root), check=check)


def load_model(path: Path, *, check: bool = True) -> Bundle | RewardBundle:
    """Load the model in a folder, of either kind. Raises as `load_bundle` does, but never OtherKindError."""
    try:
        return load_bundle(path, check=check)
    except OtherKindError:
        return load_reward(path, check=check)


def verify_reward(bundle: RewardBundle, progress: Progress = no_progress) -> list[Problem]:
    """Read every file of a reward model, compare sizes and digests, and return what differs."""
    return verify_files(bundle.path, bundle.manifest, progress)


def reward_or_build(
    name: str,
    build: Callable[[Path], RewardManifest],
    *,
    root: Path | None = None,
    output: Path | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> RewardBundle:
    """Return the sound reward model of that name, or let `build` write its files into a staging folder and publish
    them, as `bundle_or_build` does for language models.

    Raises UsageError where a language model has that name, or `output` holds a bundle, unless `force`; what `build`
    raises; IntegrityError; CacheError.
    """
    name = check_bundle_name(name)
    target = models_dir(root) / name if output is None else Path(os.path.expanduser(output))
    if not force and (found := _sound(target)) is not None:
        return _existing(found, output)
    with new_bundle(name, root, output=output, progress=progress) as staging:
        if not force and (found := _sound(target)) is not None:
            return _existing(found, output)
        manifest = dataclasses.replace(build(staging.path), name=name, files=staging.seal())
        staging.write_manifest(reward_manifest_to_json(manifest))
        load_reward(staging.path)
        staging.publish()
        return load_reward(staging.target)


def _existing(bundle: RewardBundle, output: Path | None) -> RewardBundle:
    if output is not None:
        raise UsageError(f"{bundle.path} holds a bundle already; choose another output folder or pass --force")
    return bundle


def _sound(path: Path) -> RewardBundle | None:
    try:
        return load_reward(path)
    except OtherKindError:
        raise UsageError(
            f"{path} holds a language model: choose another --name for the reward model, or --force to replace it."
        ) from None
    except (ManifestError, IntegrityError):
        return None
