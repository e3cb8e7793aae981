"""The one place that talks to ONNX Runtime's API: loading, features of the build, mapping of its errors."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.errors import BackendError
from specrun.runtime.device import CPU, CUDA_PROVIDER, GPU_HINT, GRAPHS_VARIABLE, Device, cuda_problem
from specrun.runtime.forks import keep_over_forks

_OUT_OF_MEMORY: Final = re.compile(r"out of memory|failed to allocate memory", re.IGNORECASE)
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


@dataclass(slots=True)
class _ThreadPool:
    """The one pool of this process, if its sessions share one; `threads` is None until the first of them."""

    shared: bool = False
    threads: int | None = None


_POOL: Final = _ThreadPool()


def share_threads() -> None:
    """Let all sessions of this process take their threads from one pool, as the `specrun` command does.

    A target and its heads run in turn. With pools of their own the threads of one still wait for work while the other
    runs, so a small head must do with one thread. It is for processes in which nothing else uses ONNX Runtime, whose
    sessions all share the pool then or none does. Call it first; the first engine decides how many threads there are.
    """
    _POOL.shared = True


def threads_are_shared() -> bool:
    """Whether sessions of this process take their threads from one pool."""
    return _POOL.shared


def create_session(
    model: Path | bytes, *, threads: int, device: Device = CPU, shared_cpu: bool = False, recorded: bool = False
) -> Any:
    """An InferenceSession for the graph at a path, or in the bytes of a file.

    recorded: its runs may be recorded as CUDA graphs, each under the number that `run_options` gives it.

    `shared_cpu`: another session runs in turn on the same cores, so idle threads must not spin between runs, unless
    both have the same threads (`share_threads`).
    """
    ort = onnxruntime()
    problem = cuda_problem() if device.kind == "cuda" else None
    if problem is not None:
        raise BackendError(problem)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if _POOL.shared:
        _take_pool(ort, threads)
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    if shared_cpu and not _POOL.shared:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    name = model.name if isinstance(model, Path) else "a graph of specrun's own"
    source = os.fspath(model) if isinstance(model, Path) else model
    # Its fallback would print the reason on standard output, and load everything on the processor only to be refused.
    strict = {} if device.kind == "cpu" else {"enable_fallback": 0}
    try:
        session = ort.InferenceSession(source, options, providers=device.providers(recorded=recorded), **strict)
    except Exception as error:  # onnxruntime raises classes of its own without a common base
        if device.kind != "cpu" and _OUT_OF_MEMORY.search(str(error)):
            raise BackendError(
                f"{device.name} has no room for {name}: choose a smaller --context or precision, another --device, or "
                f"end what else runs there ({first_line(error)})."
            ) from error
        raise BackendError(f"ONNX Runtime {ort.__version__} refused {name}: {first_line(error)}") from error
    if device.kind == "cuda" and CUDA_PROVIDER not in session.get_providers():
        # Without a word to the caller it falls back to the processor.
        raise BackendError(
            f"ONNX Runtime {ort.__version__} could not begin on {device.name}, for the reason that it gives above: "
            f"{GPU_HINT}, or choose --device cpu."
        )
    keep_over_forks(session)
    return session


@functools.cache
def run_options(number: int) -> Any:
    """The options of a run that is recorded as CUDA graph `number` and then replayed; None for a run that is not.

    Where no session records, ONNX Runtime ignores the number.
    """
    if number < 0 and os.environ.get(GRAPHS_VARIABLE) != "1":
        return None
    options = onnxruntime().RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options


def _take_pool(ort: Any, threads: int) -> None:
    if _POOL.threads is None:
        try:
            ort.set_global_thread_pool_sizes(threads, 1)
        except Exception as error:
            raise BackendError(f"ONNX Runtime {ort.__version__} shares no threads: {first_line(error)}") from error
        _POOL.threads = threads
    elif threads != _POOL.threads:
        raise BackendError(f"This process shares {_POOL.threads} threads: an engine with {threads} has no place in it.")


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
