"""Speculators without a graph that runs, for tests of where they live."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specrun.models_cache.manifest import GraphSpec
from specrun.models_cache.speculator import VOCABULARY_NAME, SpeculatorManifest, SpeculatorSizes


def write_speculator_files(folder: Path, data: bytes = b"heads " * 64, layout: str = "eagle3") -> SpeculatorManifest:
    """Files for a target of 8 tokens with a draft vocabulary of 4, and their manifest without digests."""
    (folder / "speculator.onnx").write_bytes(b"graph")
    (folder / "speculator.onnx.data").write_bytes(data)
    np.array([0, 2, 3, 7], "<i4").tofile(folder / VOCABULARY_NAME)
    graph = GraphSpec("speculator.onnx", ("speculator.onnx.data",), (), 1, (), ())
    draft = layout == "draft"
    return SpeculatorManifest(
        name="",
        method="eagle" if layout.startswith("eagle") else layout,
        layout=layout,
        target_digest="0" * 64,
        graphs={"target": graph, "target_batch1": graph} if draft else {"speculator": graph},
        sizes=SpeculatorSizes(4, 8, 4, 1, *([0] * 6 if layout == "medusa" else [1, 2, 1, 16, 8, 32])),
        taps=() if draft else (0, 1),
        acceptance=((0.5, 0.25),),
        licence="mit",
    )
