"""Writing bundles: staged, hashed, verified and renamed into place, under one lock per name.

A bundle is visible whole or not at all. The lock is the operating system's and dies with its process, so whoever holds
it may clear what earlier holders left in the staging folder of that name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.models_cache.diskerrors import cache_errors
from specrun.models_cache.errors import (
    CacheError,
    IntegrityError,
    ManifestError,
    ModelNotFoundError,
    OtherKindError,
    UsageError,
)
from specrun.models_cache.integrity import sha256_file
from specrun.models_cache.layout import (
    REPLACED,
    Bundle,
    cache_root,
    check_bundle_name,
    load_bundle,
    locks_dir,
    models_dir,
    recover_replaced,
    staging_dir,
)
from specrun.models_cache.manifest import MANIFEST_NAME, FileInfo, Manifest, manifest_to_json
from specrun.models_cache.progress import Progress, no_progress

_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}


class Staging:
    """A folder in which a bundle is written; `finish` makes it visible.

    path: the folder, target: where it goes, base: the folder that errors of the disk are told of.
    """

    def __init__(self, name: str, path: Path, target: Path, base: Path, progress: Progress) -> None:
        self.name = name
        self.path = path
        self.target = target
        self.base = base
        self.progress = progress

    def finish(self, manifest: Manifest) -> Bundle:
        """Hash all files, write the manifest last with `name` and `files` filled in, verify, and rename into place.

        Raises IntegrityError for links, empty and special files; ManifestError; CacheError.
        """
        with cache_errors(self.base):
            manifest = dataclasses.replace(manifest, name=self.name, files=self.seal())
            self.write_manifest(manifest_to_json(manifest))
            load_bundle(self.path)
            self.publish()
            return load_bundle(self.target)

    def seal(self) -> dict[str, FileInfo]:
        """Size and digest of every file, which is on the disk then."""
        files = {}
        for name in self._names():
            files[name] = self._seal(name)
            _sync((self.path / name).parent)
        return files

    def write_manifest(self, text: str) -> None:
        """Write manifest.json, the last file."""
        path = self.path / MANIFEST_NAME
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        _sync(self.path)

    def publish(self) -> None:
        """Rename the folder into place, replacing what is there."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        _publish(self.path, self.target)

    def _names(self) -> list[str]:
        names = []
        for folder, folders, files in os.walk(self.path):
            for entry in sorted(folders + files):
                path = Path(folder, entry)
                mode = path.lstat().st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                    raise IntegrityError(f"{path} is a link or special file; a bundle holds plain files, so copy it")
                if stat.S_ISREG(mode) and path != self.path / MANIFEST_NAME:
                    names.append(path.relative_to(self.path).as_posix())
        return sorted(names)

    def _seal(self, name: str) -> FileInfo:
        path = self.path / name
        size = path.stat().st_size
        if size == 0:
            raise IntegrityError(f"{path} is empty; a bundle holds no empty files, so leave it out")
        digest = sha256_file(path, self.progress, f"hashing {name}")
        _sync(path)
        return FileInfo(size, digest)


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(staged: Path, target: Path) -> None:
    # rename() does not replace a folder that holds files, so the old bundle moves aside first. Killed in between, the
    # old one is put back by recover_replaced; a reader may do so at once, hence the loop.
    aside = staged.parent / REPLACED
    for _ in range(10):
        if target.exists():
            _discard(aside)
            os.rename(target, aside)
        try:
            os.rename(staged, target)
            break
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                recover_replaced(target, staged.parent)
                raise
    else:
        raise CacheError(f"{target} keeps being written by somebody else; try again")
    _sync(target.parent)
    _discard(aside)


def _discard(folder: Path) -> None:
    # Renamed first: a half-removed bundle must not look like one that can be put back.
    if folder.exists():
        litter = folder.with_name(f"removed-{uuid.uuid4().hex}")
        os.rename(folder, litter)
        shutil.rmtree(litter, ignore_errors=True)


@contextmanager
def hold_lock(path: Path, progress: Progress = no_progress, timeout: float | None = None) -> Iterator[None]:
    """Hold a lock file, waiting for its holder for at most `timeout` seconds (None: for ever).

    Raises CacheError when the lock cannot be made or taken.
    """
    import filelock

    with cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            progress(f"waiting for another specrun that works on {path.stem}", 0, None)
            try:
                lock.acquire(timeout=-1 if timeout is None else timeout, poll_interval=0.1)
            except filelock.Timeout:
                raise CacheError(f"{path} is held by another specrun; wait for it to end and try again") from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def new_bundle(
    name: str,
    root: Path | None = None,
    *,
    output: Path | None = None,
    progress: Progress = no_progress,
    lock_timeout: float | None = None,
) -> Iterator[Staging]:
    """Take the lock of `name` and yield a staging folder; nothing becomes visible unless its `finish` is called.

    The bundle goes to models/NAME below the cache root, or to `output`, replacing a bundle that is there.
    Raises UsageError for a bad name; CacheError when the disk is full, cannot be written, or `output` holds something
    else than a bundle.
    """
    name = check_bundle_name(name)
    root = root or cache_root()
    target, home, lock = _places(name, root, output)
    base = root if output is None else target.parent
    with hold_lock(lock, progress, lock_timeout):
        with cache_errors(base):
            _clear(home, target)
            if output is None:
                _clear_others(root, name)
        with _staged(home, base) as path:
            yield Staging(name, path, target, base, progress)


@contextmanager
def _staged(home: Path, base: Path) -> Iterator[Path]:
    """A new folder below `home`, gone afterwards unless it was renamed."""
    path = home / uuid.uuid4().hex
    with cache_errors(base):
        path.mkdir(parents=True)
    try:
        with cache_errors(base, within=path):
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            home.rmdir()


