"""The text on disk: whole shards only, features that may go, files that are not what they must be."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specrun.export.training.text_store import TextStore
from specrun.models_cache.errors import IntegrityError

from .conftest import HIDDEN, TAPS, random_dialogue

WIDTH = TAPS * HIDDEN


def test_what_was_written_is_read(tmp_path: Path) -> None:
    store = TextStore(tmp_path / "a new folder" / "text")
    assert store.names() == []
    assert store.tokens() == store.features_bytes() == 0
    rng = np.random.default_rng(0)
    dialogues = [random_dialogue(rng) for _ in range(5)]
    for writer in (11, 2):
        store.add(dialogues[:3], writer)
        store.add(dialogues[3:], writer)
    assert store.names() == ["2-00000", "11-00000", "2-00001", "11-00001"]
    assert store.names(11) == ["11-00000", "11-00001"]
    assert store.names(1) == []
    shard = store.load("11-00001")
    for index, dialogue in enumerate(dialogues[3:]):
        part = slice(shard.starts[index], shard.starts[index + 1])
        np.testing.assert_array_equal(shard.tokens[part], dialogue.tokens)
        np.testing.assert_array_equal(shard.answer[part], dialogue.answer)
        np.testing.assert_array_equal(shard.features[part], dialogue.features)
    assert store.tokens() == 2 * sum(len(dialogue.tokens) for dialogue in dialogues)


@pytest.mark.parametrize("fatal", range(4))
def test_killed_while_a_shard_is_written(store: TextStore, fatal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended before one of the four steps: the text, its features, and both renames."""
    names, tokens = store.names(), store.tokens()
    steps = iter(range(4))

    def ending(real: Callable[..., None]) -> Callable[..., None]:
        def step(*arguments: object, **named: object) -> None:
            if next(steps) == fatal:
                raise SystemExit
            real(*arguments, **named)

        return step

    dialogues = [random_dialogue(np.random.default_rng(1)) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(np.lib.format, "write_array_header_1_0", ending(np.lib.format.write_array_header_1_0))
        patch.setattr(np, "savez_compressed", ending(np.savez_compressed))
        patch.setattr(os, "replace", ending(os.replace))
        with pytest.raises(SystemExit):
            store.add(dialogues)
    again = TextStore(store.folder)
    assert again.names() == names
    assert again.tokens() == tokens
    assert again.lacking(WIDTH) == []
    again.clean()
    assert len(list(store.folder.iterdir())) == 2 * len(names)
    again.add(dialogues)
    assert again.names() == [*names, "0-00003"]
    assert again.load("0-00003").features.shape == (sum(len(d.tokens) for d in dialogues), WIDTH)


def test_features_may_go(store: TextStore) -> None:
    before, kept = store.load("0-00001"), store.features_bytes()
    features = np.array(before.features)
    assert kept > store.tokens() * WIDTH * 2
    store.drop_features()
    assert store.features_bytes() == 0
    assert store.lacking() == store.lacking(WIDTH) == store.names() != []
    with pytest.raises(IntegrityError, match=r"0-00001\.npy does not hold the features .* computed again"):
        _ = store.load("0-00001").features
    store.add_features("0-00001", features)
    assert store.lacking() == ["0-00000", "0-00002"]
    np.testing.assert_array_equal(before.features, features)


class Evil:
    """Unpickling this ends the test."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return exec, ("raise SystemError('unpickled')",)


def _pickled(path: Path) -> None:
    arrays = np.array([Evil()], dtype=object)
    if path.suffix == ".npz":
        np.savez(path, tokens=arrays, answer=arrays, starts=arrays, allow_pickle=True)
    else:
        np.save(path, arrays, allow_pickle=True)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


BAD_TEXTS: dict[str, Callable[[Path], None]] = {
    "pickled": _pickled,
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "npy": lambda path: path.write_bytes(path.with_suffix(".npy").read_bytes()),
    "no starts": lambda path: np.savez(path, tokens=np.zeros(4, np.int32), answer=np.ones(4, bool)),
    "types": lambda path: _save(path, tokens=np.zeros(4)),
    "dimensions": lambda path: _save(path, tokens=np.zeros((4, 1), np.int32)),
    "lengths": lambda path: _save(path, answer=np.ones(3, bool)),
    "negative": lambda path: _save(path, tokens=np.array([1, 2, -3, 4], np.int32)),
    "starts": lambda path: _save(path, starts=np.array([0, 3, 2, 4])),
    "end": lambda path: _save(path, starts=np.array([0, 3])),
    "nothing": lambda path: _save(path, tokens=np.zeros(0, np.int32), answer=np.ones(0, bool), starts=np.array([0])),
}


def _save(path: Path, **arrays: np.ndarray) -> None:
    sound = {"tokens": np.zeros(4, np.int32), "answer": np.ones(4, bool), "starts": np.array([0, 4])}
    np.savez(path, **(sound | arrays))


@pytest.mark.parametrize("harm", BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_bad_text(store: TextStore, harm: Callable[[Path], None]) -> None:
    harm(store.folder / "0-00001.npz")
    with pytest.raises(IntegrityError, match=r"0-00001\.npz is no training text \(.*\): delete it"):
        TextStore(store.folder).tokens()


BAD_FEATURES: dict[str, Callable[[Path], None]] = {
    "pickled": _pickled,
    "cut": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "type": lambda path: np.save(path, np.zeros((len(np.load(path)), WIDTH), np.float32)),
    "length": lambda path: np.save(path, np.zeros((3, WIDTH), np.float16)),
    "dimensions": lambda path: np.save(path, np.zeros(len(np.load(path)), np.float16)),
}


@pytest.mark.parametrize("harm", BAD_FEATURES.values(), ids=BAD_FEATURES)
def test_bad_features_count_as_missing(store: TextStore, harm: Callable[[Path], None]) -> None:
    harm(store.folder / "0-00001.npy")
    assert store.lacking(WIDTH) == ["0-00001"]
    with pytest.raises(IntegrityError, match="does not hold the features"):
        _ = store.load("0-00001").features


def test_features_of_another_width_count_as_missing(store: TextStore) -> None:
    assert store.lacking(WIDTH) == []
    assert store.lacking(WIDTH + 1) == store.names()


def test_foreign_files_do_not_count(store: TextStore) -> None:
    names = store.names()
    for name in ("a-b.npz", "notes.txt", "1-x.npz", "0-00009.npy"):
        (store.folder / name).write_bytes(b"?")
    assert TextStore(store.folder).names() == names


@pytest.mark.skipif(sys.platform == "win32", reason="no limit of file sizes")
def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    """A limit of file sizes stands in for it: the error has the number of the system's own."""
    import resource

    store = TextStore(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            store.add_features("0-00000", np.ones((1000, 64), np.float16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert store.lacking() == []
    features = np.arange(12, dtype=np.float16).reshape(6, 2)
    for array in (features, features[::2], np.asfortranarray(features)):
        store.add_features("0-00000", array)
        np.testing.assert_array_equal(np.load(tmp_path / "0-00000.npy"), array)
