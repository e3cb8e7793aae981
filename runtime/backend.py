"""The one place that talks to ONNX Runtime's API: loading, features of the build, mapping of its errors."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from specrun.models_cache.errors import BackendError

INSTALL_HINT = "install it with `pip install 'specrun[cpu]'`, or `pip install 'specrun[gpu]'` for an NVIDIA GPU"


def onnxruntime() -> Any:
    """The onnxruntime module; BackendError says what to install when it is missing."""
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError(f"ONNX Runtime is not installed: {INSTALL_HINT}.") from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise BackendError(f"The installed onnxruntime package is broken: uninstall it, then {INSTALL_HINT}.")
    return onnxruntime


@functools.cache
def build_features() -> frozenset[str]:
    """Which optional inputs the installed operators have, read from their schemas ("query_seqlens")."""
    onnxruntime()
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    for schema in get_all_operator_schema():
        if schema.name == "GroupQueryAttention" and schema.domain == "com.microsoft":
            return frozenset(parameter.name for parameter in schema.inputs)
    raise BackendError(f"The installed ONNX Runtime has no GroupQueryAttention: {INSTALL_HINT}, 1.31 or newer.")


def default_threads() -> int:
    """Physical cores that this process may use, as far as the platform tells."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").read_text()
    except OSError:
        return allowed
    hyperthreaded = "," in siblings or "-" in siblings
    return max(1, allowed // 2) if hyperthreaded else allowed


def most_threads() -> int:
    """More than two threads a processor only cost memory; a few are always allowed, so that settings can be moved."""
    return max(8, 2 * (os.cpu_count() or 1))


def create_session(path: Path, *, threads: int, device: str = "cpu", shared_cpu: bool = False) -> Any:
    """An InferenceSession for the graph at `path`.

    `shared_cpu`: another session runs in turn on the same cores, so idle threads must not spin between runs.
    """
    ort = onnxruntime()
    if device != "cpu":
        raise BackendError(f"Device '{device}' is not supported yet: use --device cpu.")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if shared_cpu:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        raise BackendError(f"ONNX Runtime {ort.__version__} refused {path.name}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
