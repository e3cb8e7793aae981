"""The bundles of the check: the model in each precision for the device, and as the processor's fp32 reference."""

from __future__ import annotations

from typing import Any, Final

from gpu_checks.context import Context
from specrun.models_cache.layout import Bundle, find_bundle
from specrun.runtime.backend import default_threads
from specrun.runtime.calibration import calibrate
from specrun.runtime.engine import Engine
from specrun.runtime.session import ModelSession, WidthRule, session_opener

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


def bundle_of(precision: str, device: str) -> Bundle:
    """A bundle that the export part made."""
    return find_bundle(name_of(precision, device))


def open_engine(context: Context, precision: str | None = None, **options: Any) -> Engine:
    """The engine of the model on the device."""
    name = name_of(precision or context.precision, context.device)
    return Engine.load(name, device=context.device, threads=context.threads, **options)


def open_session(context: Context, bundle: Bundle, device: str, batch: int = 1) -> ModelSession:
    """A session of a bundle by itself, with the width rule that a probe finds."""
    threads = threads_of(context)
    opener = session_opener(bundle, threads, device)
    rule = calibrate(bundle, threads, opener).rule if batch == 1 else WidthRule()
    return opener(batch, rule)


def text_ids(bundle: Bundle, count: int) -> list[int]:
    """The ids of a fixed text, repeated to `count`."""
    from specrun.export.fidelity import TEXT
    from specrun.runtime.tokenizer import Tokenizer

    ids = Tokenizer.from_bundle(bundle).encode(TEXT, add_bos=False)
    return (ids * (count // len(ids) + 1))[:count]


def threads_of(context: Context) -> int:
    """Of the processor, for sessions that are opened without an engine."""
    return context.threads or default_threads()
