"""Where things live below the cache root, and how a bundle is found there.

    ROOT/models/NAME/     one bundle each; its speculators in speculators/NAME/
    ROOT/sources/         weights taken from the package index, named by their sha256
    ROOT/calibration/     what probes of this machine found
    ROOT/locks/           one lock file per name; they stay, as removing them would be a race
    ROOT/staging/NAME/    bundles being written; whatever is there while nobody holds NAME's lock is litter

Finding and reading need no write access.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.models_cache.errors import (
    IntegrityError,
    ManifestError,
    ModelNotFoundError,
    OtherKindError,
    UsageError,
)
from specrun.models_cache.integrity import check_sizes, problems_error
from specrun.models_cache.manifest import MANIFEST_NAME, SHARED_GRAPH, Manifest, check_links, read_manifest

if TYPE_CHECKING:
    from specrun.models_cache.reward import RewardBundle
    from specrun.models_cache.speculator import InstalledSpeculator

REPLACED = "replaced"
_MAX_NAME_BYTES = 128
_FORBIDDEN = set('/\\:*?"<>|')


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk; `digest` is the sha256 (hex) of the bytes of its manifest.json."""

    path: Path
    manifest: Manifest
    digest: str

    @property
    def weights_bytes(self) -> int:
        """Size of the data files of its graphs, each once."""
        names = {name for graph in self.manifest.graphs.values() for name in graph.data}
        return sum(self.manifest.files[name].size for name in names)

    @property
    def target_digest(self) -> str:
        """What the graphs compute, as a sha256 (hex): that of the names and digests of the graphs and their data.

        The graph of best-of-N does not count: with it or without, what was made for the others is as good.
        """
        graphs = [graph for name, graph in self.manifest.graphs.items() if name != SHARED_GRAPH]
        names = {name for graph in graphs for name in (graph.file, *graph.data)}
        lines = [f"{name} {self.manifest.files[name].sha256}" for name in sorted(names)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def speculators(self) -> list[InstalledSpeculator]:
        """The sound speculators that belong to these graphs, by name; `scan_speculators` lists the others too."""
        from specrun.models_cache.speculator import scan_speculators  # it imports this module

        return [entry.speculator for entry in scan_speculators(self) if entry.speculator is not None]


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """A folder below models/: its bundle, or its reward model, or else the problem that keeps it from being either."""

    name: str
    path: Path
    bundle: Bundle | None
    problem: str | None
    reward: RewardBundle | None = None


def cache_root() -> Path:
    """The cache root: `SPECRUN_HOME`, else the platform's user cache folder. It need not exist."""
    if home := os.environ.get("SPECRUN_HOME"):
        return Path(os.path.abspath(os.path.expanduser(home)))
    import platformdirs

    return Path(platformdirs.user_cache_dir("specrun", appauthor=False))


def models_dir(root: Path | None = None) -> Path:
    """Where bundles live."""
    return (root or cache_root()) / "models"


def sources_dir(root: Path | None = None) -> Path:
    """Where weights from the package index are kept."""
    return (root or cache_root()) / "sources"


def calibration_dir(root: Path | None = None) -> Path:
    """Where measurements of this machine are kept."""
    return (root or cache_root()) / "calibration"


def locks_dir(root: Path | None = None) -> Path:
    """Where lock files are kept."""
    return (root or cache_root()) / "locks"


def staging_dir(root: Path | None = None) -> Path:
    """Where bundles are written before they appear below models/."""
    return (root or cache_root()) / "staging"


def check_bundle_name(name: str) -> str:
    """Return the name in Unicode normal form C after checking that every file system can hold it.

    Raises UsageError: empty, a leading dot, a separator or another forbidden character, control characters, a space
    or dot at the end, or more than 128 bytes.
    """
    name = unicodedata.normalize("NFC", name)
    bad = (
        not name
        or name != name.strip()
        or name.startswith((".", "-"))
        or name.endswith(".")
        or any(c in _FORBIDDEN or unicodedata.category(c) in ("Cc", "Cs") for c in name)
        or len(name.encode("utf-8", "replace")) > _MAX_NAME_BYTES
    )
    if bad:
        raise UsageError(
            f'{name!r} cannot name a model: use up to {_MAX_NAME_BYTES} bytes without / \\ : * ? " < > |, '
            "not beginning with a dot or a dash"
        )
    return name


def load_bundle(path: Path, *, check: bool = True) -> Bundle:
    """Load the bundle in a folder; with `check`, look also at presence and size of each file (not at the digests).

    Raises ManifestError; IntegrityError naming the first file that is missing or has another size.
    """
    path = Path(os.path.abspath(path))
    manifest, digest = read_manifest(path)
    if check:
        check_links(path, manifest)
        if problems := check_sizes(path, manifest):
            raise problems_error(path, manifest, problems)
    return Bundle(path, manifest, digest)


def find_bundle(name_or_path: str | Path, *, root: Path | None = None, check: bool = True) -> Bundle:
    """Find a bundle by its name in the cache or by the path of its folder, and load it as `load_bundle` does.

    A plain name is looked for in the cache first, then as a folder here.
    Raises ModelNotFoundError saying what to run; ManifestError, OtherKindError for a reward model; IntegrityError.
    """
    return load_bundle(find_folder(name_or_path, root=root), check=check)


def find_folder(name_or_path: str | Path, *, root: Path | None = None) -> Path:
    """The folder of the bundle of that name or path, as `find_bundle` looks for it. Raises ModelNotFoundError."""
    text = str(name_or_path)
    path = Path(os.path.expanduser(name_or_path))
    plain = isinstance(name_or_path, str) and not any(c in text for c in ("/", os.sep)) and not text.startswith("~")
    if plain and (cached := _cached_folder(text, root)) is not None:
        return cached
    if text and os.path.isfile(path / MANIFEST_NAME):
        return path
    if not plain and os.path.exists(path):
        raise ModelNotFoundError(
            f"{path} holds no {MANIFEST_NAME}, so it is no bundle; make one with `specrun export {text}`"
        )
    raise ModelNotFoundError(_not_found(text, root))


def _cached_folder(name: str, root: Path | None) -> Path | None:
    try:
        name = check_bundle_name(name)
    except UsageError:
        return None
    folder = models_dir(root) / name
    if not folder.is_dir():
        recover_replaced(folder, staging_dir(root) / name)
    return folder if folder.is_dir() else None


def _not_found(name: str, root: Path | None) -> str:
    from specrun.models_cache.sources import REGISTRY  # it imports this module

    here = [entry.name for entry in scan_bundles(root) if entry.reward is None]
    known = [row.name for row in REGISTRY]
    have = f"the models here are: {', '.join(here)}" if here else "no model is here yet"
    if name in known:
        return f"there is no model {name!r}; run `specrun models pull {name}` to get it ({have})"
    near = difflib.get_close_matches(name[:_MAX_NAME_BYTES], [*here, *known], n=1)
    guess = f", did you mean {near[0]!r}?" if near else ""
    advice = "make one of your own weights with `specrun export SOURCE`"
    if not here:
        advice = f"run `specrun models pull {known[0]}`, or {advice}"
    return f"there is no model {name!r}{guess} ({have}); {advice}"


def scan_bundles(root: Path | None = None) -> list[BundleEntry]:
    """List what lies below models/, sorted by name, broken bundles with their problem."""
    from specrun.models_cache.reward import load_reward  # it imports this module

    entries = []
    folder = models_dir(root)
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        names = []
    for name in names:
        bundle = problem = reward = None
        try:
            try:
                bundle = load_bundle(folder / name)
            except OtherKindError:
                reward = load_reward(folder / name)
        except (ManifestError, IntegrityError) as error:
            problem = str(error)
        entries.append(BundleEntry(name, folder / name, bundle, problem, reward))
    return entries


def list_bundles(root: Path | None = None) -> list[Bundle]:
    """List the bundles of the cache, sorted by name, leaving out broken ones."""
    return [entry.bundle for entry in scan_bundles(root) if entry.bundle is not None]


def recover_replaced(target: Path, staging: Path) -> None:
    """Put back a bundle that a killed process had moved aside to replace it, where that can be done."""
    if (staging / REPLACED / MANIFEST_NAME).is_file() and not target.exists():
        with contextlib.suppress(OSError):
            os.rename(staging / REPLACED, target)
