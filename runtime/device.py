"""Where a model runs: `cpu`, or a GPU, `cuda` or `cuda:1`; and what has to be right before it may."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.errors import BackendError, UsageError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import Manifest
from specrun.runtime.cuda_runtime import NO_CUDNN, NO_LIBRARIES, free_memory, gpu_problem

CUDA_PROVIDER: Final = "CUDAExecutionProvider"
GPU_HINT: Final = "`pip uninstall onnxruntime onnxruntime-gpu`, then `pip install 'specrun[gpu]'`"
GRAPHS_VARIABLE: Final = "SPECRUN_CUDA_GRAPHS"
RESERVE: Final = 768 << 20
"""Bytes of a GPU that are left to its context, the libraries' workspaces and the activations of a run."""


@dataclass(frozen=True, slots=True)
class Device:
    """`kind` "cpu" or "cuda", and which GPU. resident: buffers and logits stay in the device's own memory.

    On a GPU they always do. On the CPU they never need to; a test sets it, and so runs what a GPU would.
    """

    kind: str = "cpu"
    index: int = 0
    resident: bool = False

    @property
    def name(self) -> str:
        """As --device takes it."""
        return f"{self.kind}:{self.index}" if self.index else self.kind

    @property
    def cuda_graphs(self) -> bool:
        """Whether runs of a width are recorded once and replayed; asked for with SPECRUN_CUDA_GRAPHS=1."""
        return self.kind == "cuda" and os.environ.get(GRAPHS_VARIABLE) == "1"

    def providers(self, *, recorded: bool = False) -> list[Any]:
        """What ONNX Runtime takes as `providers`. recorded: for a graph whose runs may be recorded as CUDA graphs.

        Every session has a stream of its own there, and waits for it at the end of a run, so a target and its draft
        are in no race. They may be on different GPUs.
        """
        if self.kind == "cpu":
            return ["CPUExecutionProvider"]
        options = {
            "device_id": str(self.index),
            "arena_extend_strategy": "kSameAsRequested",  # what it takes, and not the next power of two
            "use_tf32": "0",
            "enable_cuda_graph": str(int(recorded and self.cuda_graphs)),
        }
        return [(CUDA_PROVIDER, options)]


CPU: Final = Device()


def made_for(manifest: Manifest) -> str:
    """The device that a bundle's graphs were exported for: those for the CUDA provider keep KV in 16 bits."""
    return "cpu" if manifest.kv.dtype == "float32" else "cuda"


def find_device(name: str | Device, manifest: Manifest) -> Device:
    """The device that `name` means for a bundle: cpu, cuda, cuda:N, or auto.

    auto: a GPU for graphs that were exported for one, where there is one, else the CPU. Raises UsageError for another
    name, and for a GPU where the graphs have no kernels there; BackendError saying what is missing.
    """
    if isinstance(name, Device):
        return name
    if name == "cpu":
        return CPU
    if name == "auto":
        return Device("cuda", resident=True) if made_for(manifest) == "cuda" and cuda_problem() is None else CPU
    found = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if found is None:
        raise UsageError(f"Unknown device '{name}': choose cpu, cuda, cuda:N for one of several GPUs, or auto.")
    if made_for(manifest) != "cuda":
        raise UsageError(
            f"{manifest.name} was exported for the CPU: export it with `specrun export SOURCE --device cuda` for a GPU."
        )
    problem = cuda_problem()
    if problem is not None:
        raise BackendError(problem)
    return Device("cuda", int(found[1] or 0), resident=True)


def draft_device(target: Device, draft: Bundle, name: str | Device | None = None) -> Device:
    """Where a draft model runs: on the device `name`; by default beside its target, or on the CPU if it is made for it.

    Raises what `find_device` raises.
    """
    if name is not None:
        return find_device(name, draft.manifest)
    return CPU if target.kind == "cuda" and made_for(draft.manifest) == "cpu" else target


def cuda_problem() -> str | None:
    """Why the CUDA provider cannot be used here, with the remedy; None if it can."""
    from specrun.runtime.backend import onnxruntime

    ort = onnxruntime()
    if _both_installed():
        return (
            "Both onnxruntime and onnxruntime-gpu are installed, and one has overwritten files of the other: "
            f"{GPU_HINT}."
        )
    if CUDA_PROVIDER not in ort.get_available_providers():
        return f"The installed ONNX Runtime has no CUDA support: {GPU_HINT}."
    preload()
    problem = gpu_problem()
    if problem is None:
        return None
    if problem in (NO_LIBRARIES, NO_CUDNN):
        what = "CUDA libraries" if problem == NO_LIBRARIES else "cuDNN 9"
        return f"ONNX Runtime finds no {what}: {GPU_HINT}, which brings all that it needs."
    return f"Device 'cuda' cannot be used: {problem}. Choose --device cpu, or install a newer NVIDIA driver."


@functools.cache
def preload() -> str:
    """Load the CUDA libraries that came as Python packages; what ONNX Runtime says of it, which it prints."""
    from specrun.runtime.backend import onnxruntime

    ort, said = onnxruntime(), io.StringIO()
    # It warns once for each session and once for each layer, of nothing that is wrong; errors are still told.
    ort.set_default_logger_severity(3)
    _buffers_as_asked()
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(said):
            ort.preload_dlls()
    return said.getvalue()


def _buffers_as_asked() -> None:
    """Let buffers take what is asked for: those made outside a session come from memory that doubles when it grows.

    KV buffers would hold up to twice their size, and nothing be left for a session on a GPU that is nearly full.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    if hasattr(native, "set_arena_extend_strategy"):
        native.set_arena_extend_strategy(native.ArenaExtendStrategy.kSameAsRequested)


def _both_installed() -> bool:
    """Whether one lies over the other; in folders of their own the first on the path is used, and whole."""
    folders = [_folder(name) for name in ("onnxruntime", "onnxruntime-gpu")]
    return folders[0] is not None and folders[0] == folders[1]


def _folder(name: str) -> Path | None:
    """Where a package is installed, None if it is not."""
    from importlib import metadata  # takes longer than most of a start

    try:
        return Path(str(metadata.distribution(name).locate_file(""))).resolve()
    except metadata.PackageNotFoundError:
        return None


def require_memory(device: Device, what: str, weights: int, kv: int, mend: str) -> None:
    """Raise BackendError with the figures if a GPU has no room for so many bytes more. The CPU is not asked.

    what: for whom they are. mend: how to need less.
    """
    if device.kind != "cuda":
        return
    free, total = free_memory(device.index)
    needed = weights + kv + RESERVE
    if needed > free:
        raise BackendError(
            f"{what} needs {_gigabytes(needed)} on {device.name} ({_gigabytes(weights)} of weights, "
            f"{_gigabytes(kv)} of KV, {_gigabytes(RESERVE)} to work in) and {_gigabytes(free)} of "
            f"{_gigabytes(total)} are free: {mend}."
        )


def has_room(device: Device, count: int, besides: int = 0) -> bool:
    """Whether twice so many bytes are free on a GPU: for what is useful there and not needed. On the CPU always.

    besides: bytes that will be needed and are not taken yet.
    """
    return device.kind != "cuda" or 2 * count + besides + RESERVE <= free_memory(device.index)[0]


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
