"""Whether a target's graph is the one that its bundle's manifest describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.models_cache.errors import ManifestError
from specrun.models_cache.layout import Bundle


def check_graph(bundle: Bundle, onnx_session: Any) -> list[str]:
    """The names of the graph's outputs, logits first, after a look whether it is the graph that the manifest describes.

    Raises ManifestError naming the first input or output that is missing or has another shape.
    """
    sizes = bundle.manifest.sizes
    cache = (None, sizes.kv_heads, None, sizes.head_dim)
    parts = [f"{part}.{layer}" for layer in range(sizes.layers) for part in ("key", "value")]
    inputs: dict[str, tuple[int | None, ...]] = {
        **{f"past_{part}": cache for part in parts},
    }
    outputs: dict[str, tuple[int | None, ...]] = {"logits": (None, None, sizes.vocabulary)}
    if bundle.manifest.features is not None:
        outputs["features"] = (None, None, len(bundle.manifest.features.taps) * sizes.hidden)
    outputs |= {f"present_{part}": cache for part in parts}
    for wanted, found in ((inputs, onnx_session.get_inputs()), (outputs, onnx_session.get_outputs())):
        shapes = {value.name: value.shape for value in found}
        if "pad_rows" in shapes:  # graphs for the CPU have it
            wanted = {"pad_rows": (None, None, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim)} | wanted
        extra = [name for name in shapes if name.startswith(("past_", "present_")) and name not in wanted]
        for name in (*wanted, *extra):
            if not _fits(wanted.get(name), shapes.get(name)):
                model = bundle.manifest.name
                raise ManifestError(f"The manifest of {model} does not describe its graph ({name}): export it again.")
    return [*outputs]


def _fits(wanted: Sequence[int | None] | None, found: Sequence[int | str] | None) -> bool:
    """Whether both are there and of one rank, and every size that is wanted (not None) is the one found."""
    if wanted is None or found is None or len(wanted) != len(found):
        return False
    return all(size is None or size == other for size, other in zip(wanted, found, strict=True))
