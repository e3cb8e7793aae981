"""`specrun train`: from nothing, or from prompts, to a speculator that works; ended and begun again; refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from specrun.cli import opening
from specrun.cli.main import main
from specrun.export.speculator_config import MedusaConfig
from specrun.export.speculators import attach_speculator
from specrun.export.training import train as train_module
from specrun.export.training import trainer
from specrun.export.training.text_store import TextStore
from specrun.export.training.text_writer import write_text
from specrun.models_cache.layout import Bundle, find_bundle
from specrun.models_cache.progress import no_progress

from ..conftest import INTERRUPTIBLE
from ..runtime import tiny_bundles, tiny_heads
from ..runtime.toys import TABLE

TOKENS = 5000
OPTIONS = ("--model", "table", "--tokens", str(TOKENS), "--threads", "1")
SMALL = """
import functools, os, signal
from specrun.export.training import train, trainer
train.TrainingOptions = functools.partial(trainer.TrainingOptions, rows=2, length=128)
train.LEARNING_RATES = dict.fromkeys(train.LEARNING_RATES, 5e-3)
trainer.MEASURES, trainer.HELD_OUT_BATCHES, trainer.WARMUP_STEPS, trainer.CHECKPOINT_S = 4, 2, 4, 0.0
"""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Small batches, few measurements, one thread; `SMALL` does the same in another process."""
    options = functools.partial(trainer.TrainingOptions, rows=2, length=128)
    monkeypatch.setattr(train_module, "TrainingOptions", options)
    monkeypatch.setattr(train_module, "LEARNING_RATES", dict.fromkeys(train_module.LEARNING_RATES, 5e-3))
    for name, value in (("MEASURES", 4), ("HELD_OUT_BATCHES", 2), ("WARMUP_STEPS", 4)):
        monkeypatch.setattr(trainer, name, value)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def table_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache root with a model whose text is a fixed table's, and text that it wrote; copy it, do not change it."""
    root = tmp_path_factory.mktemp("table home")
    folder = tmp_path_factory.mktemp("table") / "table"
    logits = tiny_bundles.table_logits(TABLE)
    tiny_bundles.write_model(folder, tiny_bundles.bigram_tensors(logits), vocabulary=288, hidden=288, context=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRUN_HOME", str(root))
        bundle = tiny_bundles.export_tiny("table", folder)
        text = text_folder(bundle, root)
        write_text(bundle, text, TOKENS, seed=0, threads=1, prompts=None, progress=no_progress)
    return root


@pytest.fixture
def table(table_home: Path, isolated_home: Path) -> Bundle:
    """The model, with its text, in this test's cache."""
    shutil.copytree(table_home, isolated_home)
    return find_bundle("table")


@pytest.fixture
def bare(table: Bundle, isolated_home: Path) -> Bundle:
    """The model without any text."""
    shutil.rmtree(isolated_home / "training")
    return table


def text_folder(bundle: Bundle, home: Path) -> Path:
    return home / "training" / bundle.target_digest[:16] / "text"


def train(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *arguments, *OPTIONS])


def texts(method: str) -> tuple[str, float]:
    """What generate writes with a method, and its tokens a round."""
    arguments = ["generate", "--model", "table", "--max-tokens", "40", "--json", "--draft-length", "3"]
    result = CliRunner().invoke(main, [*arguments, "--method", method, "List the letters: a"])
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    return answer["text"], answer["speculation"]["mean_accepted_tokens"]


