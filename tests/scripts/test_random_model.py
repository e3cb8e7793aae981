"""Random models of any shape: a small file, and yet weights of its own for each layer of a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

from gpu_checks.random_model import SHAPES, RandomWeights, Shape, write_bundle, write_source
from specrun.export.bundle import export_bundle
from specrun.export.config import config_from_json
from specrun.runtime import Engine
from specrun.runtime.kv_shape import SHAPES as KNOWN

DEEP = Shape(6, 64, 4, 2, 96, 320, 256)


def test_the_shape_of_llama_7b() -> None:
    shape, known = SHAPES["llama-7b"], KNOWN["llama-7b"]
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (known.layers, known.kv_heads, known.head_dim)
    assert 6.7e9 < shape.parameters < 6.8e9  # Touvron et al. 2023, table 2
    assert 60e6 < SHAPES["llama-68m"].parameters < 75e6
    assert shape.context >= 2048 + 64


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_layers_share_their_place_in_the_file(tmp_path: Path, precision: str) -> None:
    deep = write_bundle("deep", DEEP, precision, "cpu", tmp_path)
    one = write_bundle("one", replace(DEEP, layers=1), precision, "cpu", tmp_path)
    assert deep.weights_bytes == one.weights_bytes
    graph = onnx.load(deep.path / "target.onnx", load_external_data=False).graph
    places: dict[str, list[str]] = {}
    for tensor in graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            places.setdefault(entries["offset"], []).append(tensor.name)
    assert len({name for names in places.values() for name in names}) == sum(map(len, places.values()))
    shared = [names for names in places.values() if len(names) == DEEP.layers]
    assert len(shared) >= 4  # qkv, output, gate and up, down
    assert all(len(names) in (1, DEEP.layers) for names in places.values())


def test_it_runs_and_every_layer_counts(tmp_path: Path) -> None:
    deep = write_bundle("deep", DEEP, "fp32", "cpu", tmp_path)
    assert deep.manifest.sizes.layers == DEEP.layers
    assert deep.manifest.fidelity is None
    assert write_bundle("deep", DEEP, "fp32", "cpu", tmp_path).digest == deep.digest
    with Engine.load("deep", threads=1) as engine:
        result = engine.generate("abc", method="none", max_tokens=12, ignore_eos=True)
        assert len(set(result.token_ids)) > 3
        assert np.isfinite(engine.logits([1, 2, 3])).all()
        deep_logits = engine.logits([1, 2, 3])
    write_bundle("shallow", replace(DEEP, layers=1), "fp32", "cpu", tmp_path)
    with Engine.load("shallow", threads=1) as engine:
        assert np.abs(engine.logits([1, 2, 3]) - deep_logits).max() > 0.1


def test_a_source_is_that_of_the_weights(tmp_path: Path) -> None:
    """What is exported from the written folder are the weights that are made in memory."""
    folder = write_source(tmp_path / "source", DEEP)
    bundle = export_bundle(str(folder), name="tiny", precision="fp32")
    assert bundle.manifest.fidelity is not None
    assert bundle.manifest.fidelity.logit_rmse < 1e-4
    weights = RandomWeights(config_from_json(folder))
    name = "model.layers.3.mlp.down_proj.weight"
    assert weights.tensor(name).shape == (64, 96)
    np.testing.assert_array_equal(weights.tensor(name), RandomWeights(config_from_json(folder)).tensor(name))
    assert not np.array_equal(weights.tensor(name), weights.tensor(name.replace("3", "2")))
    assert set(weights.names()) >= {name, "lm_head.weight"}
