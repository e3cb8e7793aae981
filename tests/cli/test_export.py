from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli import export as export_module
from specrun.cli.main import main
from specrun.models_cache.layout import Bundle, find_bundle, list_bundles
from specrun.models_cache.manifest import Fidelity
from specrun.runtime import Engine


def export(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["export", *arguments])


def test_stdout_is_the_path(tiny_source: Path) -> None:
    result = export(str(tiny_source))
    assert result.exit_code == 0, result.stderr
    bundle = find_bundle("tiny")
    assert result.stdout == f"{bundle.path}\n"
    assert "tiny: llama, int8" in result.stderr
    assert "same most probable token" in result.stderr


def test_a_second_time(tiny_source: Path) -> None:
    first = export(str(tiny_source))
    again = export(str(tiny_source))
    assert again.stdout == first.stdout
    assert "here already" in again.stderr
    other = export(str(tiny_source), "--name", "tiny", "--precision", "fp32")
    assert other.exit_code == 2
    assert "--force" in other.stderr
    assert export(str(tiny_source), "--name", "tiny", "--precision", "fp32", "--force").exit_code == 0
    assert find_bundle("tiny").manifest.precision["requested"] == "fp32"


def test_json_and_another_folder(tiny_source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Modèle 模型"
    result = export(str(tiny_source), "--precision", "fp32", "--output", str(folder), "--json")
    value = json.loads(result.stdout)
    assert value["path"] == str(folder)
    assert value["precision"] == "fp32"
    assert value["fidelity"]["argmax_agreement"] > 0.99
    assert list_bundles() == []
    assert CliRunner().invoke(main, ["generate", "-m", str(folder), "--max-tokens", "3", "x"]).exit_code == 0


def test_a_draft_too(tiny_source: Path, tmp_path: Path) -> None:
    from ..conftest import write_tiny_source

    small = write_tiny_source(tmp_path / "small", layers=1)
    result = export(str(tiny_source), "--draft", str(small))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{find_bundle('tiny').path}\n{find_bundle('small').path}\n"
    with Engine.load("tiny") as plain, Engine.load("tiny", draft="small") as pair:
        wanted = plain.generate("Hello", max_tokens=30, method="none")
        assert pair.generate("Hello", max_tokens=30).token_ids == wanted.token_ids
    result = CliRunner().invoke(
        main, ["generate", "-m", "tiny", "-md", "small", "--max-tokens", "30", "--stats", "Hello"]
    )
    assert result.stdout == wanted.text + "\n"
    assert "method draft" in result.stderr


def test_a_draft_and_another_folder(tiny_source: Path, tmp_path: Path) -> None:
    assert export(str(tiny_source), "--draft", str(tiny_source), "--output", str(tmp_path / "x")).exit_code == 2


def test_a_poor_graph_is_warned_of(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = find_bundle(tiny)
    poor = dataclasses.replace(bundle.manifest, fidelity=Fidelity(4.6, 0.78, 0.5, 222))
    export_module._summary(Bundle(bundle.path, poor, bundle.digest))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Warning: only 78%" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code"), [(("./nothing-here",), 1), (("x", "--precision", "int3"), 2), (("x", "--block", "7"), 2)]
)
def test_refusals(arguments: tuple[str, ...], code: int) -> None:
    result = export(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert "Error: " in result.stderr
