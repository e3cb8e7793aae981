"""The data file that every graph of a bundle shares: written once, in order, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
import onnx_ir as ir
from numpy.typing import DTypeLike, NDArray

from specrun.models_cache.errors import UnsupportedModelError

INLINE_BYTES = 1024
ALIGNMENT = 4096

Stored = ir.ExternalTensor | ir.Tensor[NDArray[np.generic]]


class WeightFile:
    """Appends tensors to `path`; each becomes a reference that any number of graphs can use as an initializer.

    Tensors under 1 KiB are kept for the graph file itself. `view` gives the same bytes a second shape. floats: what
    float32 tensors are rounded to, and so what the graphs compute in.
    """

    def __init__(self, path: Path, floats: DTypeLike = np.float32) -> None:
        self._path = path
        self._file = path.open("wb")
        self.floats: np.dtype[np.generic] = np.dtype(floats)

    def add(self, name: str, array: NDArray[np.generic]) -> Stored:
        """Append `array` and return the reference to it. UnsupportedModelError where its numbers are too large."""
        array = np.ascontiguousarray(array)
        if array.dtype == np.float32 and array.dtype != self.floats:
            with np.errstate(over="ignore"):
                array = array.astype(self.floats)
            if not np.isfinite(array).all():
                raise UnsupportedModelError(f"{name} has numbers that are too large for {self.floats}: take bf16.")
        if array.nbytes < INLINE_BYTES:
            return ir.Tensor(array, name=name)
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        offset = self._file.tell()
        self._file.write(array.reshape(-1).view(np.uint8).data)  # tofile would hide the reason why a disk refuses
        return self._reference(name, offset, array.nbytes, ir.DataType.from_numpy(array.dtype), array.shape)

    def view(self, name: str, stored: Stored, shape: tuple[int, ...]) -> Stored:
        """The same bytes under another name and shape, without a copy in the file."""
        if isinstance(stored, ir.ExternalTensor):
            return self._reference(name, stored.offset or 0, stored.length or 0, stored.dtype, shape)
        return ir.Tensor(stored.numpy().reshape(shape), name=name)

    def _reference(
        self, name: str, offset: int, length: int, dtype: ir.DataType, shape: tuple[int, ...]
    ) -> ir.ExternalTensor:
        return ir.ExternalTensor(
            self._path.name, offset, length, dtype, shape=ir.Shape(shape), name=name, base_dir=self._path.parent
        )

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
