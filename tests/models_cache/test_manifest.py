from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache.errors import ManifestError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import (
    MANIFEST_NAME,
    FeaturesSpec,
    Fidelity,
    FileInfo,
    Manifest,
    load_manifest,
    manifest_to_json,
)


def complete(manifest: Manifest) -> Manifest:
    files = {"target.onnx": FileInfo(5, "a" * 64), "target.onnx.data": FileInfo(512, "b" * 64)}
    return dataclasses.replace(
        manifest,
        files=files,
        fidelity=Fidelity(0.5, 1.0, 0.25, 10),
        widths_validated=(1, 2, 3),
        features=FeaturesSpec((0, 1)),
    )


def test_round_trip(manifest: Manifest) -> None:
    whole = complete(manifest)
    text = manifest_to_json(whole)
    assert Manifest.from_json(text) == whole
    assert manifest_to_json(Manifest.from_json(text)) == text


def test_a_float_may_be_written_as_an_integer(manifest: Manifest) -> None:
    value = json.loads(manifest_to_json(complete(manifest)))
    value["fidelity"]["argmax_agreement"] = 1
    assert Manifest.from_json(json.dumps(value)).fidelity == Fidelity(0.5, 1.0, 0.25, 10)


def change(path: str, new: Any) -> Callable[[dict[str, Any]], None]:
    def apply(value: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        for parent in parents:
            value = value[int(parent)] if isinstance(value, list) else value[parent]
        if new is KeyError:
            del value[last]
        else:
            value[last] = new

    return apply


@pytest.mark.parametrize(
    ("path", "new", "said"),
    [
        ("surprise", 1, "unknown key 'surprise'"),
        ("sizes/width", 1, "unknown key 'sizes.width'"),
        ("graphs/target/extra", 1, "unknown key 'graphs.target.extra'"),
        ("family", KeyError, "'family' is missing"),
        ("sizes/heads", KeyError, "'sizes.heads' is missing"),
        ("schema_version", 3, "schema version 3 and this specrun reads 2; update specrun"),
        ("schema_version", 0, "schema version 0"),
        ("schema_version", True, "schema version true"),
        ("schema_version", "1", 'schema version "1"'),
        ("schema_version", KeyError, "schema version null"),
        ("name", "", "name is empty"),
        ("name", 3, "name must be text, not 3"),
        ("sizes/heads", "2", 'sizes.heads must be an integer, not "2"'),
        ("sizes/heads", True, "sizes.heads must be an integer, not true"),
        ("sizes/heads", 2.0, "sizes.heads must be an integer"),
        ("sizes/heads", 0, "sizes.heads is 0"),
        ("sizes/context", 1 << 40, "sizes.context is"),
        ("special_ids/eos", 2, "special_ids.eos must be a list"),
        ("special_ids/eos", [2, "x"], r"special_ids.eos\[1\] must be an integer"),
        ("special_ids/eos", [8], "special_ids is 8"),
        ("special_ids/add_bos", 1, "special_ids.add_bos must be true or false"),
        ("special_ids/bos", "x", "special_ids.bos must be an integer"),
        ("graphs/target/outputs/0/shape", [1.5], r"graphs.target.outputs\[0\].shape\[0\] must be an integer or text"),
        ("graphs/target/max_batch", 0, "max_batch"),
        ("graphs", [], "graphs must be an object"),
        ("fidelity/mean_kl", "0", "fidelity.mean_kl must be a number"),
        ("kv/positions", -1, "kv.positions is -1"),
        ("kv/window", 0, "kv.window is 0"),
        ("features/taps", [], "features.taps must be ascending"),
        ("features/taps", [1, 1], "features.taps must be ascending"),
        ("features/taps", [0, 2], "features.taps is 2"),
        ("files/target.onnx/size", 0, "size of target.onnx is 0"),
        ("files/target.onnx/size", 1 << 60, "size of target.onnx is"),
        ("files/target.onnx/sha256", "A" * 64, "sha256 of target.onnx"),
        ("files/target.onnx", KeyError, "uses target.onnx, which files does not list"),
        ("files/target.onnx.data", KeyError, "uses target.onnx.data, which files does not list"),
        ("files/manifest.json", {"size": 1, "sha256": "a" * 64}, "files lists manifest.json itself"),
        ("source/files/x", "nothing", "sha256 of source file x"),
    ],
)
def test_refuses(manifest: Manifest, path: str, new: Any, said: str) -> None:
    value = json.loads(manifest_to_json(complete(manifest)))
    change(path, new)(value)
    with pytest.raises(ManifestError, match=said):
        Manifest.from_json(json.dumps(value))


BAD_NAMES = [
    "../x", "a/../../x", "/etc/passwd", "C:/x", "C:x", "a\\b", "..", ".", "", "a//b", "a/", "./a", "a\0b", "a\ud800",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_stay_inside(manifest: Manifest, name: str) -> None:
    info = {"size": 1, "sha256": "a" * 64}
    value = json.loads(manifest_to_json(complete(manifest)))
    for path, new in [
        ("files", value["files"] | {name: info}),
        ("graphs/target/file", name),
        ("graphs/target/data", [name]),
    ]:
        changed = json.loads(json.dumps(value))
        change(path, new)(changed)
        with pytest.raises(ManifestError, match="must be relative and stay inside"):
            Manifest.from_json(json.dumps(changed))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "digits"),
    ],
)
def test_refuses_malformed_json(text: str, said: str) -> None:
    with pytest.raises(ManifestError, match=said):
        Manifest.from_json(text)


def test_an_incomplete_manifest_is_not_written(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="files does not list"):
        manifest_to_json(manifest)
    broken = dataclasses.replace(complete(manifest), fidelity=Fidelity(float("nan"), 1.0, 0.0, 1))
    with pytest.raises(ManifestError, match="NaN"):
        manifest_to_json(broken)


def test_load_says_what_is_wrong_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"holds no manifest.json"):
        load_manifest(tmp_path / "absent")
    with pytest.raises(ManifestError, match=r"holds no manifest.json"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(b'{"name": "\xff"}')
    with pytest.raises(ManifestError, match="UTF-8"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(ManifestError, match="cannot be read"):
        load_manifest(tmp_path)


def test_load_refuses_a_huge_file(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST_NAME).open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(ManifestError, match="larger than"):
        load_manifest(tmp_path)


def test_links_may_not_leave_the_bundle(bundle: Bundle, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (bundle.path / "target.onnx").rename(outside)
    os.symlink(outside, bundle.path / "target.onnx")
    with pytest.raises(ManifestError, match=r"target.onnx is a link that leaves"):
        load_manifest(bundle.path)
    (bundle.path / "target.onnx").unlink()
    outside.rename(bundle.path / "other")
    os.symlink("other", bundle.path / "target.onnx")
    assert load_manifest(bundle.path) == bundle.manifest
    (bundle.path / "target.onnx").unlink()
    os.symlink("target.onnx", bundle.path / "target.onnx")
    with pytest.raises(ManifestError, match="leaves the bundle"):
        load_manifest(bundle.path)
