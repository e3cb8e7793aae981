"""The NVIDIA driver, asked directly: whether there is a GPU, and how much of its memory is taken."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpu_checks.errors import CheckError

LIBRARY: Final = "libcuda.so.1"
NO_GPU: Final = "There is no NVIDIA GPU that this program can use"
ADVICE: Final = "run it where there is one, or with --device cpu, or try all parts with --dry-run."


@dataclass(frozen=True, slots=True)
class GPU:
    """The first GPU. memory: bytes."""

    name: str
    memory: int
    cuda: str


def find_gpu() -> GPU:
    """The first GPU that the driver shows to this process; CheckError says plainly why there is none."""
    cuda = _driver()
    count, device, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "counting GPUs")
    if count.value == 0:
        raise CheckError(f"{NO_GPU} (the driver shows none): {ADVICE}")
    name, memory = ctypes.create_string_buffer(128), ctypes.c_size_t()
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0), "asking for the GPU")
    _check(cuda.cuDeviceGetName(name, len(name), device), "asking for its name")
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), device), "asking for its memory")
    _check(cuda.cuDriverGetVersion(ctypes.byref(version)), "asking for its version")
    return GPU(name.value.decode(), memory.value, f"{version.value // 1000}.{version.value % 1000 // 10}")


class DeviceMemory:
    """How many bytes are taken: of the first GPU's memory, or with "cpu" of the RAM that this process holds."""

    def __init__(self, device: str) -> None:
        self._cuda = None
        if device != "cpu":
            self._cuda = _driver()
            number, context = ctypes.c_int(), ctypes.c_void_p()
            _check(self._cuda.cuDeviceGet(ctypes.byref(number), 0), "asking for the GPU")
            # The context that ONNX Runtime uses too; its own memory is thus in the first figure already.
            _check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "making a context")
            _check(self._cuda.cuCtxSetCurrent(context), "taking the context")

    def read(self) -> tuple[int, int]:
        """(bytes taken, bytes free)."""
        if self._cuda is None:
            return _status_bytes("/proc/self/status", "VmRSS:"), _status_bytes("/proc/meminfo", "MemAvailable:")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        _check(self._cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "asking for its free memory")
        return total.value - free.value, free.value


def _driver() -> Any:
    try:
        cuda = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CheckError(f"{NO_GPU} (no {LIBRARY}, so no driver): {ADVICE}") from error
    _check(cuda.cuInit(0), "starting")
    return cuda


def _check(code: int, doing: str) -> None:
    if code != 0:
        raise CheckError(f"{NO_GPU} (its driver answers {code} while {doing}): {ADVICE}")


def _status_bytes(path: str, key: str) -> int:
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
