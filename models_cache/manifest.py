"""The bundle manifest: what `export` writes and `runtime` reads. Nothing else passes between them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specrun.models_cache.errors import ManifestError, OtherKindError
from specrun.models_cache.strictjson import StrictJsonError, decode, parse_object

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
REWARD_KIND = "reward"
SHARED_GRAPH = "target_shared"
"""The graph of best-of-N, for rows behind one prefix. Bundles made before it was there lack it."""
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
MAX_FILE_BYTES = 1 << 42
MAX_SIZE = (1 << 31) - 1
_SHA256 = re.compile(r"[0-9a-f]{64}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, ONNX dtype name ("float32", "int64", ...) and shape (ints, or names for symbolic dimensions)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX file of the bundle. `requires` names what the installed operator schema must have ("query_seqlens").

    max_batch: rows that may have several new tokens in one run, None for any number. Beyond it a graph without dummy
    rows still takes rows of one token each.
    """

    file: str
    data: tuple[str, ...]
    requires: tuple[str, ...]
    max_batch: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model. `vocabulary` is the width of the logits; `tokens` how many ids the tokenizer really has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids with a meaning. `eos` holds every id that ends a text."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    add_bos: bool


@dataclass(frozen=True, slots=True)
class KVSpec:
    """KV buffers: [batch, kv_heads, capacity, head_dim] of `dtype`. `positions` = rows of the rotary tables.

    window: the narrowest sliding window of a layer, None where every layer sees everything.
    """

    dtype: str
    positions: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class FeaturesSpec:
    """The output `features`: for each tap, ascending, the residual stream entering that layer (n: leaving the last)."""

    taps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """Where the weights came from. `files` maps a file name to its sha256."""

    name: str
    kind: str  # "path" | "hub" | "index"
    files: dict[str, str]
    licence: str | None


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Against the dequantised source on a fixed text: RMSE of logits, share of equal argmax, mean KL in nats."""

    logit_rmse: float
    argmax_agreement: float
    mean_kl: float
    positions: int


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size in bytes and sha256 (hex) of one file."""

    size: int
    sha256: str


class Listed(Protocol):
    """A manifest that names files with their sizes and digests."""

    @property
    def files(self) -> Mapping[str, FileInfo]: ...


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that the runtime must know of a bundle."""

    name: str
    family: str
    sizes: Sizes
    special_ids: SpecialIds
    graphs: dict[str, GraphSpec]  # "target", "target_batch1", perhaps "target_shared"
    precision: dict[str, str]  # part ("embedding", "attention", "mlp", "head", "requested") -> precision
    kv: KVSpec
    source: SourceInfo
    fidelity: Fidelity | None
    features: FeaturesSpec | None = None  # None: the graphs have no such output
    widths_validated: tuple[int, ...] = ()
    files: dict[str, FileInfo] = field(default_factory=dict)  # path inside the bundle -> size and digest
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Decode and check the text of a manifest.

        Raises ManifestError: malformed JSON, unknown or missing keys, wrong types, another schema version, names that
        leave the bundle, sizes out of range, graph files that `files` does not list. OtherKindError: a reward model.
        """
        try:
            value = parse_object(text)
            if value.get("kind") == REWARD_KIND:
                raise OtherKindError(
                    "it is a reward model, which rates texts and writes none: name a language model here, and this one "
                    "as --score reward:NAME of `specrun best-of`"
                )
            version = value.get("schema_version")
            if version != SCHEMA_VERSION or type(version) is not int:
                raise ManifestError(other_version(version, SCHEMA_VERSION))
            manifest: Manifest = decode(cls, value)
        except StrictJsonError as error:
            raise ManifestError(f"{MANIFEST_NAME} is not valid: {error}; export the model again") from None
        check_manifest(manifest)
        return manifest


def other_version(version: Any, known: int) -> str:
    """What is wrong with a schema version, and the fix."""
    if type(version) is int and version > known:
        return (
            f"{MANIFEST_NAME} has schema version {version} and this specrun reads {known}; "
            "update specrun, or export the model again with this version"
        )
    return (
        f"{MANIFEST_NAME} has schema version {json.dumps(version)} and this specrun reads {known}; "
        "export the model again"
    )


def manifest_to_json(manifest: Manifest) -> str:
    """Encode a complete manifest, the same text for the same manifest.

    Raises ManifestError where `Manifest.from_json` would refuse the text.
    """
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"
    Manifest.from_json(text)
    return text


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Read `folder`'s manifest and the sha256 (hex) of its bytes.

    Raises ManifestError as `load_manifest` does.
    """
    return read_manifest_file(folder, Manifest.from_json)


def read_manifest_file(folder: Path, parse: Callable[[str], T], kind: str = "bundle") -> tuple[T, str]:
    """What `parse` makes of the text of `folder`'s manifest.json, and the sha256 (hex) of its bytes.

    Raises ManifestError naming the folder: absent, unreadable, too large, not UTF-8, or refused by `parse`.
    """
    path = folder / MANIFEST_NAME
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ManifestError(f"{folder} holds no {MANIFEST_NAME}, so it is no {kind}; export the model again") from None
    except OSError as error:
        reason = error.strerror or error
        raise ManifestError(f"{path} cannot be read ({reason}); check the permissions of the folder") from error
    try:
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(f"{MANIFEST_NAME} is larger than {MAX_MANIFEST_BYTES} bytes; export the model again")
        manifest = parse(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ManifestError(f"{path} is not UTF-8 text; export the model again") from None
    except ManifestError as error:
        raise type(error)(f"{folder}: {error}") from None
    return manifest, hashlib.sha256(data).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the bundle in `folder`.

    Raises ManifestError when it is absent, malformed, of another schema version, or names files outside the bundle,
    by its text or through a symbolic link.
    """
    manifest, _ = read_manifest(folder)
    check_links(folder, manifest)
    return manifest


