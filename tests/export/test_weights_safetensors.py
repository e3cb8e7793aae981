from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specrun.export.weights import open_weights
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError, SourceError, UnsupportedModelError

from .tiny_models import save_tiny

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_tiny("llama-tied", tmp_path / "llama")


def rewrite(folder: Path, **changes: Any) -> None:
    """Replace, add (name with "__" for ".") or, with None, drop tensors."""
    tensors = load_file(folder / FILE) | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / FILE)


def edit_header(path: Path, change: Any) -> None:
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_tensors_are_those_of_the_file(llama: Path) -> None:
    weights = open_weights(llama)
    saved = load_file(llama / FILE)
    assert weights.names() == frozenset(saved)
    for name, values in saved.items():
        found = weights.tensor(name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, values)
        assert weights.blocks(name) is None
    assert weights.files == {"config.json": llama / "config.json", FILE: llama / FILE}
    assert open_weights(llama / FILE).names() == weights.names()


def test_bfloat16(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    folder = save_tiny("llama-tied", tmp_path / "bf16", dtype="bfloat16")
    weights = open_weights(folder)
    for name, values in load_torch(folder / FILE).items():
        assert values.dtype == torch.bfloat16
        np.testing.assert_array_equal(weights.tensor(name), values.float().numpy())


def test_shards(tmp_path: Path) -> None:
    whole = open_weights(save_tiny("llama", tmp_path / "whole"))
    folder = save_tiny("llama", tmp_path / "shards", shard_bytes=100_000)
    weights = open_weights(folder)
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert set(weights.files) == {"config.json", INDEX, *shards}
    for name in whole.names():
        np.testing.assert_array_equal(weights.tensor(name), whole.tensor(name))

    held = (folder / shards[1]).read_bytes()
    (folder / shards[1]).unlink()
    with pytest.raises(IntegrityError, match=f"lacks the shard {shards[1]}"):
        open_weights(folder)
    (folder / shards[1]).write_bytes((folder / shards[0]).read_bytes())
    with pytest.raises(IntegrityError, match=f"is in both {shards[0]} and {shards[1]}"):
        open_weights(folder)
    (folder / shards[1]).write_bytes(held)

    index = json.loads((folder / INDEX).read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match="outside its folder"):
        open_weights(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(IntegrityError, match="no weight_map"):
        open_weights(folder)


def test_tied_head_may_be_stored_twice_but_not_differ(llama: Path) -> None:
    embedding = load_file(llama / FILE)["model.embed_tokens.weight"]
    rewrite(llama, lm_head__weight=embedding)
    assert "lm_head.weight" not in open_weights(llama).names()
    rewrite(llama, lm_head__weight=embedding + 1)
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight differs"):
        open_weights(llama)


def test_frequency_buffers_are_tolerated_and_nothing_else(llama: Path) -> None:
    rewrite(llama, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(8, np.float32))
    assert not any("inv_freq" in name for name in open_weights(llama).names())
    rewrite(llama, model__layers__0__self_attn__q_norm__weight=np.ones(16, np.float32))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.self_attn\.q_norm\.weight"):
        open_weights(llama)


def test_missing_tensor_is_named(llama: Path) -> None:
    rewrite(llama, model__norm__weight=None)
    with pytest.raises(IntegrityError, match=r"lacks model\.norm\.weight"):
        open_weights(llama)


def test_other_types_are_refused_by_name(llama: Path) -> None:
    rewrite(llama, model__norm__weight=np.ones(64, np.float64))
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight is stored as F64"):
        open_weights(llama)


@pytest.mark.parametrize("keep", [0.5, 0.99, -1])
def test_truncated_file_names_the_tensor(keep: float, llama: Path) -> None:
    data = (llama / FILE).read_bytes()
    (llama / FILE).write_bytes(data[: int(len(data) * keep) if keep > 0 else -1])
    with pytest.raises(IntegrityError, match=r"truncated: (model|lm_head)\."):
        open_weights(llama)


@pytest.mark.parametrize("data", [b"", b"\x01", struct.pack("<Q", 2**60) + b"{}", struct.pack("<Q", 2) + b"[]"])
def test_broken_header(data: bytes, llama: Path) -> None:
    (llama / FILE).write_bytes(data)
    with pytest.raises(IntegrityError, match="header"):
        open_weights(llama)


def test_header_that_lies_about_sizes(llama: Path) -> None:
    def shape(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["shape"] = [2**40]

    edit_header(llama / FILE, shape)
    with pytest.raises(IntegrityError, match=r"gives model\.norm\.weight 256 bytes"):
        open_weights(llama)

    def negative(header: dict[str, Any]) -> None:
        header["model.norm.weight"]["data_offsets"] = [-4, 252]

    edit_header(llama / FILE, negative)
    with pytest.raises(IntegrityError, match=r"describes model\.norm\.weight wrongly"):
        open_weights(llama)


@pytest.mark.parametrize("dtype", [["F32"], {}, 32, None])
def test_header_with_types_that_are_no_names(dtype: object, llama: Path) -> None:
    edit_header(llama / FILE, lambda header: header["model.norm.weight"].update(dtype=dtype))
    with pytest.raises(IntegrityError, match=r"describes model\.norm\.weight wrongly"):
        open_weights(llama)


def test_lfs_pointer(llama: Path) -> None:
    (llama / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(IntegrityError, match="Git-LFS pointer"):
        open_weights(llama)


def test_folders_without_weights(llama: Path, tmp_path: Path) -> None:
    (llama / FILE).unlink()
    with pytest.raises(IntegrityError, match=r"no \*\.safetensors"):
        open_weights(llama)
    (llama / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(IntegrityError, match="pickle"):
        open_weights(llama)
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        open_weights(tmp_path / "nowhere")


def test_path_with_spaces_and_other_scripts(tmp_path: Path) -> None:
    folder = save_tiny("llama-tied", tmp_path / "my models" / "größe 模型")
    assert open_weights(folder).config.name == "größe 模型"


def test_what_cannot_be_read_is_a_source_error(llama: Path) -> None:
    (llama / "config.json").unlink()
    (llama / "config.json").mkdir()
    with pytest.raises(SourceError, match="cannot be read"):
        open_weights(llama)


def test_file_that_shrinks_while_open(llama: Path) -> None:
    weights = open_weights(llama)
    (llama / FILE).write_bytes(b"")
    with pytest.raises(IntegrityError, match="changed while it was being read"):
        weights.tensor("model.norm.weight")


def test_other_safetensors_beside_the_model_are_ignored(llama: Path) -> None:
    save_file({"lora.weight": np.ones(2, np.float32)}, llama / "adapter_model.safetensors")
    assert FILE in open_weights(llama).files
    assert "lora.weight" not in open_weights(llama).names()
