"""Whether files hold what they must hold: digests of a bundle, and weights that only look like weights."""

from __future__ import annotations

import hashlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrun.models_cache.errors import IntegrityError, ManifestError
from specrun.models_cache.manifest import Listed, Manifest, check_name_inside, leaves_bundle
from specrun.models_cache.progress import Progress, no_progress
from specrun.models_cache.strictjson import StrictJsonError, parse_object

if TYPE_CHECKING:
    from specrun.models_cache.layout import Bundle

_CHUNK = 4 * 1024 * 1024
_LFS_START = b"version https://git-lfs"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_INDEX_NAME = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Problem:
    """One file of a bundle that is not what the manifest says, and how."""

    file: str
    message: str


def sha256_file(path: Path, progress: Progress = no_progress, label: str | None = None) -> str:
    """Hash a file and return the sha256 in hex, reporting bytes under `label`.

    Raises OSError.
    """
    label = label or f"checking {path.name}"
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as stream:
        total = path.stat().st_size
        while block := stream.read(_CHUNK):
            digest.update(block)
            done += len(block)
            progress(label, done, total)
    return digest.hexdigest()


def check_sizes(folder: Path, manifest: Listed) -> list[Problem]:
    """Compare presence, kind and size of every file with the manifest, without reading any."""
    problems = []
    for name, info in manifest.files.items():
        try:
            found = (folder / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            problems.append(Problem(name, "is missing"))
            continue
        except OSError as error:
            problems.append(Problem(name, f"cannot be read ({error.strerror})"))
            continue
        if leaves_bundle(folder, name):
            problems.append(Problem(name, "is a link that leaves the bundle"))
        elif not stat.S_ISREG(found.st_mode):
            problems.append(Problem(name, "is not a regular file"))
        elif found.st_size != info.size:
            word = "is cut short:" if found.st_size < info.size else "is too long:"
            problems.append(Problem(name, f"{word} {found.st_size} bytes instead of {info.size}"))
    return problems


def verify_bundle(bundle: Bundle, progress: Progress = no_progress) -> list[Problem]:
    """Read every file of a bundle and of its speculators, compare sizes and digests, and return what differs.

    An empty list says that the bundle is intact. Files of a speculator are named from the bundle's folder.
    """
    from specrun.models_cache.speculator import SPECULATORS, scan_speculators  # it imports this module

    problems = verify_files(bundle.path, bundle.manifest, progress)
    for entry in scan_speculators(bundle, check=False):
        within = f"{SPECULATORS}/{entry.name}"
        if entry.speculator is None:
            problems.append(Problem(within, entry.problem or "cannot be read"))
            continue
        found = verify_files(entry.path, entry.speculator.manifest, progress)
        problems += [Problem(f"{within}/{problem.file}", problem.message) for problem in found]
    return problems


def verify_files(folder: Path, manifest: Listed, progress: Progress = no_progress) -> list[Problem]:
    """Read every file that a manifest lists and return what differs from it."""
    problems = check_sizes(folder, manifest)
    bad = {problem.file for problem in problems}
    for name, info in manifest.files.items():
        if name in bad:
            continue
        try:
            digest = sha256_file(folder / name, progress)
        except OSError as error:
            problems.append(Problem(name, f"cannot be read ({error.strerror})"))
            continue
        if digest != info.sha256:
            problems.append(Problem(name, f"is damaged: its sha256 is {digest} instead of {info.sha256}"))
    return problems


def problems_error(folder: Path, manifest: Manifest, problems: list[Problem]) -> IntegrityError:
    """Make the error that names the first problem, how many more there are, and the fix."""
    first = problems[0]
    more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
    if manifest.source.kind == "path":
        fix = f"export {manifest.name} again from {manifest.source.name}"
    else:
        fix = f"run `specrun models pull {manifest.source.name} --name {manifest.name} --force`"
    return IntegrityError(f"{folder / first.file} {first.message}{more}; {fix}")


def require_intact(bundle: Bundle, progress: Progress = no_progress) -> None:
    """Check every byte of a bundle.

    Raises IntegrityError naming the first file that is missing, cut short, too long or damaged.
    """
    if problems := verify_bundle(bundle, progress):
        raise problems_error(bundle.path, bundle.manifest, problems)


def refuse_lfs_pointer(path: Path) -> None:
    """Refuse a Git-LFS pointer that stands where a large file should be.

    Raises IntegrityError; OSError when the file cannot be read.
    """
    with path.open("rb") as stream:
        start = stream.read(len(_LFS_START))
    if start == _LFS_START:
        raise IntegrityError(
            f"{path} is a Git-LFS pointer and not the file itself; run `git lfs pull` in its repository"
        )


def refuse_pickle(path: Path) -> None:
    """Refuse weights in a pickle format (.bin, .pt, .pth, .ckpt, .pkl), judged by the file's name.

    Raises IntegrityError.
    """
    if path.name.lower().endswith(_PICKLE_SUFFIXES):
        raise IntegrityError(_pickle_message(f"{path} is a pickle file"))


def _pickle_message(what: str) -> str:
    return (
        f"{what}, and specrun reads no pickle because loading one can run code; convert the weights to safetensors "
        "(transformers: `save_pretrained(folder, safe_serialization=True)`) and give that folder"
    )


def check_gguf(path: Path) -> None:
    """Check that a file is a GGUF file by its first bytes.

    Raises IntegrityError for a Git-LFS pointer, an empty file and anything else.
    """
    refuse_lfs_pointer(path)
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise IntegrityError(f"{path} does not begin as a GGUF file does; download it again")


def check_weights_folder(folder: Path) -> tuple[str, ...]:
    """Check a folder of safetensors weights and return the names of its weight files, sorted.

    Raises IntegrityError: a shard that the index names is missing, a Git-LFS pointer in place of a file, only pickle
    files, no weights at all, or a malformed index.
    """
    index = folder / _INDEX_NAME
    if index.is_file():
        names = _index_shards(index)
        if missing := [name for name in names if not (folder / name).is_file()]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise IntegrityError(
                f"{folder} lacks the shard {missing[0]}{more} that {_INDEX_NAME} names; download the missing files"
            )
    else:
        names = tuple(sorted(p.name for p in folder.glob("*.safetensors") if p.is_file()))
    if not names:
        pickles = sorted(p.name for p in folder.iterdir() if p.name.lower().endswith(_PICKLE_SUFFIXES))
        if pickles:
            raise IntegrityError(_pickle_message(f"{folder} has its weights only as pickle ({pickles[0]})"))
        raise IntegrityError(f"{folder} holds no *.safetensors file; give a folder that holds the weights")
    for path in [*(folder / name for name in names), folder / "tokenizer.json"]:
        if path.is_file():
            refuse_lfs_pointer(path)
    return names


def _index_shards(index: Path) -> tuple[str, ...]:
    refuse_lfs_pointer(index)
    again = "download it again"
    try:
        with index.open("rb") as stream:
            data = stream.read(_MAX_INDEX_BYTES + 1)
        if len(data) > _MAX_INDEX_BYTES:
            raise IntegrityError(f"{index} is larger than {_MAX_INDEX_BYTES} bytes; {again}")
        weight_map = parse_object(data.decode("utf-8")).get("weight_map")
    except (UnicodeDecodeError, StrictJsonError) as error:
        raise IntegrityError(f"{index} is not valid: {error}; {again}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(f"{index} holds no weight_map; {again}")
    names = set(weight_map.values())
    for name in names:
        if not isinstance(name, str):
            raise IntegrityError(f"{index} names {name!r} as a shard; {again}")
        try:
            check_name_inside(name, _INDEX_NAME)
        except ManifestError:
            raise IntegrityError(f"{index} names the shard {name!r} outside its folder; {again}") from None
    return tuple(sorted(names))