def test_a_name_that_is_taken_while_waiting(table: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another training of that name ended meanwhile: nothing is computed in vain."""
    hold_lock = train_module.hold_lock

    @contextlib.contextmanager
    def waiting(path: Path, *arguments: Any) -> Iterator[None]:
        if path.name == "training.lock":
            attach_speculator(table, tiny_heads.speculator(table, "medusa", MedusaConfig(1, 1)))
            monkeypatch.setattr(train_module, "write_text", None)
        with hold_lock(path, *arguments):
            yield

    monkeypatch.setattr(train_module, "hold_lock", waiting)
    result = train("medusa")
    assert result.exit_code == 2
    assert "has a speculator 'medusa' already" in result.stderr


@pytest.mark.parametrize("method", ["medusa", "eagle", "draft"])
def test_to_a_working_speculator(table: Bundle, isolated_home: Path, method: str) -> None:
    result = train(method, "--json", "--passes", "6")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["name"], answer["method"], answer["model"]) == (method, method, "table")
    (installed,) = table.speculators()
    assert installed.name == method
    assert answer["path"] == str(installed.path)
    assert (installed.path / "report.svg").read_text(encoding="utf-8").startswith("<svg")
    assert [list(row) for row in installed.manifest.acceptance] == answer["acceptance"]
    report = answer["report"]
    assert report["text_tokens"] >= TOKENS
    assert report["held_out"]["mean_accepted_tokens"] > 1.0
    plain, _ = texts("none")
    text, rate = texts(method)
    assert text == plain != ""
    assert rate > 1.0
    # The text stays, what is large does not; nor does the checkpoint.
    store = TextStore(text_folder(table, isolated_home))
    assert store.tokens() >= TOKENS
    assert store.features_bytes() == answer["features_bytes"] == 0
    weights = Path(answer["weights"])
    assert sorted(path.name for path in weights.parent.iterdir()) == ["weights"]


def test_from_nothing(bare: Bundle, isolated_home: Path) -> None:
    result = train("medusa", "--passes", "1", "--keep-features", "--name", "mine")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "mine\n"
    assert "tokens a round on held-out text, as a chain of 4" in result.stderr
    assert "features for the next training: 0.0" in result.stderr
    assert TextStore(text_folder(bare, isolated_home)).features_bytes() > TOKENS * 3 * 288 * 2


def test_the_next_method_computes_the_features_again(table: Bundle, isolated_home: Path) -> None:
    store = TextStore(text_folder(table, isolated_home))
    store.drop_features()
    names = store.names()
    result = train("draft", "--passes", "1", "--keep-features")
    assert result.exit_code == 0, result.stderr
    assert store.names() == names
    assert store.lacking() == []


def test_prompts_of_a_file(bare: Bundle, isolated_home: Path, tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    lines = [{"prompt": f"Go on: {a}{b}"} for a in letters for b in letters[:4]]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = train("medusa", "--passes", "1", "--prompts", str(file), "--tokens", "9000")
    assert result.exit_code == 0, result.stderr
    (folder,) = (isolated_home / "training" / bare.target_digest[:16]).glob("answers-*/")
    store = TextStore(folder)
    assert store.tokens() >= TOKENS
    shard = store.load(store.names()[0])
    assert 0.3 < shard.answer.mean() < 1


ENDING = """
step = trainer.Trainer._step
def ending(self, batch, optimiser):
    if self.state.step == 5:
        os.kill(os.getpid(), signal.{signal})
    return step(self, batch, optimiser)
trainer.Trainer._step = ending
from specrun.cli.main import main
main()
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_ended_and_begun_again(table: Bundle, isolated_home: Path, name: str) -> None:
    if not hasattr(signal, name):
        pytest.skip("not on this system")
    code = INTERRUPTIBLE + SMALL + ENDING.format(signal=name)
    command = [sys.executable, "-c", code, "train", "medusa", "--passes", "3", *OPTIONS]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", env=dict(os.environ), check=False)
    assert ended.returncode == (130 if name == "SIGINT" else -signal.SIGKILL), ended.stderr
    assert "Traceback" not in ended.stderr
    assert ("the same command goes on from there" in ended.stderr) == (name == "SIGINT")
    assert table.speculators() == []
    checkpoint = isolated_home / "training" / table.target_digest[:16] / "medusa" / "checkpoint.safetensors"
    assert checkpoint.is_file()
    other = train("medusa", "--passes", "4")
    assert other.exit_code == 2
    assert "is of a training with other settings or other text" in other.stderr
    result = train("medusa", "--passes", "3", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)["report"]
    assert report["tokens_seen"] > 5 * 2 * 128
    assert not checkpoint.exists()


def test_restart(table: Bundle, isolated_home: Path) -> None:
    folder = isolated_home / "training" / table.target_digest[:16] / "medusa"
    folder.mkdir()
    (folder / "checkpoint.safetensors").write_bytes(b"no checkpoint")
    result = train("medusa", "--passes", "1")
    assert result.exit_code == 1
    assert "pass --restart to begin the training anew" in result.stderr
    assert train("medusa", "--passes", "1", "--restart").exit_code == 0


def test_a_name_that_is_taken(table: Bundle) -> None:
    assert train("medusa", "--passes", "1", "--keep-features").exit_code == 0
    (first,) = table.speculators()
    result = train("draft", "--name", "medusa")
    assert result.exit_code == 2
    assert "table has a speculator 'medusa' already: choose another name (--name), or --force" in result.stderr
    assert train("medusa", "--passes", "2", "--force").exit_code == 0
    (second,) = table.speculators()
    assert second.digest != first.digest


def test_going_on_from_a_speculator(table: Bundle) -> None:
    """The second training begins where the first one ended, with its vocabulary, and counts from there."""
    first = train("eagle", "--passes", "4", "--keep-features", "--json")
    assert first.exit_code == 0, first.stderr
    before = json.loads(first.stdout)["report"]
    (installed,) = table.speculators()
    vocabulary = installed.vocabulary()
    second = train("eagle", "--from", "eagle", "--passes", "1", "--force", "--json")
    assert second.exit_code == 0, second.stderr
    report = json.loads(second.stdout)["report"]
    seen = before["tokens_seen"]
    assert report["tokens_seen_before"] == seen < report["tokens_seen"]
    assert report["curve"][: len(before["curve"])] == before["curve"]
    assert all(tokens > seen for tokens, *_ in report["curve"][len(before["curve"]) :])
    fresh = before["curve"][0][1]
    assert report["curve"][len(before["curve"])][1] < (fresh + before["curve"][-1][1]) / 2  # the loss goes on low
    (installed,) = table.speculators()
    assert np.array_equal(installed.vocabulary(), vocabulary)
    plain, _ = texts("none")
    assert texts("eagle")[0] == plain


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens_seen": "x"},
        {"tokens_seen": -1},
        {"minutes": "q"},
        {"curve": None},
        {"curve": [["a", {}, []]]},
        {"curve": [[1, 2]]},
        {"curve": [[1, 2, 1e400]]},
    ],
)
def test_going_on_from_a_report_that_cannot_be(
    bare: Bundle, isolated_home: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Found before any text is written."""
    made = tiny_heads.speculator(bare, "medusa", MedusaConfig(1, 1))
    start = dataclasses.replace(made, report={"tokens_seen": 5, "minutes": 1.0, "curve": [[5, 2.0, 1.5]]} | changes)
    monkeypatch.setattr("specrun.export.speculator_weights.read_speculator", lambda path: start)
    attach_speculator(bare, made)
    line = refused(1, "medusa", "--from", "medusa", "--force")
    assert "The report of speculator 'medusa' is not valid" in line
    assert "train without --from" in line
    assert not (isolated_home / "training").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--passes", "nan"),
        ("--passes", "inf"),
        ("--passes", "1e300"),
        ("--passes", "0"),
        ("--passes", "x"),
        ("--seed", "99999999999999999999999"),
        ("--seed", "-1"),
    ],
)
def test_numbers_that_cannot_be(bare: Bundle, isolated_home: Path, arguments: tuple[str, ...]) -> None:
    """Found before any text is written."""
    result = train("medusa", *arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[0]}'" in result.stderr
    assert not (isolated_home / "training").exists()


def test_going_on_from_something_else(table: Bundle) -> None:
    assert train("medusa", "--passes", "1", "--keep-features").exit_code == 0
    assert "Speculator 'medusa' is not what `specrun train eagle` makes" in refused(2, "eagle", "--from", "medusa")
    assert "no speculator" in refused(1, "medusa", "--from", "nope", "--force")


def refused(code: int, *arguments: str) -> str:
    result = train(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_without_torch(table: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert refused(2, "medusa") == "Error: Training needs torch: install it with `pip install 'specrun[train]'`."


def test_a_bundle_without_features(table: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    old = dataclasses.replace(table, manifest=dataclasses.replace(table.manifest, features=None))
    monkeypatch.setattr(opening, "ensure_model", lambda name: old)
    monkeypatch.setattr("specrun.cli.train.ensure_model", lambda name: old)
    assert "was exported before learned heads were known: export it again, with --force" in refused(1, "eagle")


def test_too_little_text(table: Bundle, isolated_home: Path) -> None:
    store = TextStore(text_folder(table, isolated_home))
    for name in store.names()[1:]:
        (store.folder / f"{name}.npz").unlink()
    result = CliRunner().invoke(main, ["train", "medusa", "--model", "table", "--tokens", "1", "--threads", "1"])
    assert result.exit_code == 2
    assert "There is too little text to hold some out: train on more tokens (--tokens)" in result.stderr


@pytest.mark.parametrize("name", ["a/b", ".hidden", ""])
def test_a_bad_name(table: Bundle, name: str) -> None:
    assert "cannot name a model" in refused(2, "medusa", "--name", name)


def test_text_of_another_model(table: Bundle, isolated_home: Path) -> None:
    store = TextStore(text_folder(table, isolated_home))
    shard = store.load(store.names()[0])
    path = store.folder / f"{store.names()[0]}.npz"
    np.savez_compressed(path, tokens=shard.tokens + np.int32(999), answer=shard.answer, starts=shard.starts)
    result = train("medusa")
    assert result.exit_code == 1
    assert "holds text of another model" in result.stderr
