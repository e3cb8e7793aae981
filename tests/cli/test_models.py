from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli import models as models_module
from specrun.cli.models import models
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError, UsageError
from specrun.models_cache.layout import Bundle, find_bundle
from specrun.models_cache.manifest import GraphSpec, KVSpec, Manifest, Sizes, SourceInfo, SpecialIds
from specrun.models_cache.speculator import speculator_or_build
from specrun.models_cache.store import bundle_or_build

from ..models_cache.speculator_files import write_speculator_files


def build(folder: Path) -> Manifest:
    (folder / "target.onnx").write_bytes(b"graph" * 1000)
    return Manifest(
        name="",
        family="llama",
        sizes=Sizes(4, 1, 2, 1, 2, 8, 8, 8, 32),
        special_ids=SpecialIds(None, (2,), None, False),
        graphs={"target": GraphSpec("target.onnx", (), (), None, (), ())},
        precision={"requested": "int8"},
        kv=KVSpec("float32", 32),
        source=SourceInfo("org/tiny", "hub", {}, "mit"),
        fidelity=None,
    )


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "mein Köfferchen 模型"
    monkeypatch.setenv("SPECRUN_HOME", str(root))
    return root


@pytest.fixture
def bundle(home: Path) -> Bundle:
    return bundle_or_build("tiny", build)


def run(*arguments: str, keys: str | None = None) -> Result:
    return CliRunner().invoke(models, arguments, input=keys)


def damage(bundle: Bundle) -> None:
    data = bytearray((bundle.path / "target.onnx").read_bytes())
    data[100] ^= 1
    (bundle.path / "target.onnx").write_bytes(data)


def test_an_empty_list(home: Path) -> None:
    result = run("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "specrun models pull smollm2-135m" in result.stderr
    assert json.loads(run("list", "--json").stdout) == {"root": str(home), "models": []}


def test_list(bundle: Bundle, home: Path) -> None:
    (home / "models" / "broken").mkdir()
    result = run("list")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["broken", "broken"],
        ["tiny", "llama", "int8", "0", "MB"],
    ]
    assert "broken: " in result.stderr
    broken, tiny = json.loads(run("list", "--json").stdout)["models"]
    assert "manifest.json" in broken["problem"]
    assert tiny == {
        "name": "tiny",
        "path": str(bundle.path),
        "problem": None,
        "family": "llama",
        "precision": "int8",
        "bytes": 5000,
        "source": "org/tiny",
        "licence": "mit",
        "digest": bundle.digest,
        "speculators": [],
    }


def test_path(bundle: Bundle) -> None:
    assert run("path", "tiny").stdout == f"{bundle.path}\n"
    assert isinstance(run("path", "other").exception, ModelNotFoundError)


def test_verify(bundle: Bundle) -> None:
    for arguments in (["verify"], ["verify", "tiny"], ["verify", str(bundle.path)]):
        result = run(*arguments)
        assert (result.exit_code, result.stdout) == (0, "tiny  ok\n")
    assert json.loads(run("verify", "--json").stdout)["ok"] is True


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "tiny"]])
def test_verify_finds_a_flipped_bit(bundle: Bundle, arguments: list[str]) -> None:
    damage(bundle)
    result = run(*arguments)
    assert result.stdout == "tiny  damaged\n"
    assert "tiny: target.onnx is damaged: its sha256 is" in result.stderr
    assert isinstance(result.exception, IntegrityError)
    assert "tiny" in str(result.exception)
    report = json.loads(run(*arguments, "--json").stdout)
    assert report["ok"] is False
    assert report["models"][0]["problems"][0]["file"] == "target.onnx"


def test_verify_goes_on_after_a_broken_one(bundle: Bundle, home: Path) -> None:
    (home / "models" / "broken").mkdir()
    result = run("verify")
    assert result.stdout == "broken  damaged\ntiny  ok\n"
    assert str(result.exception).startswith("damaged: broken; ")


def test_rm_asks(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models_module, "is_terminal", lambda stream: True)
    refused = run("rm", "tiny", keys="n\n")
    assert refused.exit_code == 1
    assert "Remove" in refused.stderr
    assert refused.stdout == ""
    assert find_bundle("tiny") == bundle
    assert run("rm", "tiny", keys="y\n").exit_code == 0
    assert not bundle.path.exists()


def test_rm_where_nobody_can_be_asked(bundle: Bundle) -> None:
    result = run("rm", "tiny", keys="y\n")
    assert isinstance(result.exception, UsageError)
    assert "--yes" in str(result.exception)
    assert find_bundle("tiny") == bundle


def test_rm_without_asking(bundle: Bundle) -> None:
    assert run("rm", "tiny", "--yes").exit_code == 0
    assert not bundle.path.exists()
    assert isinstance(run("rm", "tiny", "--yes").exception, ModelNotFoundError)


def test_pull(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def export_bundle(source: str, *, progress: Any, **options: Any) -> Bundle:
        calls.append((source, options))
        progress("downloading x", 1, 2)
        progress("downloading x", 2, 2)
        return bundle_or_build("tiny", build)

    exporter = types.ModuleType("specrun.export.bundle")
    exporter.export_bundle = export_bundle  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "specrun.export.bundle", exporter)
    result = run("pull", "org/tiny", "--name", "tiny", "--precision", "int8", "--force")
    assert calls == [("org/tiny", {"name": "tiny", "precision": "int8", "force": True})]
    assert result.stdout == f"{home / 'models' / 'tiny'}\n"
    assert result.stderr == "downloading x\n"
    run("pull", "tiny")
    assert run("pull", "tiny", "--precision", "int3").exit_code == 2
    assert calls[1] == ("tiny", {"name": None, "precision": None, "force": False})


def test_speculators_are_listed_and_removed(bundle: Bundle) -> None:
    made = speculator_or_build(bundle, "heads", write_speculator_files)
    speculator_or_build(bundle, "broken", write_speculator_files)
    (bundle.path / "speculators" / "broken" / "speculator.onnx").unlink()
    result = run("list")
    assert result.stdout.splitlines()[1:] == ["  tiny/broken  broken", "  tiny/heads  eagle  0 MB"]
    assert "is missing" in result.stderr
    (model,) = json.loads(run("list", "--json").stdout)["models"]
    broken, heads = model["speculators"]
    assert broken["problem"].endswith("attach the speculator again")
    size = sum(info.size for info in made.manifest.files.values())
    assert heads == {
        "name": "heads",
        "path": str(made.path),
        "problem": None,
        "method": "eagle",
        "layout": "eagle3",
        "bytes": size,
        "licence": "mit",
        "shipped": False,
        "digest": made.digest,
    }
    result = run("verify", "tiny")
    assert result.exit_code == 1
    assert "tiny: speculators/broken/speculator.onnx is missing" in result.stderr
    assert run("rm", "tiny/broken", "--yes").exit_code == 0
    assert run("verify", "tiny").exit_code == 0
    assert isinstance(run("rm", "tiny/broken", "--yes").exception, ModelNotFoundError)
    assert isinstance(run("rm", "tiny/../tiny", "--yes").exception, UsageError)
    assert run("rm", "tiny/heads", "--yes").exit_code == 0
    assert find_bundle("tiny").speculators() == []
