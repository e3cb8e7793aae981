"""From a source to a bundle in the cache: what the manifest says, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specrun.export import bundle as bundle_module
from specrun.export.bundle import bundle_name, export_bundle
from specrun.export.reference import reference_logits
from specrun.export.weight_store import SPARE_POSITIONS
from specrun.export.weights import open_weights
from specrun.models_cache.errors import (
    IntegrityError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
)
from specrun.models_cache.layout import Bundle, find_bundle, load_bundle
from specrun.models_cache.manifest import FeaturesSpec

from .graph_runner import GraphRunner
from .tiny_models import CONTEXT, VOCABULARY, gguf_from_folder, save_tiny, token_ids

TEXT = token_ids(24)
SPECIAL = ["<pad>", "<s>", "<|im_end|>"]
TOKENS = [*SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "Ġt", "he"]  # bytes of ASCII, byte-level
MERGES = [("Ġ", "t"), ("h", "e")]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache root: below a folder with a space and letters of other scripts."""
    root = tmp_path / "mein Köfferchen 模型"
    monkeypatch.setenv("SPECRUN_HOME", str(root))
    return root


def add_tokenizer(folder: Path, tokens: list[str] = TOKENS) -> Path:
    """A byte-level tokenizer for ASCII text beside the weights."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def with_gguf_tokenizer(source: Path, path: Path) -> Path:
    """A copy of a GGUF file with a tokenizer in its metadata."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges([f"{left} {right}" for left, right in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A folder with weights and tokenizer."""

    def make(variant: str = "llama", name: str = "tiny", tokens: list[str] = TOKENS, **options: Any) -> Path:
        folder = tmp_path / name
        if options:
            save_tiny(variant, folder, **options)
        else:
            shutil.copytree(tiny_folder(variant), folder)
        return add_tokenizer(folder, tokens)

    return make


@pytest.fixture
def gguf_source(tiny_folder: Callable[[str], Path], tmp_path: Path) -> Callable[..., Path]:
    """A GGUF file with tokenizer."""

    def make(variant: str, type_of: Callable[[str], str] = lambda name: "F32", name: str = "Tiny.Q8_0.gguf") -> Path:
        plain = gguf_from_folder(tiny_folder(variant), tmp_path / "plain.gguf", type_of)
        return with_gguf_tokenizer(plain, tmp_path / name)

    return make


def bundle_logits(bundle: Bundle, path: Path, graph: str = "target") -> np.ndarray:
    spec = bundle.manifest.graphs[graph]
    return GraphRunner(bundle.path / spec.file, open_weights(path)).chain(TEXT, [9, 1, 5])


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", ["single", "sharded", "bfloat16"])
def test_a_safetensors_folder(kind: str, source: Callable[..., Path]) -> None:
    options: dict[str, dict[str, Any]] = {"sharded": {"shard_bytes": 60_000}, "bfloat16": {"dtype": "bfloat16"}}
    folder = source("llama", **options.get(kind, {}))
    if kind == "sharded":
        assert len(list(folder.glob("*.safetensors"))) > 2
    bundle = export_bundle(str(folder), precision="fp32", name="mine")
    manifest = bundle.manifest
    assert (manifest.name, manifest.family) == ("mine", "llama")
    assert manifest.precision == dict.fromkeys(("requested", "attention", "mlp", "head", "embedding"), "fp32")
    assert manifest.fidelity is not None
    assert manifest.fidelity.logit_rmse < 1e-3
    assert manifest.fidelity.argmax_agreement == 1
    assert manifest.fidelity.positions == CONTEXT
    assert manifest.widths_validated[:16] == tuple(range(1, 17))
    assert manifest.source.kind == "path"
    weights = {path.name for path in folder.glob("*.safetensors")}
    assert weights | {"config.json", "tokenizer.json"} <= set(manifest.source.files)
    assert all(digest(folder / name) == found for name, found in manifest.source.files.items())
    expected = reference_logits(open_weights(folder), TEXT)
    assert set(manifest.graphs) == {"target", "target_batch1", "target_shared"}
    for graph in ("target", "target_batch1"):
        np.testing.assert_allclose(bundle_logits(bundle, folder, graph), expected, rtol=1e-4, atol=1e-4)


