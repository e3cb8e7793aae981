from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from specrun.models_cache.errors import IntegrityError, SourceError
from specrun.models_cache.sources import fetch_source

from .conftest import FakeHub
from .test_sources import WEIGHTS, sha

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "model.safetensors": b"weights" * 99,
    "README.md": b"---\nlicense: mit\n---\n",
    "LICENSE": b"x",
}
OTHER = {
    "pytorch_model.bin": b"pickle",
    "original/consolidated.00.pth": b"pickle",
    "original/config.json": b"{}",
    "consolidated.safetensors": b"twice",
    "onnx/model.onnx": b"x",
}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> object:
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_repository(hub: FakeHub) -> None:
    hub.repos = {"org/tiny": {**FILES, **OTHER}}
    seen: list[tuple[str, int, int | None]] = []
    found = fetch_source("org/tiny", lambda *report: seen.append(report))
    assert (found.name, found.kind, found.licence) == ("org/tiny", "hub", "mit")
    assert found.files == {name: sha(data) for name, data in FILES.items() if name != "README.md"}
    assert sorted(p.name for p in found.path.rglob("*")) == sorted(FILES)
    downloads = [report for report in seen if report[0] == "downloading org/tiny"]
    assert downloads[-1][1] == downloads[-1][2] == sum(map(len, FILES.values()))
    assert not [request for request in hub.requests if "pytorch_model" in request or "pth" in request]


def test_nothing_is_drawn_on_the_terminal(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.repos = {"org/tiny": FILES}
    fetch_source("org/tiny")
    out, err = capfd.readouterr()
    assert out == ""
    assert "B/s" not in err
    assert "%" not in err


def test_a_cached_repository_works_offline_and_with_the_hub_down(hub: FakeHub, offline) -> None:
    hub.repos = {"org/tiny": FILES}
    online = fetch_source("org/tiny")
    hub.status = 503
    assert fetch_source("org/tiny") == online
    hub.requests.clear()
    offline()
    assert fetch_source("org/tiny") == online
    assert hub.requests == []


def test_an_uncached_repository_offline(hub: FakeHub, offline) -> None:
    offline()
    with pytest.raises(SourceError, match=r"org/tiny is not in the hub's local cache and HF_HUB_OFFLINE is set; unset"):
        fetch_source("org/tiny")
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set"):
        fetch_source("org/tiny/x.gguf")


def test_an_unknown_repository(hub: FakeHub) -> None:
    with pytest.raises(SourceError, match="has no repository org/nothing that you may read"):
        fetch_source("org/nothing")
    with pytest.raises(SourceError, match="has no repository org/nothing that you may read"):
        fetch_source("org/nothing/x.gguf")


def test_an_unknown_file(hub: FakeHub) -> None:
    hub.repos = {"org/tiny": FILES}
    with pytest.raises(SourceError, match="has no such file"):
        fetch_source("org/tiny/x.gguf")


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_in_trouble(hub: FakeHub, status: int) -> None:
    hub.status = status
    with pytest.raises(SourceError, match=f"not in the hub's local cache and .* answers with status {status}"):
        fetch_source("org/tiny")
    assert len(hub.requests) == 1


def test_a_forbidden_hub(hub: FakeHub) -> None:
    hub.status = 403
    with pytest.raises(SourceError, match="org/tiny"):
        fetch_source("org/tiny")


@pytest.mark.parametrize("source", ["org/tiny", "org/tiny/x.gguf"])
def test_a_refused_connection(hub: FakeHub, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(SourceError, match=r"cannot be reached .*check the network, HF_ENDPOINT and the proxy"):
        fetch_source(source)


def test_a_gguf_file(hub: FakeHub, offline) -> None:
    hub.repos = {"org/tiny": {"sub/x.gguf": WEIGHTS, "lfs.gguf": b"version https://git-lfs.github.com/spec/v1\n"}}
    found = fetch_source("org/tiny/sub/x.gguf")
    assert (found.name, found.kind) == ("org/tiny/sub/x.gguf", "hub")
    assert found.files == {"x.gguf": sha(WEIGHTS)}
    assert found.path.read_bytes() == WEIGHTS
    with pytest.raises(IntegrityError, match="Git-LFS pointer"):
        fetch_source("org/tiny/lfs.gguf")
    offline()
    assert fetch_source("org/tiny/sub/x.gguf") == found


def test_files_that_are_not_asked_for(hub: FakeHub) -> None:
    with pytest.raises(IntegrityError, match="pickle"):
        fetch_source("org/tiny/pytorch_model.bin")
    for name in ("org/tiny/model.safetensors", "org/tiny/../x.gguf", "org/tiny//x.gguf"):
        with pytest.raises(SourceError, match=r"is no \.gguf file of a hub repository"):
            fetch_source(name)
    assert hub.requests == []


def test_a_repository_of_pickles_only(hub: FakeHub) -> None:
    hub.repos = {"org/tiny": {"config.json": b"{}", "pytorch_model.bin": b"pickle"}}
    with pytest.raises(SourceError, match="no safetensors weights on the hub, and specrun reads no pickle files"):
        fetch_source("org/tiny")
    assert not [request for request in hub.requests if "pytorch_model" in request]


def test_a_missing_shard_is_named(hub: FakeHub) -> None:
    index = b'{"weight_map": {"a": "model-00001-of-00001.safetensors"}}'
    hub.repos = {"org/tiny": {"config.json": b"{}", "model.safetensors.index.json": index}}
    with pytest.raises(IntegrityError, match=r"lacks the shard model-00001-of-00001.safetensors"):
        fetch_source("org/tiny")


def test_a_damaged_file_in_the_local_cache(hub: FakeHub) -> None:
    hub.repos = {"org/tiny": FILES}
    found = fetch_source("org/tiny")
    blob = (found.path / "model.safetensors").resolve()
    blob.write_bytes(b"damaged" * 99)
    with pytest.raises(IntegrityError, match=r"model.safetensors is damaged.*delete"):
        fetch_source("org/tiny")


def test_the_environment_variables(hub_server: FakeHub, tmp_path: Path) -> None:
    hub_server.repos = {"org/tiny": FILES}
    code = "from specrun.models_cache.sources import fetch_source; print(fetch_source('org/tiny').path)"
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub_server.url,
        "HF_HOME": str(tmp_path / "hf home"),
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "127.0.0.1",
    }
    for name in ("HF_HUB_CACHE", "HF_TOKEN"):
        environment.pop(name, None)
    paths = []
    for offline in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment, "HF_HUB_OFFLINE": offline},
            capture_output=True,
            encoding="utf-8",
            check=True,
        )
        paths.append(Path(run.stdout.strip()))
        hub_server.status = 500
    assert paths[0] == paths[1]
    assert paths[0].is_relative_to(tmp_path / "hf home")
