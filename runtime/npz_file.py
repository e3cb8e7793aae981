"""Arrays in .npz files (zip, stored, never pickled), written whole or not at all and read with every size checked."""

from __future__ import annotations

import math
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specrun.models_cache.errors import CacheError

DAMAGED = (ValueError, KeyError, TypeError, EOFError, struct.error, zipfile.BadZipFile, RuntimeError)
"""What reading a file raises that is damaged, or something else."""

_HEADER_END: Final = 1024  # bytes of an array's header
_HEADER: Final = re.compile(rb"\{'descr': '([<>|=]\w\d)', 'fortran_order': False, 'shape': \(([0-9, ]{0,99})\), \} *\n")


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
    dtype: type[np.generic] | np.dtype[Any],
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
    if data[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError(f"{name} has another version")
    start = 10 + int.from_bytes(data[8:10], "little")
    header = _HEADER.fullmatch(data[10:start])  # numpy's own reader fails in many ways
    if header is None or np.dtype(header[1].decode()) != np.dtype(dtype):
        raise ValueError(f"{name} holds other values")
    found = tuple(int(size) for size in header[2].split(b",") if size.strip())
    fits = len(found) == len(shape) and all(wanted in (None, size) for wanted, size in zip(shape, found, strict=True))
    if not fits:
        raise ValueError(f"{name} has the shape {found}")
    values = np.frombuffer(data, dtype, offset=start)
    if values.size != math.prod(found):
        raise ValueError(f"{name} has {values.size} values, not {math.prod(found)}")
    return values.reshape(found)