def test_the_manifest(source: Callable[..., Path]) -> None:
    bundle = export_bundle(str(source("qwen2")))
    manifest = bundle.manifest
    assert bundle.path.name == manifest.name == "tiny"
    assert manifest == load_bundle(bundle.path).manifest == find_bundle("tiny").manifest
    assert manifest.precision == {
        "requested": "int8",
        **dict.fromkeys(("attention", "mlp", "head", "embedding"), "int8"),
    }
    sizes, ids = manifest.sizes, manifest.special_ids
    assert (sizes.vocabulary, sizes.tokens, sizes.context, sizes.layers) == (VOCABULARY, len(TOKENS), CONTEXT, 2)
    assert (sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate) == (64, 2, 1, 32, 96)
    assert (ids.bos, ids.eos, ids.pad, ids.add_bos) == (1, (2,), 0, False)
    assert (manifest.kv.dtype, manifest.kv.positions) == ("float32", CONTEXT + SPARE_POSITIONS)
    assert (manifest.kv.window, manifest.features) == (None, FeaturesSpec((0, 1, 2)))
    target, single = manifest.graphs["target"], manifest.graphs["target_batch1"]
    assert (target.file, target.requires, target.max_batch) == ("target.onnx", ("query_seqlens",), None)
    assert (single.file, single.requires, single.max_batch) == ("target_batch1.onnx", (), 1)
    assert target.data == single.data == ("target.onnx.data",)
    assert (target.inputs, target.outputs) == (single.inputs, single.outputs)
    inputs = {spec.name: (spec.dtype, spec.shape) for spec in target.inputs}
    cache = ("float32", ("batch", 1, "capacity", 32))
    assert inputs == {
        "input_ids": ("int64", ("batch", "positions")),
        "query_lengths": ("int32", ("batch",)),
        "pad_rows": ("float32", ("batch", "pad", 128)),
        "total_lengths_minus_one": ("int32", ("batch",)),
        "max_total_length": ("int32", (1,)),
        "position_ids": ("int64", ("batch", "padded_positions")),
        "attention_bias": ("float32", ("bias_batch", 1, "padded_positions", "max_total")),
        "logit_rows": ("int64", ("batch", "rows")),
        **{f"past_{part}.{layer}": cache for layer in (0, 1) for part in ("key", "value")},
    }
    assert [(spec.name, spec.dtype, spec.shape) for spec in target.outputs] == [
        ("logits", "float32", ("batch", "rows", VOCABULARY)),
        ("features", "float32", ("batch", "positions", 3 * 64)),
        *((f"present_{part}.{layer}", *cache) for layer in (0, 1) for part in ("key", "value")),
    ]
    shared = manifest.graphs["target_shared"]
    assert (shared.file, shared.data) == ("target_shared.onnx", target.data)
    assert (shared.requires, shared.max_batch, shared.outputs) == (("query_seqlens",), None, target.outputs)
    prefix = ("float32", (1, 1, "prefix", 32))
    del inputs["attention_bias"]
    assert {spec.name: (spec.dtype, spec.shape) for spec in shared.inputs} == inputs | {
        "prefix_queries": ("int64", (4,)),
        "bias_pads": ("int64", (8,)),
        **{f"prefix_{part}.{layer}": prefix for layer in (0, 1) for part in ("key", "value")},
    }
    files = {path.name for path in bundle.path.iterdir()} - {"manifest.json"}
    assert files == set(manifest.files)
    assert files == {
        *("target.onnx", "target_batch1.onnx", "target_shared.onnx", "target.onnx.data"),
        *("tokenizer.json", "chat_template.jinja", "generation.json"),
    }
    assert json.loads((bundle.path / "generation.json").read_text()) == {"eos_token_id": [2], "bos_token_id": 1}
    assert (bundle.path / "chat_template.jinja").read_text() == TEMPLATE


def test_nothing_names_a_place_on_this_machine(source: Callable[..., Path], tmp_path: Path) -> None:
    bundle = export_bundle(str(source()))
    for path in bundle.path.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path.name


