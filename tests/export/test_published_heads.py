"""Published heads become speculators that compute what their own code computes; what is no such thing is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from specrun.export import heads_source
from specrun.export.bundle import export_bundle
from specrun.export.heads_source import convert_command, find_heads
from specrun.export.quantize import BlockMatrix, dequantize_matrix
from specrun.export.speculator_weights import read_speculator, write_speculator
from specrun.export.target_ends import TargetEnds, read_target_ends
from specrun.models_cache import (
    Bundle,
    IntegrityError,
    ModelNotFoundError,
    SourceError,
    UnsupportedModelError,
    UsageError,
    find_bundle,
    find_speculator,
)
from specrun.runtime import Engine

from ..conftest import write_tiny_source
from .graph_runner import open_session
from .published_files import EAGLE_CONFIG, HIDDEN, VOCABULARY, Eagle1, Eagle3, medusa, save_heads, to_torch
from .speculator_reference import EagleRunner, plain_choice
from .test_speculator_graph import TOKENS, close_in_8_bits
from .tiny_speculators import tiny_speculator

MEDUSA_CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "org/tiny"}


@pytest.fixture(scope="module")
def deep_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with enough layers for the three taps of EAGLE-3: 2, 4 and 5."""
    return write_tiny_source(tmp_path_factory.mktemp("sources") / "deep", layers=8)


