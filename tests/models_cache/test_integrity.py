from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specrun.models_cache.errors import IntegrityError
from specrun.models_cache.integrity import (
    Problem,
    check_gguf,
    check_weights_folder,
    refuse_pickle,
    require_intact,
    sha256_file,
    verify_bundle,
)
from specrun.models_cache.layout import Bundle, find_bundle

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 100\n"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_outside(path: Path) -> None:
    outside = path.parents[2] / "outside"
    path.rename(outside)
    os.symlink(outside, path)


def test_hash_and_progress(tmp_path: Path) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "x").write_bytes(data)
    seen: list[tuple[str, int, int | None]] = []
    digest = sha256_file(tmp_path / "x", lambda *report: seen.append(report))
    assert digest == hashlib.sha256(data).hexdigest()
    assert seen == [("checking x", n << 20, 9 << 20) for n in (4, 8, 9)]


def test_an_intact_bundle(bundle: Bundle) -> None:
    assert verify_bundle(bundle) == []
    require_intact(bundle)


@pytest.mark.parametrize(
    ("damage", "said", "seen_at_load"),
    [
        (flip, "is damaged: its sha256", False),
        (Path.unlink, "is missing", True),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is cut short: 511 bytes instead of 512", True),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is too long: 513 bytes instead of 512", True),
        (replace_by_folder, "is not a regular file", True),
        (link_outside, "leaves the bundle", True),
    ],
)
def test_damage_is_found(bundle: Bundle, damage: Callable[[Path], object], said: str, seen_at_load: bool) -> None:
    damage(bundle.path / "target.onnx.data")
    problems = verify_bundle(bundle)
    assert [problem.file for problem in problems] == ["target.onnx.data"]
    assert said in problems[0].message
    with pytest.raises(IntegrityError, match=r"target.onnx.data .*specrun models pull org/tiny --name tiny --force"):
        require_intact(bundle)
    if seen_at_load:
        with pytest.raises(Exception, match=r"target\.onnx\.data"):
            find_bundle("tiny")
    else:
        assert find_bundle("tiny") == bundle
    assert find_bundle("tiny", check=False) == bundle


def test_every_problem_is_listed(bundle: Bundle) -> None:
    (bundle.path / "target.onnx").unlink()
    flip(bundle.path / "target.onnx.data")
    problems = verify_bundle(bundle)
    assert problems[0] == Problem("target.onnx", "is missing")
    assert [problem.file for problem in problems] == ["target.onnx", "target.onnx.data"]
    with pytest.raises(IntegrityError, match="and 1 more"):
        require_intact(bundle)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "a.pt", "a.PTH", "a.ckpt", "a.pkl"])
def test_pickle_is_refused(name: str) -> None:
    with pytest.raises(IntegrityError, match=r"reads no pickle .*convert the weights to safetensors"):
        refuse_pickle(Path(name))


def test_safetensors_is_not_refused() -> None:
    refuse_pickle(Path("model.safetensors"))


def test_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF....")
    check_gguf(path)
    for data, said in [(POINTER, "git lfs pull"), (b"", "does not begin"), (b"GG", "does not begin")]:
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=said):
            check_gguf(path)


def sharded(folder: Path, shards: object = None) -> Path:
    folder.mkdir()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (folder / name).write_bytes(b"x")
    weight_map = {"a": names[0], "b": names[1], "c": names[0]} if shards is None else shards
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_shards(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "w")
    (folder / "unused.safetensors").write_bytes(b"x")
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert check_weights_folder(folder) == names
    (folder / names[1]).write_bytes(POINTER)
    with pytest.raises(IntegrityError, match=r"00002-of-00002.safetensors is a Git-LFS pointer"):
        check_weights_folder(folder)
    (folder / names[1]).unlink()
    with pytest.raises(IntegrityError, match=r"lacks the shard model-00002-of-00002\.safetensors that"):
        check_weights_folder(folder)


@pytest.mark.parametrize("shards", [{"a": "../x.safetensors"}, {"a": "/x.safetensors"}, {"a": 3}, {}, []])
def test_a_bad_index(tmp_path: Path, shards: object) -> None:
    with pytest.raises(IntegrityError, match=r"index\.json"):
        check_weights_folder(sharded(tmp_path / "w", shards))


def test_an_index_that_is_no_json(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "w")
    (folder / "model.safetensors.index.json").write_bytes(POINTER)
    with pytest.raises(IntegrityError, match="Git-LFS"):
        check_weights_folder(folder)
    (folder / "model.safetensors.index.json").write_bytes(b"{")
    with pytest.raises(IntegrityError, match="not valid"):
        check_weights_folder(folder)


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"holds no \*\.safetensors"):
        check_weights_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"only as pickle \(pytorch_model.bin\).*convert"):
        check_weights_folder(tmp_path)