# llama.cpp#11345: no output.weight; the head is the embedding
@pytest.mark.parametrize("precision", ["fp32", "int8", "source"])
def test_a_gguf_file(precision: str, gguf_source: Callable[..., Path]) -> None:
    path = gguf_source("llama-tied", lambda name: "Q8_0")
    bundle = export_bundle(str(path), precision=precision)
    manifest = bundle.manifest
    assert manifest.name == ("tiny.q8_0" if precision == "int8" else f"tiny.q8_0-{precision}")
    stored = {"fp32": "fp32", "int8": "int8", "source": "Q8_0"}[precision]
    assert manifest.precision == {
        "requested": precision,
        **dict.fromkeys(("attention", "mlp", "head", "embedding"), stored),
    }
    assert manifest.source.files == {path.name: digest(path)}
    assert manifest.source.licence == "apache-2.0"
    assert manifest.special_ids.eos == (2,)
    assert (manifest.sizes.tokens, manifest.sizes.vocabulary) == (len(TOKENS), VOCABULARY)
    expected = reference_logits(open_weights(path), TEXT)
    found = bundle_logits(bundle, path)
    error = np.sqrt(np.mean((found - expected) ** 2)) / np.std(expected)
    assert error < (1e-5 if precision == "fp32" else 0.06)
    assert manifest.fidelity is not None
    assert manifest.fidelity.logit_rmse < (1e-3 if precision == "fp32" else 1)


def test_a_mixed_gguf_file_names_its_types(gguf_source: Callable[..., Path]) -> None:
    types = {"attn_v": "Q6_K", "ffn_down": "Q5_1", "output": "Q6_K", "token_embd": "F16"}
    path = gguf_source("llama-wide", lambda name: types.get(name.split(".")[-2], "Q4_K"))
    manifest = export_bundle(str(path), precision="source").manifest
    assert manifest.precision == {
        "requested": "source",
        "attention": "Q4_K+Q6_K",
        "mlp": "Q4_K+Q5_1",
        "head": "Q6_K",
        "embedding": "fp32",
    }


def test_blocks_and_names(source: Callable[..., Path]) -> None:
    folder = source("llama-wide")
    wide = export_bundle(str(folder), block=128, name="wide")
    narrow = export_bundle(str(folder), block=16, name="narrow")
    data = [bundle.manifest.files["target.onnx.data"].size for bundle in (wide, narrow)]
    assert data[0] < data[1]
    assert export_bundle(str(folder), precision="int4").manifest.name == "tiny-int4"
    assert bundle_name("Org/Some-Model/") == "some-model"
    assert bundle_name(r"C:\models\Big.Q4_K_M.GGUF") == "big.q4_k_m"


def test_options_are_checked_before_anything_is_fetched(home: Path) -> None:
    for options, message in (
        ({"precision": "int2"}, "Unknown precision 'int2'"),
        ({"block": 48}, "Block size 48 does not go with precision 'int8'"),
        ({"precision": "fp32", "block": 32}, "Block size 32 does not go with precision 'fp32'"),
        ({"precision": "source", "block": 32}, "Block size 32 does not go with precision 'source'"),
    ):
        with pytest.raises(UsageError, match=message):
            export_bundle("no such model", **options)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFoundError):
        export_bundle("no such model", name="x")
    assert not home.exists() or not list(home.glob("models/*"))


def refuses(home: Path, error: type[Exception], match: str, source: Path, **options: Any) -> None:
    """The export fails, and leaves neither a bundle nor a staging folder."""
    with pytest.raises(error, match=match):
        export_bundle(str(source), **options)
    assert list(home.glob("models/*")) == []
    assert list(home.glob("staging/*")) == []


def test_source_precision_needs_a_gguf_file(home: Path, source: Callable[..., Path]) -> None:
    refuses(home, UsageError, "keeps the blocks of a GGUF file: take int8, int4 or fp32", source(), precision="source")


