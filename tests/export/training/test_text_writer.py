"""The processes that write text: what they leave behind when they end, fail, or are ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specrun.export.training import text_writer
from specrun.export.training.text_store import TextStore
from specrun.export.training.text_writer import LEAST_SHARD, feature_width, fitting_prompts, write_text
from specrun.models_cache.errors import CacheError, SpecrunError, UsageError
from specrun.models_cache.layout import Bundle, load_bundle
from specrun.models_cache.progress import Progress, no_progress

from .conftest import TOKENS

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture
def store(written: TextStore, tmp_path: Path) -> TextStore:
    shutil.copytree(written.folder, tmp_path / "text")
    return TextStore(tmp_path / "text")


def write(
    bundle: Bundle,
    folder: Path,
    tokens: int = TOKENS,
    *,
    threads: int = 1,
    prompts: list[list[int]] | None = None,
    progress: Progress = no_progress,
) -> TextStore:
    return write_text(bundle, folder, tokens, seed=0, threads=threads, prompts=prompts, progress=progress)


def test_two_processes(written: TextStore, tiny_fp32: Bundle) -> None:
    assert written.tokens() >= TOKENS
    assert {name.split("-")[0] for name in written.names()} <= {"0", "1"}
    assert all(LEAST_SHARD <= written.tokens([name]) < LEAST_SHARD + 1000 for name in written.names())
    assert written.lacking(feature_width(tiny_fp32)) == []
    assert {path.suffix for path in written.folder.iterdir()} == {".npz", ".npy"}
    assert multiprocessing.active_children() == []


def test_enough_text_starts_nothing(store: TextStore, tiny_fp32: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_writer._Pool, "run", lambda *_: pytest.fail("nothing is left to do"))
    write(tiny_fp32, store.folder)


def test_features_that_went_are_computed_again(store: TextStore, tiny_fp32: Bundle) -> None:
    first, *others = store.names()
    before = np.array(store.load(first).features)
    (store.folder / f"{first}.npy").write_bytes(b"damaged")
    labels = set()
    write(tiny_fp32, store.folder, progress=lambda label, done, total: labels.add(label))
    assert labels == {"Computing the features of the text (tokens)"}
    assert store.names() == [first, *others]
    np.testing.assert_allclose(store.load(first).features, before, atol=2e-3, rtol=2e-3)


def test_what_a_killed_writer_left_goes(store: TextStore, tiny_fp32: Bundle) -> None:
    files = sorted(path.name for path in store.folder.iterdir())
    (store.folder / "0-00007.npy").write_bytes(b"half")
    (store.folder / "1-00007.part").write_bytes(b"half")
    write(tiny_fp32, store.folder)
    assert sorted(path.name for path in store.folder.iterdir()) == files


def test_an_interrupt_leaves_no_process(tiny_fp32: Bundle, tmp_path: Path) -> None:
    def interrupt(label: str, done: int, total: int | None) -> None:
        assert len(multiprocessing.active_children()) == 2
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        write(tiny_fp32, tmp_path / "text", threads=2, progress=interrupt)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_a_process_that_fails_says_why(tiny_fp32: Bundle, tmp_path: Path) -> None:
    shutil.copytree(tiny_fp32.path, tmp_path / "tiny")
    bundle = load_bundle(tmp_path / "tiny")
    (tmp_path / "tiny" / "tokenizer.json").unlink()
    with pytest.raises(SpecrunError, match=r"a process that writes training text failed: .*tokenizer\.json"):
        write(bundle, tmp_path / "text")
    assert multiprocessing.active_children() == []


@linux
def test_a_process_that_is_killed(tiny_fp32: Bundle, tmp_path: Path) -> None:
    def kill(label: str, done: int, total: int | None) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(SpecrunError, match="it was ended by signal 9; if memory is short, use fewer --threads"):
        write(tiny_fp32, tmp_path / "text", progress=kill)


ORPHANS = """
import multiprocessing, sys
from pathlib import Path
from specrun.export.training.text_writer import write_text
from specrun.models_cache.layout import load_bundle

def progress(label, done, total):
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)

if __name__ == "__main__":
    write_text(load_bundle(Path(sys.argv[1])), Path(sys.argv[2]), 10**7, seed=0, threads=1, prompts=None,
               progress=progress)
"""


@linux
def test_no_process_outlives_a_killed_command(tiny_fp32: Bundle, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ORPHANS, encoding="utf-8")
    command = [sys.executable, str(script), str(tiny_fp32.path), str(tmp_path / "text")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
    assert len(children) == 1
    assert _soon(lambda: not any(map(_lives, children)))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def _soon(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


def test_prompts_are_shared_out_and_answered_once(tiny_fp32: Bundle, tmp_path: Path) -> None:
    texts = ["Hello", "What is this?", "Hello", "x" * 2000, *[f"Number {index}" for index in range(9)]]
    prompts = fitting_prompts(tiny_fp32, texts)
    assert len(prompts) == 11
    store = write(tiny_fp32, tmp_path / "text", 10**6, threads=2, prompts=prompts[:8])
    assert text_writer._unanswered(store, prompts) == prompts[8:]
    assert sum(len(store.load(name).starts) - 1 for name in store.names()) == 8
    names = store.names()
    write(tiny_fp32, tmp_path / "text", 10**6, prompts=prompts)
    assert text_writer._unanswered(store, prompts) == []
    assert sum(len(store.load(name).starts) - 1 for name in store.names()) == 11
    assert set(names) < set(store.names())


def test_conversations_as_prompts(tiny_fp32: Bundle) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (prompt,) = fitting_prompts(tiny_fp32, [turns])
    assert prompt.count(256) == 4
    with pytest.raises(UsageError, match="No prompt has at most 520 tokens"):
        fitting_prompts(tiny_fp32, ["y" * 3000])


def test_a_small_disk(tiny_fp32: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_writer, "free_bytes", lambda folder: 1_200_000_000)
    with pytest.raises(CacheError, match=r"need 3\.84 GB below .*text, and 1\.20 GB are free: .*--tokens"):
        write(tiny_fp32, tmp_path / "text", 10**7)
    assert not (tmp_path / "text").exists()


def test_as_many_processes_as_fit_the_memory(tiny_fp32: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_PHYS_PAGES": 10**6, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__, raising=False)
    assert text_writer._writers(tiny_fp32, 4) == 4
    most = text_writer._writers(tiny_fp32, 1000)
    assert 4 < most < 1000
    pages["SC_PHYS_PAGES"] //= 2
    assert text_writer._writers(tiny_fp32, 1000) == pytest.approx(most / 2, abs=1)
    pages["SC_PHYS_PAGES"] = 1
    assert text_writer._writers(tiny_fp32, 1000) == 1
    monkeypatch.delattr(os, "sysconf")
    assert text_writer._writers(tiny_fp32, 3) == 3
