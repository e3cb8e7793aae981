"""Arrays in .npz files (zip, stored, never pickled), written whole or not at all and read with every size checked."""

from __future__ import annotations

import io
import math
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.models_cache.errors import CacheError

DAMAGED = (ValueError, KeyError, EOFError, zipfile.BadZipFile, RuntimeError, NotImplementedError)
"""What reading a file raises that is damaged, or something else."""

_HEADER_END = 1024  # bytes of an array's header


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays to a file that appears whole; CacheError if the folder refuses."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".part", delete=False) as file:
            temporary = file.name
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise CacheError(f"Cannot write {path}: {error.strerror}; choose another folder.") from error


def read_array(
    archive: zipfile.ZipFile,
    name: str,
    dtype: type[np.generic],
    shape: tuple[int | None, ...],
    *,
    most: int | None = None,
) -> npt.NDArray[Any]:
    """One array, read-only, of this type and shape (None: any size); ValueError and others of `DAMAGED` otherwise.

    Nothing larger than the shape, or than `most` bytes of data where that is not fixed, is read: the file's own word on
    sizes is not taken.
    """
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    fixed = math.prod(size for size in shape if size is not None) * np.dtype(dtype).itemsize
    end = fixed if None not in shape else most
    if end is not None and info.file_size > end + _HEADER_END:
        raise ValueError(f"{name} is too large")
    data = archive.read(info)  # checks the CRC
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError(f"{name} has another version")
    found_shape, _, found = np.lib.format.read_array_header_1_0(stream)
    fits = len(found_shape) == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, found_shape, strict=True)
    )
    if found != np.dtype(dtype) or not fits:
        raise ValueError(f"{name} holds {found} {found_shape}")
    values = np.frombuffer(data, found, offset=stream.tell())
    if values.size != math.prod(found_shape):
        raise ValueError(f"{name} has {values.size} values, not {math.prod(found_shape)}")
    return values.reshape(found_shape)
