"""Bundles of reward models: their manifest, and how they live beside language models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache import (
    RewardBundle,
    find_bundle,
    find_model,
    find_reward,
    list_bundles,
    models_dir,
    remove_bundle,
    scan_bundles,
    verify_reward,
)
from specrun.models_cache.errors import (
    IntegrityError,
    ManifestError,
    ModelNotFoundError,
    OtherKindError,
    SpecrunError,
    UsageError,
)
from specrun.models_cache.reward import RewardManifest, load_reward, reward_manifest_to_json, reward_or_build
from specrun.models_cache.store import bundle_or_build

from ..tiny_rewards import handmade_reward, reward_table


@pytest.fixture
def judge() -> RewardBundle:
    return handmade_reward(reward_table())


Edited = Callable[[Callable[[dict[str, Any]], None]], Path]


@pytest.fixture
def edited(judge: RewardBundle) -> Edited:
    """The folder of a sound reward model whose manifest an edit has changed."""

    def build(edit: Callable[[dict[str, Any]], None]) -> Path:
        manifest = json.loads((judge.path / "manifest.json").read_text())
        edit(manifest)
        (judge.path / "manifest.json").write_text(json.dumps(manifest))
        return judge.path

    return build


def test_it_is_found_listed_verified_and_removed(judge: RewardBundle) -> None:
    assert find_reward("judge") == find_reward(judge.path) == find_model("judge") == judge
    assert [(entry.name, entry.bundle, entry.reward, entry.problem) for entry in scan_bundles()] == [
        ("judge", None, judge, None)
    ]
    assert list_bundles() == []
    assert verify_reward(judge) == []
    assert set(judge.manifest.files) == {"model.onnx", "tokenizer.json", "chat_template.jinja"}
    remove_bundle("judge")
    assert not judge.path.exists()
    with pytest.raises(ModelNotFoundError):
        find_reward("judge")


def test_a_reward_model_is_no_language_model(judge: RewardBundle) -> None:
    with pytest.raises(OtherKindError, match="is a reward model, which rates texts and writes none"):
        find_bundle("judge")
    with pytest.raises(ModelNotFoundError, match="no model is here yet"):
        find_bundle("judgement")


def test_a_name_belongs_to_one_kind(judge: RewardBundle, tiny_cache: Path) -> None:
    def never(folder: Path) -> Any:
        raise AssertionError("built over a model of another kind")

    with pytest.raises(UsageError, match="holds a reward model: choose another --name, or --force"):
        bundle_or_build("judge", never)
    models_dir().joinpath("words").symlink_to(tiny_cache / "models" / "tiny")
    with pytest.raises(UsageError, match="holds a language model: choose another --name"):
        reward_or_build("words", never)
    assert handmade_reward(reward_table(seed=9)) == judge  # as it is, without --force
    assert handmade_reward(reward_table(seed=9), force=True) != judge


def test_an_output_folder(judge: RewardBundle, tmp_path: Path) -> None:
    made = handmade_reward(reward_table(), output=tmp_path / "out")
    assert find_reward(tmp_path / "out") == made
    assert made.manifest == judge.manifest
    with pytest.raises(UsageError, match="holds a bundle already"):
        handmade_reward(reward_table(), output=tmp_path / "out")


def test_the_manifest_comes_back_as_it_was(judge: RewardBundle) -> None:
    text = reward_manifest_to_json(judge.manifest)
    assert RewardManifest.from_json(text) == judge.manifest


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "folder"])
def test_damage_is_found(judge: RewardBundle, damage: str) -> None:
    path = judge.path / "model.onnx"
    data = path.read_bytes()
    path.unlink()
    if damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert find_reward("judge") == judge  # sizes are right: only reading it all shows it
    elif damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "folder":
        path.mkdir()
    if damage != "flip":
        with pytest.raises(IntegrityError, match=r"model\.onnx .*export it again with `specrun export --task reward"):
            find_reward("judge")
        assert scan_bundles()[0].problem is not None
    assert [problem.file for problem in verify_reward(find_reward("judge", check=False))] == ["model.onnx"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kind", "other"),
        ("schema_version", 99),
        ("schema_version", True),
        ("name", "../../x"),
        ("label", 1),
        ("label", -1),
        ("labels", []),
        ("labels", ["x"] * 5000),
        ("context", 0),
        ("context", 10**12),
        ("vocabulary", 1),
        ("tokens", 301),
        ("pad", 300),
        ("special_ids/eos", [300]),
        ("graphs/reward/file", "../outside.onnx"),
        ("graphs/reward/file", "/etc/passwd"),
        ("graphs/reward/file", "other.onnx"),
        ("graphs/reward/inputs/0/name", "past_key"),
        ("graphs/reward/inputs/1/name", "input_ids"),
        ("graphs/reward/outputs/0/name", "scores"),
        ("files/model.onnx/sha256", "00"),
        ("files/model.onnx/size", -1),
        ("unknown", 1),
    ],
)
def test_manifests_that_cannot_be(edited: Edited, path: str, value: object) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        *parents, last = path.split("/")
        for parent in parents:
            place = place[int(parent)] if isinstance(place, list) else place[parent]
        place[last] = value

    with pytest.raises(SpecrunError) as caught:
        load_reward(edited(edit))
    assert isinstance(caught.value, ManifestError)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_that_is_not_listed(edited: Edited) -> None:
    with pytest.raises(ManifestError, match=r"does not list tokenizer\.json"):
        load_reward(edited(lambda manifest: manifest["files"].pop("tokenizer.json")))


def test_a_template_that_is_not_listed_is_not_read(edited: Edited) -> None:
    folder = edited(lambda manifest: manifest["files"].pop("chat_template.jinja"))
    with pytest.raises(ManifestError, match=r"does not list chat_template\.jinja"):
        load_reward(folder).text("chat_template.jinja")


def test_links_that_leave_the_bundle(judge: RewardBundle, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (judge.path / "model.onnx").rename(outside)
    (judge.path / "model.onnx").symlink_to(outside)
    with pytest.raises(ManifestError, match="a link that leaves the bundle"):
        find_reward("judge")
