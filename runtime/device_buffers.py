"""Where buffers are: in the processor's memory, which ONNX Runtime reads and writes in place, or in a device's own.

Sessions and caches know only the methods that both classes here have. A *buffer* is a numpy array of the one, and a
`DeviceBuffer` of the other; a *value* is what is bound for it.

On a device nothing but small inputs goes there and nothing but what is read comes back: keys and values, logits and
features stay. Rows of KV buffers are moved by a graph that runs there (`device_graphs.copy_graph`). With device type
"cpu" the same calls work on memory of their own on the processor, as tests run them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError
from specrun.runtime.backend import create_session, first_line, onnxruntime
from specrun.runtime.device import CPU, Device
from specrun.runtime.device_graphs import copy_graph
from specrun.runtime.onnx_writer import BFLOAT16, DOUBLE, FLOAT, FLOAT16, INT64

_INT32: Final = 6
ELEMENTS: Final = {
    "float32": FLOAT,
    "float16": FLOAT16,
    "bfloat16": BFLOAT16,
    "float64": DOUBLE,
    "int64": INT64,
    "int32": _INT32,
}
# Neither numpy nor OrtValue.numpy knows bfloat16: its bits are held as if they were float16, and only bound as it.
HOST_TYPES: Final = {name: np.dtype("float16" if name == "bfloat16" else name) for name in ELEMENTS}
ON_HOST: Final = frozenset({"max_total_length", "top_k"})
"""Inputs that kernels of the CUDA provider read on the host; on the device they would be copied back at every run."""
CAPACITY_STEP, BATCH_STEP = 256, 1024  # positions that a cache grows by, on the host, and for a batch on a device


class Buffers(Protocol):
    """What sessions and caches need of either."""

    @property
    def resident(self) -> bool:
        """Whether buffers are in a device's own memory."""
        ...

    def input(self, name: str, array: NDArray[Any], dtype: str | None = None) -> Any:
        """The value of an input that is rewritten in `array`; dtype: where it is not the array's own."""
        ...

    def send(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """Let the values have what their arrays now hold."""
        ...

    def output(self, shape: Sequence[int], dtype: str) -> Any:
        """A buffer that a graph writes."""
        ...

    def shared(self, pool: dict[Any, Any], name: str, shape: Sequence[int]) -> Any:
        """A buffer f32 of an output of which only the last run's is of use, out of a pool of those made before."""
        ...

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """A buffer of zeros."""
        ...

    def value(self, buffer: Any) -> Any:
        """What is bound for a buffer."""
        ...

    def read(self, buffer: Any) -> NDArray[Any]:
        """What a buffer holds: itself on the host, else a copy."""
        ...

    def nbytes(self, buffer: Any) -> int:
        """Bytes of a buffer."""
        ...

    def bind_input(self, binding: Any, name: str, value: Any) -> None:
        """Bind a value as an input."""
        ...

    def bind_output(self, binding: Any, name: str, value: Any) -> None:
        """Bind a value as an output."""
        ...

    def capacity(self, wanted: int, limit: int, batch: int) -> int:
        """How many positions a cache gets that needs `wanted` of at most `limit`."""
        ...

    def rows(self, buffer: Any, first: int, count: int) -> Any:
        """Rows of a buffer [batch, heads, capacity, head_dim] as a buffer over the same memory."""
        ...

    def grow(self, old: list[Any], new: list[Any]) -> None:
        """Copy buffers into larger ones [batch, heads, capacity, head_dim], position by position."""
        ...

    def copy(self, buffers: list[Any], source: tuple[int, Sequence[int]], target: tuple[int, int]) -> None:
        """In each, copy positions of a row, (row, positions), to positions of a row from one on, (row, first)."""
        ...

    def write(self, buffers: list[Any], parts: Sequence[NDArray[Any]], row: int) -> None:
        """Write parts [heads, length, head_dim] to the beginning of a row."""
        ...


class HostBuffers:
    """numpy arrays; their OrtValues share the memory."""

    resident = False

    def input(self, name: str, array: NDArray[Any], dtype: str | None = None) -> Any:
        return self.value(array)

    def send(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        """They share their memory."""

    def output(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        return np.empty(shape, HOST_TYPES[dtype])

    def shared(self, pool: dict[Any, Any], name: str, shape: Sequence[int]) -> NDArray[Any]:
        """The beginning of one array; frames that were bound before keep theirs, so it seldom grows."""
        size = math.prod(shape)
        if name not in pool or pool[name].size < size:
            pool[name] = np.empty(2 * size, np.float32)
        start: NDArray[Any] = pool[name][:size].reshape(shape)
        return start

    def zeros(self, shape: Sequence[int], dtype: str) -> NDArray[Any]:
        return np.zeros(shape, HOST_TYPES[dtype])

    def value(self, buffer: NDArray[Any]) -> Any:
        return onnxruntime().OrtValue.ortvalue_from_numpy(buffer)

    def read(self, buffer: NDArray[Any]) -> NDArray[Any]:
        return buffer

    def nbytes(self, buffer: NDArray[Any]) -> int:
        return buffer.nbytes

    def bind_input(self, binding: Any, name: str, value: Any) -> None:
        binding.bind_ortvalue_input(name, value)

    def bind_output(self, binding: Any, name: str, value: Any) -> None:
        binding.bind_ortvalue_output(name, value)

    def capacity(self, wanted: int, limit: int, batch: int) -> int:
        return min(limit, -(-wanted // CAPACITY_STEP) * CAPACITY_STEP)

    def rows(self, buffer: NDArray[Any], first: int, count: int) -> NDArray[Any]:
        return buffer[first : first + count]

    def grow(self, old: list[Any], new: list[Any]) -> None:
        for before, after in zip(old, new, strict=False):
            after[:, :, : before.shape[2]] = before

    def copy(self, buffers: list[Any], source: tuple[int, Sequence[int]], target: tuple[int, int]) -> None:
        (from_row, places), (row, first) = source, target
        # A range is a view, where a list of positions makes numpy gather them.
        where = slice(places.start, places.stop) if isinstance(places, range) else list(places)
        for array in buffers:
            array[row][:, first : first + len(places)] = array[from_row][:, where]

    def write(self, buffers: list[Any], parts: Sequence[NDArray[Any]], row: int) -> None:
        for array, part in zip(buffers, parts, strict=True):
            array[row, :, : part.shape[1]] = part


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Memory of a device as a tensor: `pointer` lies in what `owner`, an OrtValue, holds, from element `start` on."""

    owner: Any
    pointer: int
    shape: tuple[int, ...]
    dtype: str
    start: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class DeviceBuffers:
    """OrtValues of the device. Every write to the device goes through `OrtValue.update_inplace` or a graph."""

    resident = True

    def __init__(self, device: Device) -> None:
        self._device = device

    def input(self, name: str, array: NDArray[Any], dtype: str | None = None) -> Any:
        if name in ON_HOST:
            return onnxruntime().OrtValue.ortvalue_from_numpy(array)
        made = self.output(array.shape, dtype or array.dtype.name)
        if made.size:
            made.owner.update_inplace(array)
        return made

    def send(self, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
        for name, array in arrays.items():
            value = values[name]
            (value.owner if isinstance(value, DeviceBuffer) else value).update_inplace(array)

    def output(self, shape: Sequence[int], dtype: str) -> DeviceBuffer:
        ort = onnxruntime()
        try:
            owner = ort.OrtValue.ortvalue_from_shape_and_type(
                list(shape), HOST_TYPES[dtype], self._device.kind, self._device.index
            )
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            size = math.prod(shape) * HOST_TYPES[dtype].itemsize / 1e6
            raise BackendError(
                f"{self._device.name} has no {size:.0f} MB left: use a smaller --context or --batch-size "
                f"({first_line(error)})."
            ) from error
        return DeviceBuffer(owner, owner.data_ptr(), tuple(shape), dtype)

    def shared(self, pool: dict[Any, Any], name: str, shape: Sequence[int]) -> DeviceBuffer:
        """One for each shape: `read` takes a buffer whole."""
        key = name, *shape
        if key not in pool:
            pool[key] = self.output(shape, "float32")
        found: DeviceBuffer = pool[key]
        return found

    def zeros(self, shape: Sequence[int], dtype: str) -> DeviceBuffer:
        # Attention multiplies what lies behind the lengths by 0, which must not be 0 times infinity.
        made = self.output(shape, dtype)
        if made.size:
            made.owner.update_inplace(np.zeros(shape, HOST_TYPES[dtype]))
        return made

    def value(self, buffer: DeviceBuffer) -> DeviceBuffer:
        return buffer

    def read(self, buffer: DeviceBuffer) -> NDArray[Any]:
        # A copy already where the device is a GPU, and a view of the memory where it is not.
        whole: NDArray[Any] = np.array(buffer.owner.numpy())
        return whole.reshape(-1)[buffer.start : buffer.start + buffer.size].reshape(buffer.shape)

    def nbytes(self, buffer: DeviceBuffer) -> int:
        return buffer.size * HOST_TYPES[buffer.dtype].itemsize

    def bind_input(self, binding: Any, name: str, value: Any) -> None:
        if isinstance(value, DeviceBuffer):
            binding.bind_input(name, *self._where(value))
        else:
            binding.bind_ortvalue_input(name, value)

    def bind_output(self, binding: Any, name: str, value: DeviceBuffer) -> None:
        binding.bind_output(name, *self._where(value))

    def _where(self, value: DeviceBuffer) -> tuple[str, int, int, Sequence[int], int]:
        return self._device.kind, self._device.index, ELEMENTS[value.dtype], value.shape, value.pointer

    def capacity(self, wanted: int, limit: int, batch: int) -> int:
        """A row alone has all its positions at once: kernels split their work by the capacity, so it must not move."""
        return limit if batch == 1 else min(limit, -(-wanted // BATCH_STEP) * BATCH_STEP)

    def rows(self, buffer: DeviceBuffer, first: int, count: int) -> DeviceBuffer:
        step = buffer.size // buffer.shape[0]
        item = HOST_TYPES[buffer.dtype].itemsize
        shape = (count, *buffer.shape[1:])
        start = first * step
        return DeviceBuffer(buffer.owner, buffer.pointer + start * item, shape, buffer.dtype, buffer.start + start)

    def grow(self, old: list[Any], new: list[Any]) -> None:
        for before, after in zip(old, new, strict=False):
            batch, heads, capacity, _ = before.shape
            rows = np.arange(batch * heads)[:, None]
            source = (rows * capacity + np.arange(capacity)).reshape(-1)
            target = (rows * after.shape[2] + np.arange(capacity)).reshape(-1)
            self._copy_rows([before], [after], source, target)

    def copy(self, buffers: list[Any], source: tuple[int, Sequence[int]], target: tuple[int, int]) -> None:
        (from_row, places), (row, first) = source, target
        if not places:
            return
        _, heads, capacity, _ = buffers[0].shape
        head = np.arange(heads)[:, None]
        read = ((from_row * heads + head) * capacity + np.asarray(places)).reshape(-1)
        written = ((row * heads + head) * capacity + np.arange(first, first + len(places))).reshape(-1)
        self._copy_rows(buffers, buffers, read, written)

    def write(self, buffers: list[Any], parts: Sequence[NDArray[Any]], row: int) -> None:
        for buffer, part in zip(buffers, parts, strict=True):
            whole = self.read(buffer).copy()
            whole[row, :, : part.shape[1]] = part
            buffer.owner.update_inplace(whole)

    def _copy_rows(
        self, old: list[DeviceBuffer], new: list[DeviceBuffer], source: NDArray[np.int64], target: NDArray[np.int64]
    ) -> None:
        """Rows [head_dim] of buffers to rows of others, or of themselves."""
        dtype = "float32" if HOST_TYPES[old[0].dtype].itemsize == 4 else "float16"  # only bytes are moved
        session = copy_session(self._device, len(old), ELEMENTS[dtype])
        binding = session.io_binding()
        kept = []
        for name, array in (("source", source), ("target", target[:, None])):
            kept.append(self.input(name, np.ascontiguousarray(array, np.int64)))
            self.bind_input(binding, name, kept[-1])
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            flat = [
                DeviceBuffer(one.owner, one.pointer, (one.size // one.shape[-1], one.shape[-1]), dtype)
                for one in (before, after)
            ]
            self.bind_input(binding, f"from.{index}", flat[0])
            self.bind_input(binding, f"to.{index}", flat[1])
            self.bind_output(binding, f"out.{index}", flat[1])
        run_bound(session, binding, f"copying rows on {self._device.name}")


def buffers_of(device: Device) -> Buffers:
    """Where a device's buffers are."""
    return DeviceBuffers(device) if device.resident else HOST


HOST: Final[Buffers] = HostBuffers()


@functools.lru_cache(maxsize=8)
def copy_session(device: Device, buffers: int, element: int) -> Any:
    """The session that moves rows of so many buffers; they are small, and shared by all engines."""
    return create_session(copy_graph(buffers, element), threads=1, device=device)


def run_bound(session: Any, binding: Any, what: str) -> None:
    """Run a graph of our own. Raises BackendError."""
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        raise BackendError(f"ONNX Runtime failed while {what}: {first_line(error)}") from error


def minus_infinity(dtype: str) -> Any:
    """The number in the type that holds `dtype` on the host."""
    if dtype == "bfloat16":
        return np.array([0xFF80], np.uint16).view(np.float16)[0]
    return np.array(-np.inf, HOST_TYPES[dtype])[()]


__all__ = ["CPU", "HOST", "Buffers", "DeviceBuffer", "DeviceBuffers", "HostBuffers", "buffers_of", "copy_session"]
