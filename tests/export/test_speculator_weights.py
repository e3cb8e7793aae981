"""Speculator folders: what is written is read again, the 8-bit blocks, and files that are not what they must be."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specrun.export.speculator_weights import (
    JSON_NAME,
    TENSORS_NAME,
    dequantize_rows,
    quantize_rows,
    quantized,
    read_speculator,
    write_speculator,
)
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError

from .tiny_speculators import LAYOUTS, tiny_speculator


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_read(layout: str, tmp_path: Path) -> None:
    speculator = tiny_speculator(layout, with_optional=("tap_norms", "fc_bias", "qkv_bias"))
    write_speculator(tmp_path / "a" / "b", speculator)
    again = read_speculator(tmp_path / "a" / "b")
    assert dataclasses.replace(again, tensors={}) == dataclasses.replace(speculator, tensors={})
    assert again.tensors.keys() == speculator.tensors.keys()
    for name, array in speculator.tensors.items():
        assert again.tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(again.tensors[name], array)
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == [JSON_NAME, TENSORS_NAME]
    assert again.layout == layout
    assert again.draft_vocabulary == 120


def test_the_full_vocabulary_needs_no_table(tmp_path: Path) -> None:
    write_speculator(tmp_path, tiny_speculator("eagle3", draft_vocabulary=None, plain=True))
    speculator = read_speculator(tmp_path)
    assert speculator.vocabulary is None
    assert speculator.draft_vocabulary == 300


def test_rounding_is_to_the_nearest_code_of_the_stored_scale() -> None:
    rng = np.random.default_rng(0)
    spread = np.float32(10.0) ** rng.uniform(-9, 3, (40, 1)).astype(np.float32)
    weight = rng.standard_normal((40, 96)).astype(np.float32) * spread
    weight[3] = 0
    codes, scales = quantize_rows(weight)
    assert codes.dtype == np.int8
    assert scales.dtype == np.float16
    assert scales.shape == (40, 3)
    again = dequantize_rows(codes, scales)
    step = np.repeat(scales.astype(np.float32), 32, axis=1)
    assert (np.abs(again - weight) <= 0.5 * step + np.abs(weight) * 1e-6)[step > 0].all()
    assert (np.abs(weight)[step == 0] < 1e-5).all()
    np.testing.assert_array_equal(again[3], 0)


def test_a_second_rounding_changes_nothing() -> None:
    weight = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    once = dequantize_rows(*quantize_rows(weight))
    np.testing.assert_allclose(dequantize_rows(*quantize_rows(once)), once, atol=2e-2)
    assert set(quantized("w", weight)) == {"w.codes", "w.scales"}
    assert set(quantized("w", weight[:, :40])) == {"w"}


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_values_that_no_scale_holds_are_refused(value: float) -> None:
    weight = np.zeros((2, 32), np.float32)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="not finite or too large"):
        quantize_rows(weight)


Edit = Callable[[dict[str, Any]], None]


def _set(*path: Any, value: Any) -> Edit:
    def edit(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("format", value=2), "its format is 2 and this specrun reads 1"),
        (_set("format", value=True), "its format is true"),
        (_set("method", value="oracle"), "method must be one of"),
        (_set("method", value=["eagle"]), "method must be one of"),
        (_set("name", value="../up"), "cannot name a speculator"),
        (_set("surprise", value=1), "unknown key 'surprise'"),
        (_set("config", "surprise", value=1), "unknown key 'config.surprise'"),
        (_set("config", value=None), "config must be an object"),
        (_set("report", value=[]), "report must be an object"),
        (_set("taps", value=[1, 0]), "taps must be ascending"),
        (_set("taps", value=[0, 7]), "taps is 7 and must lie between 0 and 2"),
        (_set("taps", value=[]), "must name at least one layer"),
        (_set("target", "hidden", value=10**9), "target.hidden is 1000000000"),
        (_set("target", "vocabulary", value=0), "target.vocabulary is 0"),
        (_set("target", "source_files", value={"model.gguf": "xyz"}), "is no sha256"),
        (_set("config", "intermediate", value=2**40), "config.intermediate is"),
        (_set("config", "kv_heads", value=3), "no multiple"),
        (_set("config", "head_dim", value=24), "must be a multiple of 16"),
        (_set("config", "norm_epsilon", value=0), "must lie in"),
        (_set("config", "rope_theta", value=1e-300), "must lie in"),
        (_set("config", "layout", value="eagle9"), "must be one of joined, eagle3, eagle1"),
        (_set("config", "rope_scaling", value={"kind": "yarn", "factor": 2}), "must be linear or llama3"),
        (_set("acceptance", value=[[1.5]]), "outside 0 .. 1"),
        (_set("acceptance", value=[[0.1]] * 65), "must have 1 to 64 depths of 1 to 64 ranks"),
        (_set("acceptance", value=[]), "must have 1 to 64 depths of 1 to 64 ranks"),
        (_set("acceptance", value=[[0.5], []]), "must have 1 to 64 depths of 1 to 64 ranks"),
        (_set("config", "heads", value=8), "qkv.codes is I8 [128, 128] and must be I8 [192, 128]"),
    ],
)
def test_a_description_that_cannot_be(edit: Edit, message: str, tmp_path: Path) -> None:
    write_speculator(tmp_path, tiny_speculator("eagle3"))
    data = json.loads((tmp_path / JSON_NAME).read_text())
    edit(data)
    (tmp_path / JSON_NAME).write_text(json.dumps(data))
    with pytest.raises(IntegrityError) as caught:
        read_speculator(tmp_path)
    assert message in str(caught.value)


Change = Callable[[dict[str, np.ndarray]], None]


def _tensor(name: str, array: np.ndarray | None) -> Change:
    def change(tensors: dict[str, np.ndarray]) -> None:
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_tensor("fc.scales", None), "lacks fc.scales"),
        (_tensor("final_norm", None), "lacks final_norm"),
        (_tensor("extra", np.zeros(2, np.float32)), "extra is no tensor of a eagle3 speculator"),
        (_tensor("fc", np.zeros((64, 128), np.float32)), "fc.codes is no tensor"),
        (_tensor("fc.codes", np.zeros((64, 128), np.uint8)), "fc.codes is U8"),
        (_tensor("fc.scales", np.zeros((64, 8), np.float16)), "fc.scales is F16 [64, 8] and must be F16 [64, 4]"),
        (_tensor("fc.scales", np.full((64, 4), np.nan, np.float16)), "not finite"),
        (_tensor("input_norm", np.full(64, np.inf, np.float32)), "not finite"),
        (_tensor("vocabulary", np.arange(400, dtype=np.int32)), "1 to 300 ids"),
        (_tensor("vocabulary", np.zeros((1, 2), np.int32)), "1 to 300 ids"),
        (_tensor("vocabulary", np.zeros(4, np.int64)), "vocabulary is I64"),
        (_tensor("vocabulary", np.array([3, 2], np.int32)), "ascending ids below 300"),
        (_tensor("vocabulary", np.array([3, 3], np.int32)), "ascending ids below 300"),
        (_tensor("vocabulary", np.array([-1, 3], np.int32)), "ascending ids below 300"),
        (_tensor("vocabulary", np.array([1, 300], np.int32)), "ascending ids below 300"),
    ],
)
def test_tensors_that_do_not_fit(change: Change, message: str, tmp_path: Path) -> None:
    write_speculator(tmp_path, tiny_speculator("eagle3"))
    tensors = load_file(tmp_path / TENSORS_NAME)
    change(tensors)
    save_file(tensors, tmp_path / TENSORS_NAME)
    with pytest.raises(IntegrityError) as caught:
        read_speculator(tmp_path)
    assert message in str(caught.value)


def test_files_that_are_no_speculator(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is no speculator"):
        read_speculator(tmp_path)
    write_speculator(tmp_path, tiny_speculator("medusa"))
    tensors = (tmp_path / TENSORS_NAME).read_bytes()
    for broken in (b"", b"\x80\x04pickle", tensors[:-5], (1 << 62).to_bytes(8, "little") + b"{}", tensors + b"more"):
        (tmp_path / TENSORS_NAME).write_bytes(broken)
        with pytest.raises(IntegrityError, match="no sound safetensors file"):
            read_speculator(tmp_path)
    (tmp_path / TENSORS_NAME).unlink()
    with pytest.raises(IntegrityError, match="never a pickle"):
        read_speculator(tmp_path)
    for text in (b"{", b"\xff", b"[]", b'{"format": 1, "format": 1}', b"[" * 100000):
        (tmp_path / JSON_NAME).write_bytes(text)
        with pytest.raises(IntegrityError, match="is not valid"):
            read_speculator(tmp_path)


def test_nothing_wrong_is_written(tmp_path: Path) -> None:
    speculator = tiny_speculator("draft")
    for wrong, message in (
        (dataclasses.replace(speculator, name="a/b"), "cannot name"),
        (dataclasses.replace(speculator, taps=(2,)), "must be empty"),
        (dataclasses.replace(speculator, method="medusa"), "config is not that of 'medusa'"),
        (dataclasses.replace(speculator, tensors={}), "lacks"),
        (dataclasses.replace(speculator, tensors={"x": np.zeros(2)}), "has the type float64"),
    ):
        with pytest.raises(IntegrityError, match=message):
            write_speculator(tmp_path / "out", wrong)
    assert not (tmp_path / "out").exists()
