from __future__ import annotations

from pathlib import Path

import pytest

from specrun.export.config import config_from_json
from specrun.export.families import FAMILIES, check_tensors, family_for, tensor_shapes
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError

from .tiny_models import save_tiny


def test_each_name_belongs_to_one_family() -> None:
    for pick in ("architectures", "gguf_architectures"):
        names = [name for family in FAMILIES for name in getattr(family, pick)]
        assert len(names) == len(set(names))


def test_lookup() -> None:
    assert family_for("Qwen3ForCausalLM").qk_norm
    assert family_for("qwen2", gguf=True).qkv_bias
    assert {family.name for family in FAMILIES if family.gguf_permuted_qk} == {"llama", "mistral", "smollm3"}


@pytest.mark.parametrize("gguf", [False, True])
def test_unknown_architecture_is_named_and_the_known_listed(gguf: bool) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'Gemma3ForCausalLM'.*[lL]lama.*[sS]mol[lL][mM]3"):
        family_for("Gemma3ForCausalLM", gguf=gguf)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    config = config_from_json(save_tiny("qwen2", tmp_path / "qwen2"))
    shapes = tensor_shapes(config)
    check_tensors(config, shapes, "file")
    name = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(IntegrityError, match=f"file lacks {name}"):
        check_tensors(config, {key: shape for key, shape in shapes.items() if key != name}, "file")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0\.mlp\.router\.weight"):
        check_tensors(config, shapes | {"model.layers.0.mlp.router.weight": (4, 64)}, "file")
    with pytest.raises(IntegrityError, match=rf"{name} in file has the shape \[3\]"):
        check_tensors(config, shapes | {name: (3,)}, "file")
    with pytest.raises(IntegrityError, match="and 24 more tensors"):
        check_tensors(config, {}, "file")
