"""The one boundary where errors of the file system become CacheError."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.models_cache.errors import CacheError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}


def free_bytes(path: Path) -> int | None:
    """Free bytes of the disk that holds `path` or its nearest existing parent; None when it cannot be told."""
    for folder in (path, *path.parents):
        if folder.exists():
            try:
                return shutil.disk_usage(folder).free
            except OSError:
                return None
    return None


@contextmanager
def cache_errors(folder: Path, within: Path | None = None) -> Iterator[None]:
    """Turn a full disk, and a refusal to write below `within` (default `folder`), into CacheError.

    Other errors pass.

    Raises CacheError naming the folder, the free space and the fix.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            free = free_bytes(folder)
            room = "unknown" if free is None else f"{free / 1e6:.0f} MB"
            raise CacheError(
                f"the disk of {folder} is full ({room} free, {error.strerror}); free some space, remove models with "
                "`specrun models rm NAME`, or set SPECRUN_HOME to a folder on a larger disk"
            ) from error
        if error.errno in _DENIED and _below(error, within or folder):
            raise CacheError(
                f"{error.filename or folder} cannot be written ({error.strerror}); "
                "make the folder writable or set SPECRUN_HOME to one that is"
            ) from error
        raise


def _below(error: OSError, folder: Path) -> bool:
    # An unreadable source file is not the cache's fault, so the file has to lie in the folder (or the folder in it,
    # when a parent could not be made).
    if not isinstance(error.filename, (str, bytes)):
        return True
    name = Path(os.path.abspath(os.fsdecode(error.filename)))
    home = Path(os.path.abspath(folder))
    return name.is_relative_to(home) or home.is_relative_to(name)
