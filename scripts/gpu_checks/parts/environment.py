"""Versions and hardware, and whether ONNX Runtime really computes on the device."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import asdict
from typing import Any

import numpy as np

from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.driver import find_gpu
from gpu_checks.wheels import ROOT
from specrun.runtime.backend import build_features, onnxruntime
from specrun.runtime.bench_environment import processor_name

PACKAGES = ("numpy", "tokenizers", "jinja2", "click", "onnx", "onnx-ir", "gguf", "safetensors")
QUERY = "name,driver_version,memory.total,compute_cap,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"


def run(context: Context, report: Report) -> None:
    """Report what the figures of the other parts depend on."""
    ort = onnxruntime()
    report.add(
        device=context.device,
        python=platform.python_version(),
        system=platform.platform(),
        processor=processor_name(),
        cores=os.cpu_count(),
        load_average=[round(value, 2) for value in os.getloadavg()],
        onnxruntime=ort.__version__,
        providers=ort.get_available_providers(),
        attention_inputs=sorted(build_features()),
        query_seqlens="query_seqlens" in build_features(),
        packages={name: _version(name) for name in PACKAGES},
        specrun=_commit(),
    )
    if context.device == "cuda":
        report.add(gpu=asdict(find_gpu()), nvidia_smi=_nvidia_smi())
    report.add(computes_on=_computes_on(context.device))


def _computes_on(device: str) -> str:
    """The provider that a session of one operator ended up with; RuntimeError if it is not the device's."""
    from onnx import TensorProto, helper

    ort = onnxruntime()
    wanted = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
    if device != "cpu" and hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["y"])], "probe", sides[:1], sides[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=[wanted])
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    (result,) = session.run(None, {"x": square})
    provider = str(session.get_providers()[0])
    if provider != wanted:
        raise RuntimeError(
            f"ONNX Runtime took {provider} where {wanted} was asked for: its CUDA libraries are missing."
        )
    if not np.allclose(result, square @ square):
        raise RuntimeError(f"{provider} multiplies matrices wrongly.")
    return provider


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None  # no checkout


def _nvidia_smi() -> dict[str, Any] | None:
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=15).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(QUERY.split(","), [value.strip() for value in line.splitlines()[0].split(",")], strict=False))
