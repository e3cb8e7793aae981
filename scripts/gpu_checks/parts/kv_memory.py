"""KV memory of target and draft at batch x positions, before and after it is taken, against arithmetic and the essay.

The essay gives 7.73 and 16.90 GB for LLaMA-7B at batch 32 x 2048; fp16 keys and values take 34.4 GB there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from gpu_checks.driver import DeviceMemory
from specrun.models_cache.errors import SpecrunError
from specrun.models_cache.layout import Bundle
from specrun.runtime.backend import onnxruntime
from specrun.runtime.engine import Engine
from specrun.runtime.kv_shape import KVShape

ESSAY_GB = (7.73, 16.90)
SPARE = 1.1  # of the room that the buffers need


def run(context: Context, report: Report) -> None:
    """Load both models, then take their buffers one after the other and read the device's memory each time."""
    amounts = context.amounts
    memory = DeviceMemory(context.device)
    engines: dict[str, Engine] = {}
    shapes: dict[str, KVShape] = {}
    steps: list[dict[str, Any]] = []
    held: list[Any] = []  # what must stay until the end
    for role, name in (("target", amounts.big), ("draft", amounts.big_draft)):
        before, _ = memory.read()
        engines[role] = Engine.load(name, device=context.device, threads=context.threads)
        shapes[role] = KVShape.of_bundle(engines[role].bundle)
        steps.append(_step(f"the {role}, with KV of one row", memory, before, None))
        report.add(steps=steps)
    batch = _batch(amounts.kv_batch, amounts.kv_positions, list(shapes.values()), memory)
    wanted = {role: shape.kv_bytes(amounts.kv_positions, batch) for role, shape in shapes.items()}
    report.add(
        batch=batch,
        batch_asked=amounts.kv_batch,
        positions=amounts.kv_positions,
        bytes_per_value=shapes["target"].bytes_per_value,
        arithmetic_gb={role: value / 1e9 for role, value in wanted.items()} | {"both": sum(wanted.values()) / 1e9},
        llama_7b_fp16_gb=KVShape.parse("llama-7b").kv_bytes(2048, 32) / 1e9,
        essay_gb=ESSAY_GB,
    )
    how = {}
    for role in shapes:
        before, _ = memory.read()
        cache, how[role] = _take(engines[role], batch, amounts.kv_positions, context.device)
        held.append(cache)
        steps.append(_step(f"KV of the {role}", memory, before, wanted[role]))
        report.add(steps=steps, taken_by=how)
    taken = sum(step["taken_gb"] for step in steps if step["what"].startswith("KV"))
    report.add(measured_kv_gb=taken, against_arithmetic=taken * 1e9 / sum(wanted.values()))


def _step(what: str, memory: DeviceMemory, before: int, wanted: int | None) -> dict[str, Any]:
    used, free = memory.read()
    return {
        "what": what,
        "taken_gb": (used - before) / 1e9,
        "arithmetic_gb": None if wanted is None else wanted / 1e9,
        "device_gb": used / 1e9,
        "free_gb": free / 1e9,
    }


def _batch(asked: int, positions: int, shapes: list[KVShape], memory: DeviceMemory) -> int:
    """The batch that was asked for, halved until its buffers fit into what is free."""
    batch = asked
    while batch > 1 and sum(shape.kv_bytes(positions, batch) for shape in shapes) * SPARE > memory.read()[1]:
        batch //= 2
    return batch


def _take(engine: Engine, batch: int, positions: int, device: str) -> tuple[Any, str]:
    """Buffers of the runtime's own where it runs so many rows, else of the same size: (what holds them, how)."""
    try:
        session = models.open_rows(engine, batch)
    except SpecrunError as error:
        how = f"buffers by themselves, as the runtime runs fewer rows ({error})"
        return _bare(engine.bundle, batch, positions, device), how
    session.cache.reserve(positions)
    if device == "cpu":
        _touch(session.cache.values)
    return session, "the runtime's buffers"


def _bare(bundle: Bundle, batch: int, positions: int, device: str) -> list[Any]:
    sizes, kv = bundle.manifest.sizes, bundle.manifest.kv
    shape = [batch, sizes.kv_heads, positions, sizes.head_dim]
    make = onnxruntime().OrtValue.ortvalue_from_shape_and_type
    values = [make(shape, np.dtype(kv.dtype), device, 0) for _ in range(2 * sizes.layers)]
    if device == "cpu":
        _touch(values)
    return values


def _touch(values: list[Any]) -> None:
    """Write every buffer: RAM counts as taken only then, a device's memory when it is allocated."""
    for value in values:
        value.numpy()[:] = 1
