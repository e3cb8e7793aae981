"""The bundles of the check: the model in each precision for the device, and as the processor's fp32 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpu_checks.context import Context
from specrun.models_cache.layout import Bundle
from specrun.runtime.engine import Engine
from specrun.runtime.session import ModelSession, WidthRule

PROMPTS: Final = (
    "List the days of the week, then list them again in the same order.",
    "Write a Python class for a stack with push, pop and peek, and a few lines that use it.",
    "Natalia sold clips to 48 friends in April and half as many in May. How many did she sell in all?",
    "Translate to French, then repeat the English: The cat sat on the mat. The dog sat on the log.",
    "Explain in simple words why the sky is blue and sunsets are red.",
    "Summarise in two sentences: Tides are caused by the pull of the Moon and, to a lesser degree, of the Sun on the "
    "oceans. Twice a day the water rises and falls; where the coast narrows, the range can exceed 16 metres.",
)


def name_of(precision: str, device: str) -> str:
    """How a bundle of the check is called."""
    return f"check-{precision}-{device}"


def export(context: Context, precision: str, device: str) -> Bundle:
    """Export the model; with shipped speculators where its weights have some, with random ones in a dry run."""
    from specrun.export.bundle import export_bundle

    # The processor's graphs are exported with no word of a device: that call is the one that always works.
    options: dict[str, Any] = {} if device == "cpu" else {"device": device}
    bundle = export_bundle(str(context.source), name=name_of(precision, device), precision=precision, **options)
    if context.dry_run and not bundle.speculators():
        from gpu_checks.tiny_heads import attach_random_heads

        attach_random_heads(bundle)
    return bundle


def open_engine(context: Context, precision: str | None = None, device: str | None = None, **options: Any) -> Engine:
    """The engine of the model, by default in the precision of the timings and on the device of the check."""
    device = device or context.device
    name = name_of(precision or context.precision, device)
    return Engine.load(name, device=device, threads=context.threads, **options)


def open_rows(engine: Engine, batch: int = 1) -> ModelSession:
    """A session of the engine's target by itself, with KV of its own for so many rows; every run has its own width.

    Raises BackendError where this ONNX Runtime, or the device's memory, does not do for so many.
    """
    return engine._open_session(batch, WidthRule())


@contextmanager
def usable(engine: Engine, methods: Sequence[str]) -> Iterator[list[str]]:
    """Of the methods that this engine has, those that answer a short request.

    The others raise at the end, so that what the usable ones gave is there; RuntimeError names them.
    """
    found, failed = [], {}
    for method in methods:
        if method != "auto" and method not in engine.methods:
            continue
        try:
            engine.generate(PROMPTS[0], method=method, max_tokens=4)
            found.append(method)
        except Exception as error:  # one head that cannot be loaded takes no other method with it
            failed[method] = f"{type(error).__name__}: {error}"
    engine.reset()
    yield found
    if failed:
        raise RuntimeError(f"{', '.join(failed)}: {next(iter(failed.values()))}")


def on_host(logits: Any) -> NDArray[np.float32]:
    """A copy of a run's logits, which the next run overwrites, wherever they are."""
    return np.array(np.asarray(logits), np.float32)


def text_ids(engine: Engine, count: int) -> list[int]:
    """The ids of a fixed text, repeated to `count`."""
    from specrun.export.fidelity import TEXT

    ids = engine.tokenizer.encode(TEXT, add_bos=False)
    return (ids * (count // len(ids) + 1))[:count]
