from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from specrun.export.gguf_blocks import BLOCK_TYPES
from specrun.export.reference import reference_logits
from specrun.export.rotary import rotary_tables
from specrun.export.weights import Weights, open_weights
from specrun.export.weights_gguf import GGUFWeights, read_gguf
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

from .tiny_models import gguf_from_folder, save_tiny, token_ids

TEXT = token_ids()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("tiny")

    def make(variant: str) -> Path:
        folder = root / variant
        return folder if folder.exists() else save_tiny(variant, folder)

    return make


@pytest.fixture
def llama(folder_of: Callable[[str], Path], tmp_path: Path) -> Path:
    return gguf_from_folder(folder_of("llama-tied"), tmp_path / "llama.gguf")


def same_logits(left: Weights, right: Weights) -> None:
    np.testing.assert_allclose(reference_logits(left, TEXT), reference_logits(right, TEXT), rtol=1e-5, atol=1e-5)


# tensai#37, llama.cpp#2376: 8 heads with 2 KV heads; #11345: tied embeddings; qwen2 biases; smollm3's unrotated layers
@pytest.mark.parametrize("variant", ["llama-heads", "llama-tied", "llama-linear", "qwen2", "qwen3", "smollm3"])
def test_logits_equal_those_of_the_safetensors(variant: str, folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of(variant)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0} if variant == "llama-linear" else {}
    weights = open_weights(gguf_from_folder(folder, tmp_path / "tiny.gguf", metadata=linear))
    source = open_weights(folder)
    assert weights.names() == source.names()
    for name in source.names():
        np.testing.assert_array_equal(weights.tensor(name), source.tensor(name))
        assert weights.blocks(name) is None
    same_logits(weights, source)


