"""Attaching speculators to bundles: graphs of the bundle's own weights, names, replacement, and what does not fit."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from specrun.export.bundle import export_bundle
from specrun.export.quantize import FloatMatrix, dequantize_matrix
from specrun.export.speculator_weights import JSON_NAME, TENSORS_NAME, read_speculator, write_speculator
from specrun.export.speculators import attach, attach_speculator
from specrun.export.target_ends import read_target_ends
from specrun.models_cache import (
    Bundle,
    IntegrityError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
    find_bundle,
    find_speculator,
    verify_bundle,
)

from .graph_runner import open_session
from .speculator_reference import EagleRunner, plain_choice, reference_eagle, reference_medusa
from .test_speculator_graph import TOKENS, close_in_8_bits
from .tiny_speculators import LAYOUTS, tiny_speculator


@pytest.fixture
def bundle(tiny: str) -> Bundle:
    return find_bundle(tiny)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attached(layout: str, bundle: Bundle, tmp_path: Path) -> None:
    speculator = tiny_speculator(layout)
    write_speculator(tmp_path / "weights", speculator)
    (tmp_path / "weights" / "report.svg").write_text("<svg/>")
    seen: list[str] = []
    made = attach(bundle, tmp_path / "weights", progress=lambda label, done, total: seen.append(label))
    assert f"Attaching tiny-{layout}" in seen
    manifest, sizes = made.manifest, made.manifest.sizes
    assert (manifest.method, manifest.layout, manifest.taps) == (speculator.method, layout, speculator.taps)
    assert (sizes.hidden, sizes.vocabulary, sizes.draft_vocabulary) == (64, 300, 120)
    assert (sizes.depth, sizes.layers) == {"medusa": (3, 0), "draft": (1, 2)}.get(manifest.method, (1, 1))
    assert sizes.positions == (0 if manifest.method == "medusa" else bundle.manifest.kv.positions)
    assert manifest.acceptance == speculator.acceptance
    np.testing.assert_array_equal(made.vocabulary(), speculator.vocabulary)
    assert {JSON_NAME, TENSORS_NAME, "report.svg"} <= set(manifest.files)
    assert verify_bundle(bundle) == []
    for graph in manifest.graphs.values():
        session = open_session(made.path / graph.file)
        assert [spec.name for spec in graph.inputs] == [value.name for value in session.get_inputs()]
        assert [spec.name for spec in graph.outputs] == [value.name for value in session.get_outputs()]
    # What is in the bundle is a weights folder again.
    again = read_speculator(made.path)
    for name, array in speculator.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], array)


@pytest.mark.parametrize("precision", ["int8", "fp32", "int4"])
def test_its_graph_has_the_ends_of_the_target(precision: str, tiny_source: Path) -> None:
    bundle = export_bundle(str(tiny_source), precision=precision)
    stored = read_target_ends(bundle)
    ends = dataclasses.replace(
        stored,
        embedding=FloatMatrix(dequantize_matrix(stored.embedding)),
        head=FloatMatrix(dequantize_matrix(stored.head)),
    )
    rng = np.random.default_rng(0)
    for layout in ("eagle3", "eagle1"):
        speculator = tiny_speculator(layout)
        made = attach_speculator(bundle, speculator)
        features = rng.standard_normal((8, 64 * len(speculator.taps))).astype(np.float32)
        runner = EagleRunner(made.graph_path(), speculator)
        expected, _ = reference_eagle(speculator, ends, features, np.zeros((0, 64)), TOKENS)
        close_in_8_bits(runner.run(features, None, TOKENS)["logits"], expected)
    speculator = tiny_speculator("medusa")
    session = open_session(attach_speculator(bundle, speculator).graph_path())
    feature = rng.standard_normal((1, 64)).astype(np.float32)
    (logits,) = session.run(["logits"], {"features": feature, **plain_choice(120)})
    close_in_8_bits(logits, reference_medusa(speculator, ends, feature, 0))


def test_names_and_replacement(bundle: Bundle, tmp_path: Path) -> None:
    first, second = tiny_speculator("medusa"), tiny_speculator("medusa", seed=4)
    made = attach_speculator(bundle, first)
    assert attach_speculator(bundle, first) == made
    with pytest.raises(UsageError, match="has another speculator 'tiny-medusa' already"):
        attach_speculator(bundle, second)
    assert find_speculator(bundle, "tiny-medusa") == made
    assert attach_speculator(bundle, second, "other").name == "other"
    write_speculator(tmp_path / "weights", second)
    replaced = attach(bundle, tmp_path / "weights", force=True)
    assert replaced.digest != made.digest
    assert [s.name for s in bundle.speculators()] == ["other", "tiny-medusa"]
    with pytest.raises(UsageError, match="cannot name"):
        attach_speculator(bundle, first, "../x")


def test_speculators_of_other_models(bundle: Bundle, tmp_path: Path) -> None:
    eagle = tiny_speculator("eagle3")
    for wrong in ({"hidden": 32}, {"layers": 3}, {"vocabulary": 299}):
        target = dataclasses.replace(eagle.target, **wrong)
        with pytest.raises(UsageError, match="was made for tiny, and tiny is another model"):
            attach_speculator(bundle, dataclasses.replace(eagle, target=target))
    padding = dataclasses.replace(bundle.manifest, sizes=dataclasses.replace(bundle.manifest.sizes, tokens=3))
    unknown = dataclasses.replace(eagle, tensors=eagle.tensors | {"vocabulary": np.arange(3, 123, dtype=np.int32)})
    with pytest.raises(UsageError, match="knows no token of tiny: its vocabulary begins at 3, and the tokens end at 2"):
        attach_speculator(dataclasses.replace(bundle, manifest=padding), unknown)
    features = dataclasses.replace(bundle.manifest, features=None)
    old = dataclasses.replace(bundle, manifest=features)
    with pytest.raises(UnsupportedModelError, match="export it again"):
        attach_speculator(old, eagle)
    assert attach_speculator(old, tiny_speculator("draft")).name == "tiny-draft"  # it reads no features
    assert bundle.manifest.features is not None
    other = dataclasses.replace(bundle.manifest.features, taps=(1, 2))
    with pytest.raises(UsageError, match="reads the input of layer 0, and the graph of tiny gives those of 1, 2 only"):
        attach_speculator(
            dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, features=other)), eagle
        )
    with pytest.raises(ModelNotFoundError):
        attach(bundle, tmp_path)
    write_speculator(tmp_path / "weights", eagle)
    (tmp_path / "weights" / TENSORS_NAME).write_bytes(b"\x80\x04.")
    with pytest.raises(IntegrityError):
        attach(bundle, tmp_path / "weights")
    assert [s.name for s in bundle.speculators()] == ["tiny-draft"]


def test_a_new_export_keeps_what_was_trained(tiny_source: Path) -> None:
    bundle = export_bundle(str(tiny_source))
    first = attach_speculator(bundle, tiny_speculator("eagle3"), "mine")
    attach_speculator(bundle, tiny_speculator("medusa"), shipped=True)
    (attach_speculator(bundle, tiny_speculator("draft")).path / JSON_NAME).write_text("{}")
    again = export_bundle(str(tiny_source), precision="fp32", name="tiny", force=True)
    (kept,) = again.speculators()
    assert kept.name == "mine"
    assert kept.manifest.target_digest == again.target_digest != first.manifest.target_digest
    assert kept.manifest.files[TENSORS_NAME] == first.manifest.files[TENSORS_NAME]
    # A broken bundle that is built anew keeps it too; one of other sizes does not.
    (again.path / "target.onnx").unlink()
    assert [s.name for s in export_bundle(str(tiny_source), precision="fp32", name="tiny").speculators()] == ["mine"]


_ATTACH = """
import sys
from pathlib import Path
from specrun.export.speculators import attach
from specrun.models_cache import find_bundle
print(attach(find_bundle("tiny"), Path(sys.argv[1])).digest)
"""


def test_two_processes_at_once(bundle: Bundle, tmp_path: Path) -> None:
    write_speculator(tmp_path / "weights", tiny_speculator("eagle3"))
    command = [sys.executable, "-c", _ATTACH, str(tmp_path / "weights")]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digests = {worker.communicate(timeout=100)[0] for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0]
    assert digests == {find_speculator(bundle, "tiny-eagle3").digest + "\n"}


def test_a_bundle_moves_with_its_speculators(bundle: Bundle, tmp_path: Path) -> None:
    attach_speculator(bundle, tiny_speculator("eagle3"))
    shutil.copytree(bundle.path, tmp_path / "elsewhere")
    shutil.rmtree(bundle.path)
    (moved,) = find_bundle(tmp_path / "elsewhere").speculators()
    open_session(moved.graph_path())