@pytest.fixture(scope="module")
def deep_cache(deep_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with the bundle `deep`; copy it, do not change it."""
    root = tmp_path_factory.mktemp("deep cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRUN_HOME", str(root))
        export_bundle(str(deep_source), precision="fp32", name="deep")
    return root


@pytest.fixture
def bundle(deep_cache: Path, isolated_home: Path) -> Bundle:
    shutil.copytree(deep_cache, isolated_home)
    return find_bundle("deep")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def embedding_of(ends: TargetEnds) -> np.ndarray:
    return dequantize_matrix(ends.embedding)


@torch.no_grad()
def test_eagle3(bundle: Bundle, tmp_path: Path) -> None:
    model = Eagle3(bias=True)
    save_heads(model, tmp_path / "My Heads", EAGLE_CONFIG | {"draft_vocab_size": 90})
    heads = find_heads(str(tmp_path / "My Heads"))
    assert heads is not None
    made = heads.attach(bundle)
    assert (made.name, made.manifest.layout, made.manifest.taps) == ("my heads", "eagle3", (2, 4, 5))
    np.testing.assert_array_equal(made.vocabulary(), (model.d2t + torch.arange(90)).numpy())
    features = np.random.default_rng(0).standard_normal((8, 3 * HIDDEN)).astype(np.float32)
    embedded = embedding_of(read_target_ends(bundle))[TOKENS]
    logits, hidden = model(to_torch(embedded), to_torch(features))
    found = EagleRunner(made.graph_path(), read_speculator(made.path)).run(features, None, TOKENS)
    close_in_8_bits(found["logits"], logits.numpy())
    close_in_8_bits(found["hidden"], hidden.numpy())


@torch.no_grad()
def test_eagle3_rows_in_any_order(bundle: Bundle, tmp_path: Path) -> None:
    model = Eagle3()
    order = torch.randperm(90)
    ids = (model.d2t + torch.arange(90))[order]
    shuffled = {"d2t": ids - torch.arange(90), "lm_head__weight": model.lm_head.weight[order].contiguous()}
    for name, extra in (("sorted", {}), ("shuffled", shuffled)):
        save_heads(model, tmp_path / name, EAGLE_CONFIG, **extra)
    made = [find_heads(str(tmp_path / name)).attach(bundle) for name in ("sorted", "shuffled")]
    assert len({m.manifest.files["speculator.onnx.data"].sha256 for m in made}) == 1
    assert len({m.manifest.files["vocabulary.i32"].sha256 for m in made}) == 1


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_eagle1(bias: bool, bundle: Bundle, tmp_path: Path) -> None:
    model = Eagle1(bias)
    ends = read_target_ends(bundle)
    table = to_torch(embedding_of(ends))
    save_heads(model, tmp_path / "heads", EAGLE_CONFIG | {"bias": bias}, embed_tokens__weight=table)
    made = find_heads(str(tmp_path / "heads")).attach(bundle, "eagle")
    assert (made.name, made.manifest.layout, made.manifest.taps) == ("eagle", "eagle1", (8,))
    assert "embedding.codes" not in read_speculator(made.path).tensors  # it is the target's
    assert made.vocabulary() is None
    streams = np.random.default_rng(0).standard_normal((8, HIDDEN)).astype(np.float32) * 3
    scale = np.sqrt(np.square(streams).mean(-1, keepdims=True) + ends.norm_epsilon)
    hidden = model(table[TOKENS], to_torch(streams / scale * ends.final_norm))
    found = EagleRunner(made.graph_path(), read_speculator(made.path)).run(streams, None, TOKENS)
    close_in_8_bits(found["hidden"], hidden.numpy())
    close_in_8_bits(found["logits"], hidden.numpy() @ dequantize_matrix(ends.head).T)


@torch.no_grad()
def test_heads_with_ends_of_their_own(bundle: Bundle, tmp_path: Path) -> None:
    model = Eagle1()
    table, head = torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY + 4, HIDDEN)  # padded otherwise
    extra = {"model__embed_tokens__weight": table, "lm_head__weight": head}
    made = find_heads(str(save_heads(model, tmp_path / "heads", EAGLE_CONFIG, **extra))).attach(bundle)
    speculator = read_speculator(made.path)
    np.testing.assert_allclose(speculator.tensor("embedding"), table.numpy(), atol=0.02)
    np.testing.assert_allclose(speculator.tensor("head"), head[:VOCABULARY].numpy(), atol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusa(own: bool, prefix: str, bundle: Bundle, tmp_path: Path) -> None:
    model = medusa(own=own)
    folder = save_heads(model, tmp_path / "medusa-tiny", MEDUSA_CONFIG)
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.safetensors")
    tensors = load_file(folder / "medusa_lm_head.safetensors")
    save_file({prefix + name: t.half() for name, t in tensors.items()}, folder / "medusa_lm_head.safetensors")
    made = find_heads(str(folder)).attach(bundle)
    assert (made.name, made.manifest.sizes.depth) == ("medusa-tiny", 3)
    ends = read_target_ends(bundle)
    stream = np.random.default_rng(0).standard_normal((1, HIDDEN)).astype(np.float32) * 3
    normed = stream / np.sqrt(np.square(stream).mean() + ends.norm_epsilon) * ends.final_norm
    expected = torch.cat([head(to_torch(normed)) for head in model]).numpy()
    if not own:
        expected = expected @ dequantize_matrix(ends.head).T
    (logits,) = open_session(made.graph_path()).run(["logits"], {"features": stream, **plain_choice(VOCABULARY)})
    close_in_8_bits(logits, expected)
    # Fewer heads than there are.
    (folder / "config.json").write_text(json.dumps(MEDUSA_CONFIG | {"medusa_num_heads": 2}))
    assert find_heads(str(folder)).attach(bundle, "two").manifest.sizes.depth == 2


def changed(model: nn.Module, folder: Path, config: dict[str, Any], **tensors: torch.Tensor | None) -> Path:
    save_heads(model, folder, config)
    found = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        found.pop(name.replace("__", "."), None)
        if tensor is not None:
            found[name.replace("__", ".")] = tensor
    save_file(found, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "error", "message"),
    [
        ({"hidden_size": 128}, {}, UsageError, "hidden size 128, and 64 here"),
        ({"target_hidden_size": 128}, {}, UsageError, "for another model"),
        ({"num_hidden_layers": 2}, {}, UnsupportedModelError, "has 2 layers"),
        ({"hidden_act": "gelu"}, {}, UnsupportedModelError, "'gelu' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, {}, UnsupportedModelError, "'yarn' is not supported"),
        ({"num_attention_heads": "4"}, {}, UnsupportedModelError, "num_attention_heads"),
        ({"num_attention_heads": 8, "head_dim": 8}, {}, IntegrityError, "multiple of 16"),
        ({"intermediate_size": 97}, {}, IntegrityError, "gate_up.codes is I8"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}, {}, UnsupportedModelError, "[0, 1, 2]"),
        ({}, {"norm__weight": None}, IntegrityError, "lack norm.weight"),
        ({}, {"surprise": torch.zeros(2)}, UnsupportedModelError, "have surprise"),
        ({}, {"fc__bias": torch.zeros(HIDDEN)}, UnsupportedModelError, "have fc.bias"),
        ({}, {"fc__weight": torch.zeros(HIDDEN, 64)}, IntegrityError, "fc.codes is I8 [64, 64]"),
        ({}, {"fc__weight": torch.zeros(8, dtype=torch.int8)}, UnsupportedModelError, "stored as I8"),
        ({}, {"fc__weight": torch.zeros(8)}, IntegrityError, "shapes of one projection"),
        ({}, {"d2t": torch.zeros(90, dtype=torch.int64) - 1}, IntegrityError, "different tokens below 300"),
        ({}, {"d2t": -torch.arange(90)}, IntegrityError, "different tokens below 300"),
        ({}, {"d2t": torch.zeros(80, dtype=torch.int64)}, IntegrityError, "90 rows and d2t 80"),
        ({}, {"d2t": torch.zeros(90)}, UnsupportedModelError, "stored as F32"),
        ({}, {"lm_head__weight": torch.zeros(90)}, IntegrityError, "lm_head.weight has the shape [90]"),
        ({}, {"d2t": None, "lm_head__weight": torch.zeros(300)}, IntegrityError, "must be a matrix"),
        ({}, {"lm_head__weight": torch.full((90, 64), 3e38)}, IntegrityError, "head cannot be stored"),
        ({}, {"embed_tokens__weight": torch.zeros(())}, IntegrityError, "embed_tokens.weight has the shape []"),
        ({"rope_theta": 1e-300}, {}, IntegrityError, "rope_theta in [1, 1e12)"),
        ({}, {"midlayer__mlp__down_proj__weight": torch.full((64, 96), torch.nan)}, IntegrityError, "not finite"),
        ({}, {"midlayer__mlp__down_proj__weight": torch.full((64, 96), 1e9)}, IntegrityError, "too large"),
    ],
)
def test_heads_that_do_not_fit(
    config: dict[str, Any],
    tensors: dict[str, Any],
    error: type[Exception],
    message: str,
    bundle: Bundle,
    tmp_path: Path,
) -> None:
    heads = find_heads(str(changed(Eagle3(), tmp_path / "heads", EAGLE_CONFIG | config, **tensors)))
    assert heads is not None
    with pytest.raises(error) as caught:
        heads.attach(bundle)
    assert message in str(caught.value)
    assert bundle.speculators() == []


def test_a_shallow_target(tiny_source: Path, tmp_path: Path) -> None:
    heads = find_heads(str(save_heads(Eagle3(), tmp_path / "heads", EAGLE_CONFIG)))
    with pytest.raises(UnsupportedModelError, match="which a model of 2 layers does not have"):
        heads.attach(export_bundle(str(tiny_source)))


def test_medusa_of_other_models(bundle: Bundle, tmp_path: Path) -> None:
    wide = changed(medusa(), tmp_path / "a", MEDUSA_CONFIG, **{"0__0__linear__weight": torch.zeros(128, 128)})
    with pytest.raises(UsageError, match="another model"):
        find_heads(str(wide)).attach(bundle)
    flat = changed(medusa(), tmp_path / "d", MEDUSA_CONFIG, **{"0__2__weight": torch.zeros(300)})
    with pytest.raises(IntegrityError, match=r"0\.2\.weight has the shape \[300\]"):
        find_heads(str(flat)).attach(bundle)
    rows = changed(medusa(), tmp_path / "b", MEDUSA_CONFIG, **{"0__2__weight": torch.zeros(5000, HIDDEN)})
    with pytest.raises(UsageError, match="a vocabulary of 5000 x 64"):
        find_heads(str(rows)).attach(bundle)
    gap = changed(medusa(), tmp_path / "c", MEDUSA_CONFIG, **{"7__0__linear__weight": torch.zeros(HIDDEN, HIDDEN)})
    (gap / "config.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"lack 3\.0\.linear\.weight"):
        find_heads(str(gap)).attach(bundle)
    many = {"medusa_num_heads": 9}
    (gap / "config.json").write_text(json.dumps(many))
    with pytest.raises(UnsupportedModelError, match="medusa_num_heads"):
        find_heads(str(gap)).attach(bundle)


def test_what_is_no_heads(tiny_source: Path, tmp_path: Path) -> None:
    assert find_heads(str(tiny_source)) is None
    assert find_heads("smollm2-135m") is None
    assert find_heads(str(tmp_path / "model.gguf")) is None
    with pytest.raises(ModelNotFoundError):
        find_heads(str(tmp_path / "nothing"))
    folder = save_heads(medusa(), tmp_path / "heads", MEDUSA_CONFIG)
    (folder / "model.safetensors").write_bytes(b"\x80\x04")
    with pytest.raises(IntegrityError):
        find_heads(str(folder))


def test_a_weights_folder(bundle: Bundle, tmp_path: Path) -> None:
    speculator = tiny_speculator("draft", tiny_speculator("draft").target)
    write_speculator(tmp_path / "weights", speculator)
    heads = find_heads(str(tmp_path / "weights"))
    with pytest.raises(UsageError, match="hidden, layers and vocabulary are"):
        heads.attach(bundle)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pickles_are_refused_with_the_command_that_converts_them(file: str, bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    save_heads(medusa(), folder, MEDUSA_CONFIG)
    wanted = load_file(folder / "model.safetensors")
    torch.save(wanted, folder / file)
    (folder / "model.safetensors").unlink()
    for source in (folder, folder / file):
        with pytest.raises(IntegrityError) as caught:
            find_heads(str(source))
        assert "reads no pickle" in str(caught.value)
    command = str(caught.value).split("`")[1]
    assert command == convert_command(str(folder / file), str(folder / "model.safetensors"))
    subprocess.run(command.replace("python", f'"{sys.executable}"', 1), shell=True, check=True)
    assert all(torch.equal(wanted[name], t) for name, t in load_file(folder / "model.safetensors").items())
    assert find_heads(str(folder)).attach(bundle).manifest.method == "medusa"
    assert find_speculator(bundle, "with space").manifest.method == "medusa"


def test_8_bit_ends_are_not_taken_for_others(deep_source: Path, tmp_path: Path) -> None:
    bundle = export_bundle(str(deep_source))
    ends = read_target_ends(bundle)
    assert isinstance(ends.embedding, BlockMatrix)
    table = load_file(deep_source / "model.safetensors")["model.embed_tokens.weight"]
    folder = save_heads(Eagle1(), tmp_path / "heads", EAGLE_CONFIG, embed_tokens__weight=table)
    made = find_heads(str(folder)).attach(bundle)
    assert "embedding" not in read_speculator(made.path)


def test_a_hub_repository_with_pickles_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(source: str, progress: object) -> None:
        raise SourceError("no safetensors weights on the hub") from IntegrityError("holds no *.safetensors file")

    monkeypatch.setattr(heads_source, "fetch_source", fetch)
    with pytest.raises(SourceError, match=r"hf download org/heads --local-dir HEADS.*weights_only=True"):
        find_heads("org/heads")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_they_draft_and_the_text_stays(kind: str, bundle: Bundle, tmp_path: Path) -> None:
    models = {"eagle3": Eagle3, "eagle1": Eagle1, "medusa": medusa}
    config = MEDUSA_CONFIG if kind == "medusa" else EAGLE_CONFIG
    made = find_heads(str(save_heads(models[kind](), tmp_path / "heads", config))).attach(bundle)
    with Engine(bundle, draft=made) as engine:
        plain = engine.generate("Hello", max_tokens=16, method="none")
        result = engine.generate("Hello", max_tokens=16, draft_length=2)
    assert result.method == made.manifest.method
    assert result.speculation.proposed > 0
    assert result.token_ids == plain.token_ids