def test_a_tokenizer_of_another_model(home: Path, source: Callable[..., Path]) -> None:
    folder = source(tokens=[*TOKENS, *(f"<extra {index}>" for index in range(80))])
    refuses(home, UsageError, f"The tokenizer has {len(TOKENS) + 80} tokens and the model only 160", folder)


def test_an_unknown_family(home: Path, source: Callable[..., Path]) -> None:
    folder = source()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    refuses(home, UnsupportedModelError, "'MambaForCausalLM' is not one that specrun builds graphs for", folder)


def test_a_missing_shard(home: Path, source: Callable[..., Path]) -> None:
    folder = source(shard_bytes=60_000)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    refuses(home, IntegrityError, shard.name, folder)


@pytest.mark.parametrize("step", ["store_weights", "build_target", "_write_tokenizer", "measure_fidelity"])
def test_a_failure_in_the_middle_leaves_nothing(
    step: str, home: Path, source: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = source()
    real = getattr(bundle_module, step)

    def fail(*args: Any, **options: Any) -> None:
        real(*args, **options)
        raise UnsupportedModelError("half way")

    with monkeypatch.context() as patch:
        patch.setattr(bundle_module, step, fail)
        refuses(home, UnsupportedModelError, "half way", folder)
    assert export_bundle(str(folder)).manifest.name == "tiny"


def test_an_existing_bundle_is_returned_as_it_is(source: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source()
    first = export_bundle(str(folder))
    with monkeypatch.context() as patch:
        patch.setattr(bundle_module, "fetch_source", None)  # not even the source is looked at
        assert export_bundle(str(folder)) == first
    shutil.rmtree(folder)
    assert export_bundle(str(folder), precision="int8").digest == first.digest


@pytest.mark.parametrize("options", [{"precision": "fp32"}, {"block": 64}])
def test_an_existing_bundle_made_otherwise_is_not_passed_off(
    source: Callable[..., Path], options: dict[str, Any]
) -> None:
    folder = source()
    export_bundle(str(folder), name="kept")
    with pytest.raises(UsageError, match=r"made from tiny as int8.*--force"):
        export_bundle(str(folder), name="kept", **options)


def test_an_existing_bundle_of_another_source_is_not_passed_off(source: Callable[..., Path]) -> None:
    folder = source()
    export_bundle(str(folder), name="kept")
    other = folder.rename(folder.with_name("other"))
    with pytest.raises(UsageError, match="made from tiny"):
        export_bundle(str(other), name="kept")
    assert export_bundle(str(other)).manifest.name == "other"


def test_force_builds_anew_and_a_failed_one_keeps_the_old(source: Callable[..., Path]) -> None:
    folder = source()
    first = export_bundle(str(folder), name="kept")
    again = export_bundle(str(folder), name="kept", precision="int4", force=True)
    assert again.digest != first.digest
    assert find_bundle("kept").manifest.precision["requested"] == "int4"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json"):
        export_bundle(str(folder), name="kept", force=True)
    assert find_bundle("kept").digest == again.digest


def test_the_same_source_gives_the_same_files(source: Callable[..., Path]) -> None:
    folder = source("qwen3")
    left, right = (export_bundle(str(folder), precision="int4", name=name).manifest for name in ("left", "right"))
    assert left.files == right.files
    assert left.fidelity == right.fidelity


def test_an_output_folder(home: Path, source: Callable[..., Path], tmp_path: Path) -> None:
    folder, output = source(), tmp_path / "Ausgabe außerhalb"
    bundle = export_bundle(str(folder), output=output)
    assert bundle.path == output
    assert find_bundle(output).digest == bundle.digest
    assert list(home.glob("models/*")) == []
    with pytest.raises(UsageError, match="--force"):
        export_bundle(str(folder), output=output)
    assert export_bundle(str(folder), output=output, precision="fp32", force=True).manifest.name == "tiny-fp32"


def test_progress_is_reported(source: Callable[..., Path]) -> None:
    seen: list[tuple[str, int, int | None]] = []
    export_bundle(str(source()), progress=lambda stage, done, total: seen.append((stage, done, total)))
    assert ("Writing layers", 2, 2) in seen
    assert ("Measuring fidelity", 1, 1) in seen
