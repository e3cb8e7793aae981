from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli import export as export_module
from specrun.cli.main import main
from specrun.export.speculator_weights import write_speculator
from specrun.models_cache.layout import Bundle, find_bundle, list_bundles
from specrun.models_cache.manifest import Fidelity
from specrun.runtime import Engine

from ..export.tiny_speculators import tiny_speculator


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
    assert "specrun generate --model tiny --draft small" in result.stderr
    with Engine.load("tiny") as plain, Engine.load("tiny", draft="small") as pair:
        wanted = plain.generate("Hello", max_tokens=30, method="none")
        assert pair.generate("Hello", max_tokens=30).token_ids == wanted.token_ids
    result = CliRunner().invoke(
        main, ["generate", "-m", "tiny", "-md", "small", "--max-tokens", "30", "--stats", "Hello"]
    )
    assert result.stdout == wanted.text + "\n"
    assert "method draft" in result.stderr


def test_heads(tiny_source: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    write_speculator(weights, tiny_speculator("medusa"))
    result = export(str(tiny_source), "--draft", str(weights), "--json")
    assert result.exit_code == 0, result.stderr
    bundle = find_bundle("tiny")
    (made,) = bundle.speculators()
    value = json.loads(result.stdout)
    assert value["path"] == str(bundle.path)
    assert value["speculator"]["digest"] == made.digest
    assert "specrun generate --model tiny --method medusa --draft tiny-medusa" in result.stderr
    # The bundle that is there is taken as it is, and so are the heads; others need --force.
    assert export(str(tiny_source), "--draft", str(weights)).stdout == f"{bundle.path}\n"
    write_speculator(weights, tiny_speculator("medusa", seed=8))
    result = export(str(tiny_source), "--draft", str(weights))
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert export(str(tiny_source), "--draft", str(weights), "--force").exit_code == 0
    assert find_bundle("tiny").speculators()[0].digest != made.digest
    # Another folder can have them too.
    folder = tmp_path / "elsewhere"
    result = export(str(tiny_source), "--draft", str(weights), "--output", str(folder))
    assert result.exit_code == 0, result.stderr
    assert [s.name for s in find_bundle(folder).speculators()] == ["tiny-medusa"]


def test_heads_in_a_pickle(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2}')
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"\x80\x04.")
    result = export(str(tiny_source), "--draft", str(tmp_path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "weights_only=True" in result.stderr
    assert list_bundles() == []  # it is refused before the export


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
