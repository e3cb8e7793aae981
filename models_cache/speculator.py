"""Speculators of a bundle: BUNDLE/speculators/NAME/ holds the graph of one and a manifest of its own.

They come and go without the bundle's manifest being written anew, so a bundle in use stays what it is; each names the
target's digest that it was made for.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.models_cache.errors import IntegrityError, ManifestError, ModelNotFoundError, UsageError
from specrun.models_cache.integrity import check_sizes
from specrun.models_cache.layout import Bundle, check_bundle_name
from specrun.models_cache.manifest import (
    MANIFEST_NAME,
    MAX_SIZE,
    FileInfo,
    GraphSpec,
    KVSpec,
    check_digest,
    check_files,
    check_links,
    check_range,
    other_version,
    read_manifest_file,
)
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.store import bundle_part, remove_bundle_part
from specrun.models_cache.strictjson import StrictJsonError, decode, parse_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SPECULATORS = "speculators"
SPECULATOR_SCHEMA = 1
VOCABULARY_NAME = "vocabulary.i32"
# Layout of the graph -> (method, the graphs that there must be).
LAYOUTS = {
    "medusa": ("medusa", {"speculator"}),
    "medusa-joined": ("medusa", {"speculator"}),
    "joined": ("eagle", {"speculator"}),
    "eagle3": ("eagle", {"speculator"}),
    "eagle1": ("eagle", {"speculator"}),
    "draft": ("draft", {"target", "target_batch1"}),
}


@dataclass(frozen=True, slots=True)
class SpeculatorSizes:
    """Sizes of a speculator's graph.

    vocabulary: the target's; draft_vocabulary: width of the speculator's own logits. depth: tokens that one run
    proposes in a row (Medusa's heads), 1 otherwise. layers to positions describe its decoder layers and their KV
    buffers, [1, kv_heads, capacity, head_dim] with up to `positions` rows; all 0 for Medusa, which has none.
    """

    hidden: int
    vocabulary: int
    draft_vocabulary: int
    depth: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions: int


@dataclass(frozen=True, slots=True)
class SpeculatorManifest:
    """Everything that the runtime must know of a speculator.

    layout: "draft", or one of Medusa's or EAGLE's (`LAYOUTS`). taps: the target's residual
    streams that its `features` holds, in this order. acceptance[depth][rank]: the chance that the candidate of that
    rank is the target's token, the path so far being right. shipped: it came with specrun, so a newer one may take its
    place. files: name inside its folder -> size and digest.
    """

    name: str
    method: str
    layout: str
    target_digest: str
    graphs: dict[str, GraphSpec]
    sizes: SpeculatorSizes
    taps: tuple[int, ...]
    acceptance: tuple[tuple[float, ...], ...]
    licence: str | None
    shipped: bool = False
    files: dict[str, FileInfo] = field(default_factory=dict)
    schema_version: int = SPECULATOR_SCHEMA

    @classmethod
    def from_json(cls, text: str) -> SpeculatorManifest:
        """Decode and check the text of a manifest. Raises ManifestError as `Manifest.from_json` does."""
        try:
            value = parse_object(text)
            version = value.get("schema_version")
            if version != SPECULATOR_SCHEMA or type(version) is not int:
                raise ManifestError(other_version(version, SPECULATOR_SCHEMA))
            manifest: SpeculatorManifest = decode(cls, value)
        except StrictJsonError as error:
            raise ManifestError(f"{MANIFEST_NAME} is not valid: {error}; export the speculator again") from None
        _check(manifest)
        return manifest


def speculator_manifest_to_json(manifest: SpeculatorManifest) -> str:
    """Encode a complete manifest. Raises ManifestError where `from_json` would refuse the text."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False) + "\n"
    SpeculatorManifest.from_json(text)
    return text


def _check(manifest: SpeculatorManifest) -> None:
    wrong = f"{MANIFEST_NAME}: "
    try:
        check_bundle_name(manifest.name)
    except UsageError as error:
        raise ManifestError(f"{wrong}{error}") from None
    method, graphs = LAYOUTS.get(manifest.layout, ("", set()))
    if manifest.method != method or set(manifest.graphs) != graphs:
        raise ManifestError(
            f"{wrong}method {manifest.method!r}, layout {manifest.layout!r} and the graphs "
            f"{', '.join(sorted(manifest.graphs)) or '(none)'} do not go together; export the speculator again"
        )
    check_digest("the target", manifest.target_digest)
    check_files(manifest.files, manifest.graphs)
    sizes = manifest.sizes
    lowest = 0 if manifest.method == "medusa" else 1
    for entry in dataclasses.fields(SpeculatorSizes):
        low = 1 if entry.name in ("hidden", "vocabulary", "draft_vocabulary", "depth") else lowest
        check_range(f"sizes.{entry.name}", getattr(sizes, entry.name), low, MAX_SIZE)
    check_range("sizes.draft_vocabulary", sizes.draft_vocabulary, 1, sizes.vocabulary)
    table = manifest.files.get(VOCABULARY_NAME)
    if (table is None) != (sizes.draft_vocabulary == sizes.vocabulary):
        raise ManifestError(f"{wrong}a cut vocabulary and {VOCABULARY_NAME} go together; export the speculator again")
    if table is not None:
        check_range(f"size of {VOCABULARY_NAME}", table.size, *[4 * sizes.draft_vocabulary] * 2)
    if list(manifest.taps) != sorted(set(manifest.taps)) or bool(manifest.taps) == (manifest.layout == "draft"):
        raise ManifestError(f"{wrong}taps must be ascending layers, and none for a draft; export the speculator again")
    for tap in manifest.taps:
        check_range("taps", tap, 0, MAX_SIZE)
    if not all(manifest.acceptance) or not manifest.acceptance:
        raise ManifestError(f"{wrong}acceptance is empty; export the speculator again")
    if not all(0 <= chance <= 1 for row in manifest.acceptance for chance in row):
        raise ManifestError(f"{wrong}acceptance holds a number outside 0 .. 1; export the speculator again")


@dataclass(frozen=True, slots=True)
class InstalledSpeculator:
    """A speculator on disk; `digest` is the sha256 (hex) of the bytes of its manifest.json."""

    path: Path
    manifest: SpeculatorManifest
    digest: str

    @property
    def name(self) -> str:
        """Its name."""
        return self.manifest.name

    @property
    def weights_bytes(self) -> int:
        """Size of the data files of its graphs, each once."""
        names = {name for graph in self.manifest.graphs.values() for name in graph.data}
        return sum(self.manifest.files[name].size for name in names)

    def graph_path(self, name: str = "speculator") -> Path:
        """The file of one of its graphs."""
        return self.path / self.manifest.graphs[name].file

    def vocabulary(self) -> NDArray[np.int32] | None:
        """The target's token of each of its logits, i32 [draft_vocabulary], ascending; None where they are the same.

        Raises IntegrityError for a file that does not hold that.
        """
        import numpy as np

        sizes = self.manifest.sizes
        if sizes.draft_vocabulary == sizes.vocabulary:
            return None
        path = self.path / VOCABULARY_NAME
        try:
            ids = np.fromfile(path, "<i4").astype(np.int32)
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read ({error.strerror or error})") from error
        sound = ids.size == sizes.draft_vocabulary and (np.diff(ids) > 0).all()
        if not sound or ids[0] < 0 or ids[-1] >= sizes.vocabulary:
            raise IntegrityError(f"{path} does not hold ascending token ids; export the speculator again")
        return ids

    def draft_bundle(self, bundle: Bundle) -> Bundle:
        """A draft as a bundle of its own, for a session; tokenizer and special ids are those of the target `bundle`.

        Its logits are those of the draft vocabulary, and it exists in memory only. Raises UsageError for a head.
        """
        manifest, sizes = self.manifest, self.manifest.sizes
        if manifest.layout != "draft":
            raise UsageError(f"{self.name} is a {manifest.method} speculator and no draft model")
        ours = dataclasses.replace(
            bundle.manifest.sizes,
            layers=sizes.layers,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            intermediate=sizes.intermediate,
            vocabulary=sizes.draft_vocabulary,
            tokens=min(sizes.draft_vocabulary, bundle.manifest.sizes.tokens),
        )
        model = dataclasses.replace(
            bundle.manifest,
            name=self.name,
            sizes=ours,
            graphs=manifest.graphs,
            kv=KVSpec(bundle.manifest.kv.dtype, sizes.positions),
            features=None,
            fidelity=None,
            files=manifest.files,
        )
        return Bundle(self.path, model, self.digest)


@dataclass(frozen=True, slots=True)
class SpeculatorEntry:
    """A folder below speculators/: its speculator, or else the problem that keeps it from being used."""

    name: str
    path: Path
    speculator: InstalledSpeculator | None
    problem: str | None


def speculators_dir(bundle: Bundle) -> Path:
    """Where the speculators of a bundle live."""
    return bundle.path / SPECULATORS


def load_speculator(bundle: Bundle, path: Path, *, check: bool = True) -> InstalledSpeculator:
    """Load the speculator in a folder for `bundle`; with `check`, look also at presence and size of each file.

    Raises ManifestError, also where it was made for other graphs; IntegrityError naming the first file that is wrong.
    """
    path = Path(os.path.abspath(path))
    manifest, digest = read_manifest_file(path, SpeculatorManifest.from_json, "speculator")
    if manifest.target_digest != bundle.target_digest:
        raise ManifestError(
            f"{path.name} was made for another export of {bundle.manifest.name}; attach it again with "
            f"`specrun export SOURCE --draft {path.name}`, or make a new one with `specrun train`"
        )
    if check:
        check_links(path, manifest)
        if problems := check_sizes(path, manifest):
            first = problems[0]
            raise IntegrityError(f"{path / first.file} {first.message}; attach the speculator again")
    return InstalledSpeculator(path, manifest, digest)


def scan_speculators(bundle: Bundle, *, check: bool = True) -> list[SpeculatorEntry]:
    """List what lies below a bundle's speculators/, sorted by name, what cannot be used with its problem."""
    entries = []
    folder = speculators_dir(bundle)
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        names = []
    for name in names:
        speculator = problem = None
        try:
            speculator = _load_named(bundle, name, check)
        except (ManifestError, IntegrityError) as error:
            problem = str(error)
        entries.append(SpeculatorEntry(name, folder / name, speculator, problem))
    return entries


def _load_named(bundle: Bundle, name: str, check: bool) -> InstalledSpeculator:
    path = speculators_dir(bundle) / name
    if not path.resolve().is_relative_to(bundle.path.resolve()):
        raise ManifestError(f"{path} is a link that leaves the bundle; copy the folder itself there")
    speculator = load_speculator(bundle, path, check=check)
    if speculator.name != name:
        raise ManifestError(f"{path} says that it is {speculator.name!r}; rename the folder, or attach it again")
    return speculator


def find_speculator(bundle: Bundle, name_or_path: str | Path, *, check: bool = True) -> InstalledSpeculator:
    """Find a speculator of a bundle by its name, or by the path of its folder, and load it as `load_speculator` does.

    Raises ModelNotFoundError that lists what there is; ManifestError; IntegrityError.
    """
    text = str(name_or_path)
    path = Path(os.path.expanduser(name_or_path))
    plain = isinstance(name_or_path, str) and not any(c in text for c in ("/", os.sep)) and not text.startswith("~")
    if plain and _is_name(text) and (speculators_dir(bundle) / text).is_dir():
        return _load_named(bundle, text, check)
    if text and os.path.isfile(path / MANIFEST_NAME):
        return load_speculator(bundle, path, check=check)
    here = [entry.name for entry in scan_speculators(bundle, check=False)]
    near = difflib.get_close_matches(text[:128], here, n=1)
    guess = f", did you mean {near[0]!r}?" if near else ""
    have = f"the speculators here are: {', '.join(here)}" if here else "it has none yet"
    raise ModelNotFoundError(
        f"{bundle.manifest.name} has no speculator {text!r}{guess} ({have}); make one with `specrun train`, "
        "or attach one with `specrun export SOURCE --draft HEADS`"
    )


def _is_name(text: str) -> bool:
    try:
        return check_bundle_name(text) == text
    except UsageError:
        return False


def speculator_facts(speculator: InstalledSpeculator) -> dict[str, Any]:
    """What lists show of a speculator, as JSON has it."""
    manifest = speculator.manifest
    return {
        "name": manifest.name,
        "method": manifest.method,
        "layout": manifest.layout,
        "bytes": sum(info.size for info in manifest.files.values()),
        "licence": manifest.licence,
        "shipped": manifest.shipped,
        "digest": speculator.digest,
    }


def speculator_or_build(
    bundle: Bundle,
    name: str,
    build: Callable[[Path], SpeculatorManifest],
    *,
    force: bool = False,
    progress: Progress = no_progress,
    lock_timeout: float | None = None,
) -> InstalledSpeculator:
    """Return the sound speculator of that name, or let `build` write its files into a staging folder and publish them.

    Of two processes at once one builds; the other waits and returns the same. One that cannot be used, and with
    `force` any, is built anew. Raises UsageError for a bad name; what `build` raises; IntegrityError; CacheError.
    """
    name = check_bundle_name(name)
    if not force and (found := _sound(bundle, name)) is not None:
        return found
    with bundle_part(bundle, f"{SPECULATORS}/{name}", progress, lock_timeout) as staging:
        if not force and (found := _sound(bundle, name)) is not None:
            return found
        manifest = build(staging.path)
        manifest = dataclasses.replace(
            manifest,
            name=name,
            target_digest=bundle.target_digest,
            files=staging.seal(),
            schema_version=SPECULATOR_SCHEMA,
        )
        staging.write_manifest(speculator_manifest_to_json(manifest))
        load_speculator(bundle, staging.path)
        staging.publish()
        return load_speculator(bundle, staging.target)


def _sound(bundle: Bundle, name: str) -> InstalledSpeculator | None:
    try:
        return _load_named(bundle, name, True)
    except (ManifestError, IntegrityError):
        return None


def remove_speculator(bundle: Bundle, name: str, *, lock_timeout: float | None = None) -> None:
    """Remove a speculator of a bundle, broken or not. Raises ModelNotFoundError; UsageError; CacheError."""
    name = check_bundle_name(name)
    if not (speculators_dir(bundle) / name).exists():
        find_speculator(bundle, name)  # which lists what there is
    remove_bundle_part(bundle, f"{SPECULATORS}/{name}", lock_timeout=lock_timeout)
