"""What a timing depends on: machine, versions, model, and how busy the machine was; and the memory of the process."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.runtime.backend import default_threads, onnxruntime
from specrun.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class Sitting:
    """When a call that timed runs began, and the machine's load then: averages over 1, 5 and 15 minutes."""

    started: str
    load_average: tuple[float, ...]

    @classmethod
    def now(cls) -> Sitting:
        """The sitting that begins now; without a load where the system does not tell one."""
        load = os.getloadavg() if hasattr(os, "getloadavg") else ()
        return cls(time.strftime("%Y-%m-%d %H:%M"), tuple(round(value, 2) for value in load))


def machine_facts() -> dict[str, Any]:
    """Processor, system and versions."""
    return {
        "processor": processor_name(),
        "machine": platform.machine(),
        "cores": default_threads(),
        "system": platform.system(),
        "specrun": _specrun_version(),
        "onnxruntime": onnxruntime().__version__,
        "python": platform.python_version(),
    }


def model_facts(engine: Engine, labels: Iterable[str] = ()) -> dict[str, Any]:
    """Which graph ran, and how; labels: of runs, whose speculators' digests belong to it."""
    methods = [engine.resolve_method(label.partition(":")[0]) for label in labels]
    manifest = engine.bundle.manifest
    return {
        "model": manifest.name,
        "digest": engine.bundle.digest,
        "speculators": engine.drafting.digests(methods),
        "precision": manifest.precision.get("requested"),
        "threads": engine.threads,
        "context": engine.context,
        "exactness": engine.calibration.exactness,
    }


def processor_name() -> str:
    """The processor's name as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Processor") and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()


def reset_peak_memory() -> None:
    """Let the peak of this process's memory begin at what it has now, where the system can do that (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int | None:
    """The most memory that this process held in RAM, in bytes, since the reset; None where that is not known."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _specrun_version() -> str | None:
    try:
        return importlib.metadata.version("specrun")
    except importlib.metadata.PackageNotFoundError:
        return None
