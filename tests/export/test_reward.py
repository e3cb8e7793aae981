"""What exporting a reward model refuses before any other package does work, and what it says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specrun.export.reward import INSTALL_HINT, export_reward, write_reward
from specrun.models_cache.errors import IntegrityError, SpecrunError, UnsupportedModelError, UsageError
from specrun.models_cache.sources import FetchedSource

from ..conftest import Run
from ..tiny_rewards import handmade_reward, reward_table


def fetched(path: Path) -> FetchedSource:
    return FetchedSource(path.name, "path", path, {}, None)


@pytest.fixture
def without_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("optimum", "optimum.exporters", "optimum.exporters.onnx"):
        monkeypatch.setitem(sys.modules, name, None)


def test_without_the_extra_one_sentence_says_what_to_install(
    without_optimum: None, tiny_source: Path, isolated_home: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        export_reward(str(tiny_source))
    assert str(caught.value) == INSTALL_HINT
    assert "pip install 'specrun[optimum]'" in INSTALL_HINT
    assert not (isolated_home / "models").exists()


def test_a_reward_model_that_is_here_needs_no_extra(without_optimum: None) -> None:
    judge = handmade_reward(reward_table(2), label=1)
    assert export_reward("somewhere/judge") == judge
    assert export_reward("somewhere/judge", label="LABEL_1") == judge
    for label in ("LABEL_0", "0"):
        with pytest.raises(UsageError, match="is there already and reads the label 'LABEL_1'"):
            export_reward("somewhere/judge", label=label)
    with pytest.raises(UsageError, match=r"judge is there already, made from judge: choose another --name"):
        export_reward("somewhere/other", name="judge")


def test_a_language_model_is_no_reward_model(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="is LlamaForCausalLM and no sequence-classification model"):
        write_reward(tmp_path, fetched(tiny_source))


@pytest.mark.parametrize("named", [None, [], ["BertModel"], "text", [3]])
def test_configurations_of_something_else(tmp_path: Path, named: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": named, "model_type": "bert"}))
    with pytest.raises(UnsupportedModelError, match="no sequence-classification model"):
        write_reward(tmp_path, fetched(tmp_path))


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModelError, match="is a GGUF file, and a reward model is exported from a folder"):
        write_reward(tmp_path, fetched(path))


def test_pickled_weights_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("specrun.export.reward._require_optimum", lambda: None)
    source = tmp_path / "pickled"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"architectures": ["BertForSequenceClassification"]}))
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(IntegrityError, match="reads no pickle"):
        export_reward(str(source))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int8"], "A reward model stays fp32 and has no draft"),
        (["--block", "32"], "A reward model stays fp32"),
        (["--draft", "x"], "A reward model stays fp32"),
    ],
)
def test_options_of_language_models(run: Run, arguments: list[str], message: str) -> None:
    done = run("export", "--task", "reward", "somewhere", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_label_of_no_reward_model(run: Run) -> None:
    done = run("export", "somewhere", "--label", "x")
    assert done.returncode == 2
    assert "--label is an option of reward models: add --task reward." in done.stderr


def test_errors_are_those_of_specrun(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecrunError):
        write_reward(tmp_path, fetched(tmp_path))
