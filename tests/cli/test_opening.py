"""Speculators that ship with specrun are attached when a method first asks for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main
from specrun.export import shipped_speculators as shipped
from specrun.export.speculator_weights import write_speculator
from specrun.models_cache import find_bundle, sha256_file

from ..export.tiny_speculators import tiny_speculator, tiny_target


@pytest.fixture
def model(tiny: str, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A bundle without speculators, for whose weights the package ships Medusa heads and a draft."""
    target = tiny_target(**{"model.safetensors": sha256_file(tiny_source / "model.safetensors")})
    for layout in ("medusa", "draft"):
        write_speculator(tmp_path / "shipped" / "tiny" / layout, tiny_speculator(layout, target))
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    return tiny


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["generate", "-m", "tiny", "--max-tokens", "8", "--stats", *arguments, "Hello"])


@pytest.mark.usefixtures("model")
def test_a_method_brings_them() -> None:
    plain = generate("--method", "none")
    assert plain.exit_code == 0, plain.stderr
    assert find_bundle("tiny").speculators() == []
    result = generate("--method", "medusa+ngram")
    assert result.exit_code == 0, result.stderr
    assert "attaching tiny-" in result.stderr
    assert result.stdout == plain.stdout
    assert [s.name for s in find_bundle("tiny").speculators()] == ["tiny-draft", "tiny-medusa"]
    again = generate("--method", "draft")
    assert again.exit_code == 0, again.stderr
    assert "attaching" not in again.stderr
    assert again.stdout == plain.stdout


@pytest.mark.usefixtures("model")
def test_what_does_not_ship_is_not_found() -> None:
    result = generate("--method", "eagle")
    assert result.exit_code != 0
    assert result.stdout == ""