def check_name_inside(name: str, what: str) -> None:
    """Check that `name` is a relative path with `/` between its parts that stays inside the bundle.

    Raises ManifestError.
    """
    odd = any(c in '\\:"<>|?*' or ord(c) < 32 or 0xD800 <= ord(c) < 0xE000 for c in name)
    if odd or any(part in ("", ".", "..") for part in name.split("/")):
        raise ManifestError(
            f"{what} names {name!r}, and file names in a bundle must be relative and stay inside it; "
            "take the bundle from a trusted source or export the model again"
        )


def leaves_bundle(folder: Path, name: str) -> bool:
    """Whether `name` leaves `folder` through a symbolic link."""
    try:
        return not (folder / name).resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return True


def check_links(folder: Path, manifest: Listed) -> None:
    """Check that no file or folder that the manifest names leaves `folder` through a symbolic link.

    Raises ManifestError.
    """
    for name in manifest.files:
        if leaves_bundle(folder, name):
            raise ManifestError(f"{folder}: {name} is a link that leaves the bundle; copy the file itself there")


def check_manifest(manifest: Manifest) -> None:
    """Check a complete manifest: names, sizes, digests, and that every graph file is listed in `files`.

    Raises ManifestError.
    """
    if not manifest.name:
        raise ManifestError(f"{MANIFEST_NAME}: the name is empty; export the model again")
    if not manifest.name.isprintable() or "/" in manifest.name:
        raise ManifestError(f"{MANIFEST_NAME}: {manifest.name!r} cannot name a model; export the model again")
    check_files(manifest.files, manifest.graphs)
    _check_numbers(manifest)
    for name, digest in manifest.source.files.items():
        check_digest(f"source file {name}", digest)


def check_files(files: Mapping[str, FileInfo], graphs: Mapping[str, GraphSpec]) -> None:
    """Check names, sizes and digests of `files`, and that every file of a graph is among them.

    Raises ManifestError.
    """
    for name, info in files.items():
        check_name_inside(name, "files")
        if name == MANIFEST_NAME:
            raise ManifestError(f"files lists {MANIFEST_NAME} itself; export the model again")
        check_range(f"size of {name}", info.size, 1, MAX_FILE_BYTES)
        check_digest(name, info.sha256)
    for label, graph in graphs.items():
        for name in (graph.file, *graph.data):
            check_name_inside(name, f"graph {label!r}")
            if name not in files:
                raise ManifestError(f"graph {label!r} uses {name}, which files does not list; export the model again")
        if graph.max_batch is not None:
            check_range(f"max_batch of graph {label!r}", graph.max_batch, 1, MAX_SIZE)


def _check_numbers(manifest: Manifest) -> None:
    for entry in dataclasses.fields(Sizes):
        check_range(f"sizes.{entry.name}", getattr(manifest.sizes, entry.name), 1, MAX_SIZE)
    check_range("sizes.tokens", manifest.sizes.tokens, 1, manifest.sizes.vocabulary)
    check_range("kv.positions", manifest.kv.positions, manifest.sizes.context, MAX_SIZE)
    if manifest.kv.window is not None:
        check_range("kv.window", manifest.kv.window, 1, MAX_SIZE)
    if manifest.features is not None:
        taps = manifest.features.taps
        if not taps or list(taps) != sorted(set(taps)):
            raise ManifestError("features.taps must be ascending layers, each once; export the model again")
        for tap in taps:
            check_range("features.taps", tap, 0, manifest.sizes.layers)
    ids = manifest.special_ids
    for number in (ids.bos, ids.pad, *ids.eos):
        if number is not None:
            check_range("special_ids", number, 0, manifest.sizes.vocabulary - 1)
    for width in manifest.widths_validated:
        check_range("widths_validated", width, 1, MAX_SIZE)


def check_range(what: str, number: int, low: int, high: int) -> None:
    """Raise ManifestError unless low <= number <= high."""
    if not low <= number <= high:
        raise ManifestError(f"{what} is {number} and must lie between {low} and {high}; export the model again")


def check_digest(what: str, digest: str) -> None:
    """Raise ManifestError unless `digest` is a sha256 in lower-case hex."""
    if _SHA256.fullmatch(digest) is None:
        raise ManifestError(f"the sha256 of {what} is not 64 lower-case hex digits; export the model again")
