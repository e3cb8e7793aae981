"""Conversations that are forked, saved and restored: the same texts and logits as before, and nothing else is read."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import CacheError, IntegrityError, SpecrunError
from specrun.runtime import ChatSession, Engine, session_file

from .checks import read
from .conftest import TinyModels
from .tiny_bundles import PROMPT


def talk(chat: ChatSession, *texts: str, **options: Any) -> list[tuple[int, ...]]:
    """Token ids of the answers."""
    ids = []
    for text in texts:
        _, result = read(chat.send(text, max_tokens=12, **options))
        ids.append(result.token_ids)
    return ids


def logits_of(engine: Engine, chat: ChatSession) -> np.ndarray:
    return engine.logits(engine.encode(list(chat.messages)))


@pytest.fixture
def saved(models: TinyModels, tmp_path: Path) -> Path:
    """A conversation of two turns of `tgt`, in a file."""
    chat = models.engine("tgt").chat("Be brief.")
    talk(chat, "one", "two")
    path = tmp_path / "talk é.npz"
    chat.save(path)
    return path


def test_a_fork_goes_its_own_way(models: TinyModels) -> None:
    """Two conversations that share a beginning, answered in turn: each equals one that was alone."""
    engine, fresh = models.engine("tgt", "mix"), models.engine("tgt")
    chat = engine.chat("Be brief.")
    talk(chat, "one")
    other = chat.fork()
    assert other.messages == chat.messages
    for left, right in (("two", "zwei"), ("three", "drei")):
        for session, text in ((chat, left), (other, right)):
            messages = [*session.messages, {"role": "user", "content": text}]
            fresh.reset()
            expected = fresh.generate(messages, method="none", max_tokens=12)
            _, result = read(session.send(text, method="draft", draft_length=3, max_tokens=12))
            assert result.token_ids == expected.token_ids
            assert result.usage.cached_tokens > 20  # at least what they share
    other.rewind(3)
    assert len(other.messages) == 1
    assert len(chat.messages) == 7


@pytest.mark.parametrize("method", ["none", "ngram", "eagle+ngram", "medusa"])
def test_restored_texts_and_logits_equal_those_before(models: TinyModels, tmp_path: Path, method: str) -> None:
    """Into a new engine: the next turns, the logits and the reuse are what they were."""
    engine = models.engine("heads")
    chat = engine.chat("Be brief.")
    talk(chat, "one", "two", method=method)
    path = tmp_path / "talk.npz"
    chat.save(path)
    assert [*tmp_path.iterdir()] == [path]  # no temporary file is left
    before = logits_of(engine, chat)
    expected = talk(chat.fork(), "three", "four", method=method)
    with Engine.load("heads", threads=1) as other:
        restored = other.load_session(path)
        assert restored.messages == chat.messages
        stream = restored.send("three", method="none", max_tokens=12)
        _, first = read(stream)
        assert first.token_ids == expected[0]
        assert first.usage.cached_tokens > 40
        restored.rewind()
        assert talk(restored, "three", "four", method=method) == expected
        restored.rewind(2)
        assert np.array_equal(logits_of(other, restored), before)


def test_keys_and_values_of_another_machine_are_not_used(
    models: TinyModels, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits that this machine might not have made: the conversation is read again, and answered the same."""
    engine = models.engine("tgt")
    expected = talk(engine.load_session(saved), "three")
    engine.reset()
    monkeypatch.setattr(session_file, "_machine", lambda engine: "another")
    restored = engine.load_session(saved)
    _, result = read(restored.send("three", max_tokens=12))
    assert result.usage.cached_tokens == 0
    assert [result.token_ids] == expected


def test_an_empty_conversation(models: TinyModels, tmp_path: Path) -> None:
    engine = models.engine("tgt")
    engine.chat().save(tmp_path / "empty.npz")
    restored = engine.load_session(tmp_path / "empty.npz")
    assert restored.messages == ()
    assert talk(restored, "one") == talk(engine.chat(), "one")


def test_a_smaller_context_reads_again(models: TinyModels, saved: Path) -> None:
    with Engine.load("tgt", threads=1, context=60) as small:
        restored = small.load_session(saved)
        assert small.target.length == 0
        assert len(restored.messages) == 5


def test_another_model_is_refused(models: TinyModels, saved: Path) -> None:
    """Other weights, and the same weights in another precision; the engine is left as it was."""
    for name in ("rnd", "tgt-int8"):
        engine = models.engine(name)
        expected = engine.generate(PROMPT, max_tokens=8, raw=True).token_ids
        with pytest.raises(IntegrityError, match=f"saved with tgt .*another model, {name}") as error:
            engine.load_session(saved)
        assert "\n" not in str(error.value)
        assert engine.generate(PROMPT, max_tokens=8, raw=True).token_ids == expected


