"""What the CUDA runtime library says of the GPUs, asked before anything is allocated on one.

It is the library that onnxruntime-gpu itself needs, so nothing more has to be installed; four of its functions, the
same for ten years, are called. The first call makes the context of this process on the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any, Final

from specrun.models_cache.errors import BackendError

NO_LIBRARIES: Final = "the CUDA libraries are missing"
NO_CUDNN: Final = "cuDNN is missing"
MAJORS: Final = (13, 12)  # of CUDA, newest first
_ATTRIBUTES: Final = {"multiprocessors": 16, "major": 75, "minor": 76}


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: its compute capability ("9.0") and multiprocessors, which with the driver decide the kernels."""

    capability: str
    multiprocessors: int
    driver: int


def gpu_problem() -> str | None:
    """Why no GPU can be used, in a few words; None if there is one."""
    library = _library()
    if library is None:
        return NO_LIBRARIES
    count = ctypes.c_int(0)
    error = library.cudaGetDeviceCount(ctypes.byref(count))
    if error:
        return f"CUDA finds no GPU ({_text(library, error)})"
    if not count.value:
        return "CUDA finds no GPU"
    return None if _has_cudnn() else NO_CUDNN


def gpu(index: int) -> Gpu:
    """What a GPU is. Raises BackendError where there is none of that number."""
    library = _selected(index)
    found = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int(0)
        _check(library, library.cudaDeviceGetAttribute(ctypes.byref(value), number, index))
        found[name] = value.value
    driver = ctypes.c_int(0)
    _check(library, library.cudaDriverGetVersion(ctypes.byref(driver)))
    return Gpu(f"{found['major']}.{found['minor']}", found["multiprocessors"], driver.value)


def free_memory(index: int) -> tuple[int, int]:
    """(free, all) bytes of a GPU's memory. Raises BackendError where there is none of that number."""
    library = _selected(index)
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    _check(library, library.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)))
    return free.value, total.value


def _selected(index: int) -> Any:
    problem = gpu_problem()
    library = _library()
    if problem is not None or library is None:
        raise BackendError(f"Device 'cuda' cannot be used: {problem}.")
    error = library.cudaSetDevice(index)
    if error:
        raise BackendError(f"There is no GPU 'cuda:{index}' ({_text(library, error)}): choose another --device.")
    return library


def _check(library: Any, error: int) -> None:
    if error:
        raise BackendError(f"The CUDA runtime failed: {_text(library, error)}.")


def _text(library: Any, error: int) -> str:
    library.cudaGetErrorString.restype = ctypes.c_char_p
    text: bytes | None = library.cudaGetErrorString(error)
    return f"error {error}: {text.decode() if text else 'unknown'}"


@functools.cache
def _library() -> Any:
    """The library that ONNX Runtime loads, by the name that it has for each version; None if there is none."""
    for major in _majors():
        name = f"cudart64_{major}.dll" if sys.platform == "win32" else f"libcudart.so.{major}"
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _majors() -> tuple[int, ...]:
    """The version of CUDA that ONNX Runtime was built for, where it says so: one of another says nothing of it."""
    built = str(getattr(sys.modules.get("onnxruntime"), "cuda_version", None)).partition(".")[0]
    return (int(built),) if built.isdecimal() else MAJORS


@functools.cache
def _has_cudnn() -> bool:
    """Whether cuDNN can be loaded; sessions begin without it too, and the first one that takes a maximum fails."""
    try:
        ctypes.CDLL("cudnn64_9.dll" if sys.platform == "win32" else "libcudnn.so.9")
    except OSError:
        return False
    return True