@contextmanager
def bundle_part(
    bundle: Bundle, part: str, progress: Progress = no_progress, lock_timeout: float | None = None
) -> Iterator[Staging]:
    """Take the lock of a bundle and yield a staging folder for `part` of it ("speculators/medusa").

    Nothing becomes visible unless its `publish` is called. Raises CacheError, also where the bundle is gone meanwhile.
    """
    root = cache_root()
    cached = bundle.path.parent == Path(os.path.abspath(models_dir(root)))
    target, home, lock = _places(bundle.path.name, root, None if cached else bundle.path)
    base = root if cached else target.parent
    with hold_lock(lock, progress, lock_timeout):
        with cache_errors(base):
            _clear(home, target)
        found = _sound(target)
        if found is None or found.target_digest != bundle.target_digest:
            raise CacheError(f"{target} was removed or replaced by another specrun meanwhile; try again")
        try:
            # A level down: what is moved aside there must not be taken for the bundle itself.
            with _staged(home / "part", base) as path:
                yield Staging(part.rsplit("/", 1)[-1], path, target / part, base, progress)
        finally:
            with contextlib.suppress(OSError):
                home.rmdir()


def _places(name: str, root: Path, output: Path | None) -> tuple[Path, Path, Path]:
    """The bundle's final folder, the folder of its staging folders (same file system), and its lock."""
    if output is None:
        return models_dir(root) / name, staging_dir(root) / name, locks_dir(root) / f"{name}.lock"
    target = Path(os.path.abspath(os.path.expanduser(output)))
    _refuse_foreign(target)
    locks = locks_dir(root)
    with contextlib.suppress(OSError):
        locks.mkdir(parents=True, exist_ok=True)
    if not os.access(locks, os.W_OK):  # a read-only cache does not forbid writing elsewhere
        locks = target.parent
    key = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    return target, target.parent / f".{target.name}.specrun-staging", locks / f".output-{key}.lock"


def _refuse_foreign(target: Path) -> None:
    if not target.exists() or (target / MANIFEST_NAME).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise CacheError(f"{target} exists and is no bundle, so it is not replaced; choose another output folder")


def _clear(home: Path, target: Path) -> None:
    recover_replaced(target, home)
    if home.is_dir():
        shutil.rmtree(home, ignore_errors=True)


def _clear_others(root: Path, name: str) -> None:
    """Clear the staging folders of other names whose writers are gone."""
    import filelock

    homes = staging_dir(root)
    for home in list(homes.iterdir()) if homes.is_dir() else []:
        if home.name == name:
            continue
        with (
            contextlib.suppress(OSError, filelock.Timeout),
            filelock.FileLock(locks_dir(root) / f"{home.name}.lock", timeout=0),
        ):
            _clear(home, models_dir(root) / home.name)


def _sound(path: Path) -> Bundle | None:
    try:
        return load_bundle(path)
    except OtherKindError:
        raise UsageError(f"{path} holds a reward model: choose another --name, or --force to replace it.") from None
    except (ManifestError, IntegrityError):
        return None


def bundle_or_build(
    name: str,
    build: Callable[[Path], Manifest],
    *,
    root: Path | None = None,
    output: Path | None = None,
    force: bool = False,
    progress: Progress = no_progress,
    lock_timeout: float | None = None,
) -> Bundle:
    """Return the bundle of that name, or let `build` write its files into a staging folder and publish them.

    Of two processes at once one builds; the other waits and returns the same bundle. A broken bundle, and with `force`
    any, is built anew. An `output` folder that holds a sound bundle already is an error without `force`.
    Raises what `new_bundle`, `Staging.finish` and `build` raise.
    """
    name = check_bundle_name(name)
    target = models_dir(root) / name if output is None else Path(os.path.expanduser(output))
    if not force and (found := _sound(target)) is not None:
        return _existing(found, output)
    with new_bundle(name, root, output=output, progress=progress, lock_timeout=lock_timeout) as staging:
        if not force and (found := _sound(target)) is not None:
            return _existing(found, output)
        return staging.finish(build(staging.path))


def _existing(bundle: Bundle, output: Path | None) -> Bundle:
    if output is not None:
        raise UsageError(f"{bundle.path} holds a bundle already; choose another output folder or pass --force")
    return bundle


def remove_bundle(name: str, root: Path | None = None, *, lock_timeout: float | None = None) -> None:
    """Remove a bundle from the cache, broken or not, so that it is gone at once or still whole.

    Raises ModelNotFoundError when there is none of that name; UsageError; CacheError.
    """
    name = check_bundle_name(name)
    root = root or cache_root()
    target, home, lock = _places(name, root, None)
    if not target.exists():
        recover_replaced(target, home)
    if not target.exists():
        raise ModelNotFoundError(f"there is no model {name!r} to remove; `specrun models list` shows what there is")
    with hold_lock(lock, timeout=lock_timeout), cache_errors(root):
        home.mkdir(parents=True, exist_ok=True)
        if target.exists():
            litter = home / f"removed-{uuid.uuid4().hex}"
            os.rename(target, litter)
        shutil.rmtree(home, ignore_errors=True)


def remove_bundle_part(bundle: Bundle, part: str, *, lock_timeout: float | None = None) -> None:
    """Remove a folder of a bundle that its manifest does not list, so that it is gone at once or still whole.

    Raises ModelNotFoundError when it is not there; CacheError.
    """
    with bundle_part(bundle, part, lock_timeout=lock_timeout) as staging:
        if not staging.target.exists():
            raise ModelNotFoundError(f"{bundle.manifest.name} has no {part} to remove")
        os.rename(staging.target, staging.path / "removed")
        with contextlib.suppress(OSError):
            staging.target.parent.rmdir()