def test_mistral_window(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_from_folder(folder_of("mistral"), tmp_path / "m.gguf", metadata={"attention.sliding_window": 8})
    same_logits(open_weights(path), open_weights(folder_of("mistral")))


def test_rope_factors_stand_for_llama3_scaling(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    source = open_weights(folder_of("llama-rope3"))
    scaled, _ = np.meshgrid(source.config.rope.theta ** -(np.arange(0, 32, 2) / 32), [0])
    cos, sin = rotary_tables(source.config, 2)
    factors = (scaled[0] / np.arctan2(sin[1], cos[1])).astype(np.float32)
    path = gguf_from_folder(folder_of("llama-rope3"), tmp_path / "r.gguf", tensors={"rope_freqs.weight": factors})
    weights = open_weights(path)
    assert weights.names() - source.names() == {"rope_freqs.weight"}
    np.testing.assert_allclose(reference_logits(weights, TEXT), reference_logits(source, TEXT), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("type_name", ["F16", "BF16", *sorted(BLOCK_TYPES)])
def test_every_type_is_dequantised_and_unpermuted(
    type_name: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_from_folder(folder_of("llama-wide"), tmp_path / "wide.gguf", lambda name: type_name)
    weights = open_weights(path)
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name not in ("blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.1.ffn_down.weight"):
            continue
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[2]
        if part in ("attn_q", "attn_k"):
            heads = 8 if part == "attn_q" else 2
            expected = expected.reshape(heads, 16, 2, 256).swapaxes(1, 2).reshape(-1, 256)
        name = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "ffn_down": "mlp.down_proj"}[part]
        found = weights.tensor(f"model.layers.1.{name}.weight")
        np.testing.assert_array_equal(found, expected)
        blocks = weights.blocks(f"model.layers.1.{name}.weight")
        if type_name in ("F16", "BF16"):
            assert blocks is None
            continue
        assert blocks is not None
        centred = (blocks.codes.astype(np.float32) - 2 ** (blocks.bits - 1)).reshape(len(found), -1, blocks.block)
        values = centred * blocks.scales[:, :, None]
        if blocks.offsets is not None:
            values += blocks.offsets[:, :, None]
        np.testing.assert_allclose(values.reshape(found.shape), found, rtol=1e-6, atol=1e-6 * np.abs(found).max())


def test_header_and_files(llama: Path) -> None:
    weights = open_weights(llama)
    assert isinstance(weights, GGUFWeights)
    assert weights.files == {"llama.gguf": llama}
    assert (weights.config.name, weights.config.licence, weights.config.family.name) == ("tiny", "apache-2.0", "llama")
    reader = gguf.GGUFReader(llama)
    assert {key: weights.header.metadata[key] for key in weights.header.metadata} == {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")
    }
    assert open_weights(llama.parent).files == weights.files  # a folder that holds one GGUF file


def test_arrays_and_scalars_of_every_kind(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "meta.gguf", "llama")
    values = {"text": "größe", "yes": True, "real": 0.5, "texts": ["a", "模型"], "numbers": [1, 2], "reals": [0.5, 2.0]}
    writer.add_string("text", "größe")
    writer.add_bool("yes", True)
    writer.add_float32("real", 0.5)
    for key in ("texts", "numbers", "reals"):
        writer.add_array(key, values[key])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "meta.gguf").metadata
    assert metadata == {"general.architecture": "llama", "flags": [True, False]} | values


# llama.cpp#6885
@pytest.mark.parametrize("keep", ["half", "99 %", "all but one byte"])
def test_truncated_file_names_the_tensor(keep: str, llama: Path) -> None:
    data = llama.read_bytes()
    # The writer pads the end; the last byte that counts is the last tensor's.
    end = max(tensor.offset + tensor.size for tensor in read_gguf(llama).tensors.values())
    llama.write_bytes(data[: {"half": end // 2, "99 %": end * 99 // 100, "all but one byte": end - 1}[keep]])
    with pytest.raises(IntegrityError, match=r"llama\.gguf is truncated: (blk\.\d+\.\w+|\w+)\.weight ends at byte"):
        open_weights(llama)


def test_every_cut_of_the_header_is_an_integrity_error(llama: Path) -> None:
    data = llama.read_bytes()
    start = min(tensor.offset for tensor in read_gguf(llama).tensors.values())
    for size in range(0, start, 7):
        llama.write_bytes(data[:size])
        with pytest.raises(IntegrityError):
            open_weights(llama)


def test_random_damage_to_the_header_is_one_of_our_errors(llama: Path) -> None:
    # Lengths and counts become huge, texts become invalid: nothing may be allocated or raised beyond our own errors.
    data = bytearray(llama.read_bytes())
    start = min(tensor.offset for tensor in read_gguf(llama).tensors.values())
    rng = np.random.default_rng(11)
    for place in rng.integers(0, start, 300):
        broken = bytearray(data)
        broken[place] ^= int(rng.integers(1, 256))
        llama.write_bytes(broken)
        try:
            open_weights(llama)
        except (IntegrityError, UnsupportedModelError):
            continue


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", IntegrityError, "does not begin"),
        (b"GGUF", IntegrityError, "ends inside its header"),
        (b"GGML" + bytes(40), IntegrityError, "does not begin as a GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\n", IntegrityError, "Git-LFS pointer"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), UnsupportedModelError, "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), UnsupportedModelError, "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), IntegrityError, "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), IntegrityError, "truncated"),
    ],
)
def test_files_that_are_no_model(data: bytes, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(error, match=message):
        open_weights(tmp_path / "x.gguf")


def test_unknown_tensors_and_types_are_named(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    path = gguf_from_folder(folder_of("llama-tied"), tmp_path / "a.gguf", tensors=extra)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn_sinks\.weight"):
        open_weights(path)
    path = gguf_from_folder(
        folder_of("llama-tied"), tmp_path / "b.gguf", tensors={"output.weight": np.ones(4, np.float64)}
    )
    with pytest.raises(UnsupportedModelError, match=r"output\.weight is stored as F64"):
        open_weights(path)
    path = gguf_from_folder(folder_of("llama-tied"), tmp_path / "c.gguf", metadata={"block_count": 3})
    with pytest.raises(IntegrityError, match=r"lacks model\.layers\.2\.input_layernorm\.weight"):
        open_weights(path)
    path = gguf_from_folder(folder_of("llama-tied"), tmp_path / "d.gguf", metadata={"rope.dimension_count": 8})
    with pytest.raises(UnsupportedModelError, match="dimension_count"):
        open_weights(path)


def test_scales_that_are_not_finite_are_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_from_folder(folder_of("llama-tied"), tmp_path / "nan.gguf", lambda name: "Q8_0")
    tensor = read_gguf(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[tensor.offset : tensor.offset + 2] = b"\x00\x7e"  # a float16 NaN
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"blk\.1\.ffn_up\.weight has a scale"):
        open_weights(path).blocks("model.layers.1.mlp.up_proj.weight")


def test_tied_head_of_a_quantised_file(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_from_folder(folder_of("llama-tied"), tmp_path / "tied.gguf", lambda name: "Q8_0")
    weights = open_weights(path)
    assert weights.config.tied_head
    assert "lm_head.weight" not in weights.names()
    exact = reference_logits(open_weights(folder_of("llama-tied")), TEXT)
    drift = np.sqrt(np.mean(np.square(reference_logits(weights, TEXT) - exact)))
    assert drift < 0.05 * exact.std()


def test_unknown_name(llama: Path) -> None:
    with pytest.raises(KeyError):
        open_weights(llama).tensor("blk.0.attn_q.weight")