Members = dict[str, bytes]


def rewritten(path: Path, change: Callable[[Members], None], compression: int = zipfile.ZIP_STORED) -> Path:
    """A copy of a file with its members changed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    other = path.with_name("changed.npz")
    with zipfile.ZipFile(other, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return other


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=array.dtype == object)
    return stream.getvalue()


def header(members: Members, **changes: Any) -> None:
    values = json.loads(np.load(io.BytesIO(members["header.npy"])).tobytes())
    members["header.npy"] = npy(np.frombuffer(json.dumps(values | changes).encode(), np.uint8))


CHANGES: dict[str, Callable[[Members], None]] = {
    "no header": lambda m: m.pop("header.npy") and None,
    "a header that is no JSON": lambda m: m.update({"header.npy": npy(np.frombuffer(b"{", np.uint8))}),
    "a nested header": lambda m: m.update({"header.npy": npy(np.frombuffer(b"[" * 100_000, np.uint8))}),
    "another format": lambda m: header(m, format=2),
    "no messages": lambda m: header(m, messages=None),
    "messages of another kind": lambda m: header(m, messages=[{"role": "user", "content": 5}]),
    "a pickle": lambda m: m.update({"tokens.npy": npy(np.array([{}], object))}),
    "no tokens": lambda m: m.pop("tokens.npy") and None,
    "a token of no vocabulary": lambda m: m.update({"tokens.npy": npy(np.full(9, 5000, np.uint32))}),
    "more tokens than keys": lambda m: m.update({"tokens.npy": npy(np.full(30, 5, np.uint32))}),
    "more tokens than positions": lambda m: m.update({"tokens.npy": npy(np.full(3000, 5, np.uint32))}),
    "a buffer too few": lambda m: m.pop("kv.3.npy") and None,
    "a buffer of another type": lambda m: m.update({"kv.0.npy": npy(np.zeros((2, 1, 16), np.float64))}),
    "a buffer of another shape": lambda m: m.update({"kv.0.npy": npy(np.zeros((1, 3), np.float32))}),
    "no numbers": lambda m: m.update({"kv.0.npy": npy(np.full_like(np.load(io.BytesIO(m["kv.0.npy"])), np.nan))}),
    "a cut buffer": lambda m: m.update({"kv.1.npy": m["kv.1.npy"][:-4]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_files_are_refused(models: TinyModels, saved: Path, change: str) -> None:
    engine = models.engine("tgt")
    with pytest.raises(IntegrityError, match=r"not a saved conversation|another model") as error:
        engine.load_session(rewritten(saved, CHANGES[change]))
    assert "\n" not in str(error.value)
    assert engine.target.length == 0 or engine._target_tokens == []


def test_damaged_files_are_refused(models: TinyModels, saved: Path, rng: np.random.Generator) -> None:
    """Cut anywhere, a byte flipped anywhere in a member's data, compressed, or something else."""
    engine = models.engine("tgt")
    whole = saved.read_bytes()
    other = saved.with_name("damaged.npz")
    with zipfile.ZipFile(saved) as archive:
        data_of_kv = archive.getinfo("kv.2.npy").header_offset + 400
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        other.write_bytes(whole[:cut])
        with pytest.raises(IntegrityError, match="not a saved conversation"):
            engine.load_session(other)
    for place in (data_of_kv, data_of_kv + 500):
        other.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(IntegrityError, match="not a saved conversation"):
            engine.load_session(other)
    with pytest.raises(IntegrityError, match="compressed"):
        engine.load_session(rewritten(saved, lambda members: None, zipfile.ZIP_DEFLATED))
    other.write_bytes(rng.bytes(5000))
    with pytest.raises(IntegrityError, match="not a saved conversation"):
        engine.load_session(other)
    with pytest.raises(CacheError, match="Cannot read"):
        engine.load_session(saved.with_name("nothing.npz"))
    with pytest.raises(CacheError, match="Cannot write"):
        engine.chat().save(saved.parent / "no folder" / "talk.npz")
    assert len(engine.load_session(saved).messages) == 5


def test_an_answer_that_is_still_written(models: TinyModels, tmp_path: Path) -> None:
    """Neither saved nor forked in the middle; afterwards what was delivered counts."""
    chat = models.engine("tgt").chat()
    stream = chat.send("one", max_tokens=30)
    next(stream)
    for act in (lambda: chat.save(tmp_path / "x.npz"), chat.fork):
        with pytest.raises(SpecrunError, match="still being written"):
            act()
    assert not (tmp_path / "x.npz").exists()
    stream.close()
    chat.save(tmp_path / "x.npz")
    assert models.engine("tgt").load_session(tmp_path / "x.npz").messages == chat.messages
