"""Which sides and modes the options name, and what a peer's preparation makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from specrun.export.weights import open_weights

from .environments import peer_python
from .processes import BenchError, child_environment
from .sides import choice, peer_modes, specrun_modes
from .weights import write_transformers_folder


def test_names_of_peers() -> None:
    assert choice("genai").label == "genai"
    assert choice("genai:int8").label == "genai"
    assert (choice("genai:int4").label, choice("genai:int4").kind) == ("genai int4", "int4")
    with pytest.raises(BenchError, match=r"no peer 'vllm': choose of llama\.cpp"):
        choice("vllm")
    with pytest.raises(BenchError, match="openvino has no weights 'int8' here: choose of gguf"):
        choice("openvino:int8")


def test_modes() -> None:
    assert [
        (mode.method, mode.draft_length, mode.label) for mode in specrun_modes(["none", "ngram:4", "auto", "auto"])
    ] == [
        ("baseline", 0, "specrun baseline"),
        ("none", 0, "specrun plain"),
        ("ngram", 4, "specrun ngram 4"),
        ("auto", 0, "specrun auto"),
    ]
    modes = peer_modes(choice("genai:int4"), [2, 4])
    assert [mode.label for mode in modes] == ["genai int4 plain", "genai int4 ngram 2", "genai int4 ngram 4"]
    assert {mode.reference for mode in modes} == {"genai int4 plain"}
    with pytest.raises(BenchError, match="'ngram:x' is no method"):
        specrun_modes(["ngram:x"])


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    notes: list[str] = []
    python = peer_python(tmp_path / "peer", ["pip"], {}, notes.append)
    assert python.exists()
    assert peer_python(tmp_path / "peer", ["pip"], {}, notes.append) == python
    assert len(notes) == 1
    with pytest.raises(BenchError, match="specrun-no-such-package was not installed: ERROR: No matching"):
        peer_python(tmp_path / "peer", ["specrun-no-such-package"], {"CFLAGS": "-O3"}, notes.append)
    assert "compiled here" in notes[1]
    assert not (tmp_path / "peer" / "venv" / ".installed").exists()  # the next call tries again
    assert "PIP_NO_INDEX" in child_environment()


def test_the_transformers_folder_holds_the_same_weights(tiny_source: Path, tmp_path: Path) -> None:
    write_transformers_folder(tmp_path / tiny_source.name, tiny_source)
    made, expected = open_weights(tmp_path / tiny_source.name), open_weights(tiny_source)
    assert made.config == expected.config
    assert set(made.names()) == set(expected.names())
    for name in made.names():
        np.testing.assert_array_equal(made.tensor(name), expected.tensor(name))
    config = json.loads((tmp_path / tiny_source.name / "config.json").read_text())
    assert config["eos_token_id"] == [257]
