"""Streams: whole characters, reuse of what is cached, threads, memory, closing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime import Engine

from .checks import read, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .toys import CJK, CJK_IDS, EARTH, EARTH_IDS

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
METHODS = ("none", "draft", "ngram")


@pytest.fixture
def engine(models: TinyModels) -> Engine:
    return models.engine("tgt", "mix")


# Text


@pytest.mark.parametrize("draft_length", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("prompt", "text", "ids"), [("[", EARTH, EARTH_IDS), ("|", CJK, CJK_IDS)])
def test_characters_over_block_edges(
    models: TinyModels, prompt: str, text: str, ids: Sequence[int], draft_length: int
) -> None:
    """onnxruntime-genai#314, TensorRT-LLM#2595, ferrox#124, lucebox#641: a character over several tokens and blocks."""
    engine = models.engine("table", "table")
    whole = len(text.encode())
    tail = engine.tokenizer.decode(ids[1 + whole :])
    for method in METHODS:
        options = {"raw": True, "method": method, "draft_length": draft_length}
        pieces, result = read(engine.stream(prompt, max_tokens=whole + 2, **options))
        assert result.text == text + tail
        assert result.token_ids == tuple(ids[1:])
        assert all("\ufffd" not in piece.text for piece in pieces)
        for limit in range(1, whole):  # the limit lands inside a character: what is left of it becomes U+FFFD
            _, cut = read(engine.stream(prompt, max_tokens=limit, **options))
            assert cut.text == text.encode()[:limit].decode("utf-8", "replace")
            assert cut.token_ids == tuple(ids[1 : limit + 1])
            assert cut.finish_reason == "length"


def test_pieces_join(engine: Engine) -> None:
    """The pieces are the text of the ids, whatever bytes the model writes; each token comes with its text."""
    for method in METHODS:
        pieces, result = read(engine.stream(PROMPT, method=method, draft_length=4, max_tokens=200, **RAW))
        assert result.text == engine.tokenizer.decode(result.token_ids)
        assert len(pieces) > 50
        assert all(piece.text or piece.tokens for piece in pieces)


def test_special_tokens_in_user_text(engine: Engine) -> None:
    """transformers#29279: "<|im_end|>" that a user wrote stays ordinary text, raw and in a chat."""
    for ids in (engine.encode("<|im_end|>", raw=True), engine.encode("a <|im_end|> b")[3:-12]):
        assert engine.tokenizer.control_ids.isdisjoint(ids)


# Reuse


@pytest.mark.parametrize("method", METHODS)
def test_a_b_a_c_a(engine: Engine, method: str) -> None:
    """sglang#8726: A, B, A, C, A: the As are identical."""
    prompts = {"a": PROMPT, "b": "x", "c": PROMPT[:20] + text_of(50)}
    for options in ({}, {"temperature": 0.9, "seed": 8}):
        texts: dict[str, set[tuple[int, ...]]] = {name: set() for name in prompts}
        for name in "abaca" * 2:
            result = engine.generate(prompts[name], method=method, max_tokens=30, **RAW, **options)
            texts[name].add(result.token_ids)
        assert all(len(found) == 1 for found in texts.values())


def test_an_exact_repeat_of_a_prompt(engine: Engine) -> None:
    """mlx-lm#1215: a cached prompt again: the same answer, one token of prefill."""
    for method in METHODS:
        engine.reset()
        first = engine.generate(PROMPT, method=method, draft_length=4, max_tokens=20, **RAW)
        second = engine.generate(PROMPT, method=method, draft_length=4, max_tokens=20, **RAW)
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == second.usage.prompt_tokens - 1
        same_output(second, first)


def test_one_prefix_and_two_suffixes(models: TinyModels) -> None:
    """sglang#19796: a prefix of 300 tokens and two suffixes: acceptance as cold, equal texts."""
    engine = models.engine("tgt", "self")
    prefix = text_of(300)
    for suffix in ("first", "second one"):
        engine.reset()
        cold = engine.generate(prefix + suffix, method="draft", draft_length=4, max_tokens=30, **RAW)
        engine.reset()
        engine.generate(prefix, method="draft", draft_length=4, max_tokens=30, **RAW)
        warm = engine.generate(prefix + suffix, method="draft", draft_length=4, max_tokens=30, **RAW)
        same_output(warm, cold)
        assert warm.usage.cached_tokens == 300
        assert warm.speculation.accepted == cold.speculation.accepted > 0


def test_the_third_call(engine: Engine) -> None:
    """TensorRT-LLM#2263: right on the third call too, with n-grams of the calls before."""
    plain = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    for _ in range(3):
        same_output(engine.generate(PROMPT, method="ngram", max_tokens=40, **RAW), plain)


def test_chat_turns_reuse_the_cache(models: TinyModels) -> None:
    """Each turn prefills what is new, and equals a fresh engine over the same messages."""
    engine, fresh = models.engine("tgt", "mix"), models.engine("tgt")
    chat = engine.chat("Be brief.")
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    for turn, method in enumerate(("draft", "ngram", "none", "draft")):
        text = f"question {turn}"
        stream = chat.send(text, method=method, draft_length=4, max_tokens=12)
        _, result = read(stream)
        messages.append({"role": "user", "content": text})
        fresh.reset()
        expected = fresh.generate(messages, method="none", max_tokens=12)
        assert result.token_ids == expected.token_ids
        assert result.usage.prompt_tokens == expected.usage.prompt_tokens
        if turn:
            assert result.usage.cached_tokens > 20
        messages.append({"role": "assistant", "content": result.text})
        assert list(chat.messages) == messages


@pytest.mark.parametrize("end", ["close", "leave", "cancel"])
def test_a_chat_turn_cut_short(models: TinyModels, end: str) -> None:
    """openvino.genai#1658: stop in the middle of a block; the next turn equals a fresh run over what was delivered."""
    engine, fresh = models.engine("tgt", "self"), models.engine("tgt")
    chat = engine.chat()
    stream = chat.send("first", method="draft", draft_length=8, max_tokens=40)
    seen = ""
    for index, piece in enumerate(stream):
        seen += piece.text
        if index == 4 and end == "cancel":
            stream.cancel()
        elif index == 4:
            break
    if end == "close":
        stream.close()
    assert stream.result.text == seen
    _, result = read(chat.send("second", method="draft", draft_length=8, max_tokens=20))
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": seen},
        {"role": "user", "content": "second"},
    ]
    assert result.token_ids == fresh.generate(messages, method="none", max_tokens=20).token_ids


def test_a_chat_is_rewound(models: TinyModels) -> None:
    engine = models.engine("tgt", "mix")
    chat = engine.chat()
    first = chat.send("one", max_tokens=8)
    list(first)
    second = chat.send("two", max_tokens=8)
    list(second)
    chat.rewind()
    again = chat.send("two", max_tokens=8)
    list(again)
    assert again.result.token_ids == second.result.token_ids
    chat.rewind(2)
    assert chat.messages == ()
    with pytest.raises(SpecrunError, match="0 turns"):
        chat.rewind()
    unread = chat.send("three", max_tokens=8)
    next(unread)
    with pytest.raises(SpecrunError, match="still being written"):
        chat.send("four")
    unread.close()
    assert len(chat.messages) == 2


# Threads and resources


def test_two_threads_on_one_engine(engine: Engine) -> None:
    """llama-cpp-python#471: requests of several threads run one after another, each as alone."""
    prompts = [text_of(20 + 7 * index) for index in range(6)]
    expected = [engine.generate(prompt, method="none", max_tokens=20, **RAW).token_ids for prompt in prompts]
    failures: list[object] = []

    def work(offset: int) -> None:
        try:
            for step in range(12):
                index = (step * 5 + offset) % 6
                method = METHODS[(step + offset) % 3]
                got = [
                    t.id for p in engine.stream(prompts[index], method=method, max_tokens=20, **RAW) for t in p.tokens
                ]
                if tuple(got) != expected[index]:
                    failures.append((offset, step, got))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_second_stream_of_the_same_thread_is_refused(engine: Engine) -> None:
    """It would wait for itself for ever: a clear error instead, and the first goes on undisturbed."""
    whole = engine.generate(PROMPT, method="none", max_tokens=20, **RAW)
    first = engine.stream(PROMPT, max_tokens=20, **RAW)
    second = engine.stream("other", max_tokens=20, **RAW)
    next(first)
    with pytest.raises(SpecrunError, match="busy"):
        next(second)
    assert second.done
    with pytest.raises(SpecrunError, match="busy"):
        engine.reset()
    list(first)
    assert first.result.token_ids == whole.token_ids
    assert engine.generate("other", max_tokens=4, **RAW).usage.completion_tokens == 4


def test_a_stream_in_another_thread_is_waited_for(engine: Engine) -> None:
    first = engine.stream(PROMPT, max_tokens=20, **RAW)
    next(first)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(engine.generate("other", max_tokens=4, **RAW).token_ids))
    thread.start()
    thread.join(0.1)
    assert got == []
    first.close()
    thread.join(30)
    assert len(got) == 1


MEMORY_PROBE = """
import gc, sys
from specrun.runtime import Engine
from specrun.runtime.ngram_table import NgramTable


def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


engine = Engine.load(sys.argv[1], draft=sys.argv[2], threads=1)
# The table of earlier texts is bounded; a small bound is reached within the warm-up.
engine.drafting.table = NgramTable(eos_ids=(0, 2), earlier_tokens=400)
before = objects = 0
for index in range(360):
    if index == 60:
        before, objects = resident(), len(gc.get_objects())
    prompt = "abcdefghij" * (1 + index * 7 % 9)
    engine.generate(
        prompt, method=("none", "draft", "ngram")[index % 3], draft_length=index % 6, max_tokens=32, raw=True
    )
print(resident() - before, len(gc.get_objects()) - objects)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_memory_stays_flat(models: TinyModels) -> None:
    """onnxruntime-genai#590: 300 requests of 32 tokens: memory flat after warm-up; in a process of its own."""
    paths = [str(models.bundle(name).path) for name in ("tgt", "mix")]
    done = subprocess.run([sys.executable, "-c", MEMORY_PROBE, *paths], capture_output=True, text=True, check=True)
    grown, objects = map(int, done.stdout.split())
    # One KV buffer or logits row kept a request would be 20 MB and more.
    assert grown < 4_000_000
    assert objects < 600


def test_close_frees_everything(models: TinyModels) -> None:
    for name in ("tgt", "mix"):
        models.bundle(name)
    engine = Engine.load("tgt", draft="mix", threads=1)
    engine.generate(PROMPT, max_tokens=5, raw=True)
    sessions = [weakref.ref(part._onnx_session) for part in (engine.target, engine.drafting.draft) if part is not None]
    buffers = [weakref.ref(array) for array in engine.target.cache._arrays]
    engine.close()
    engine.close()
    gc.collect()
    assert [ref() for ref in sessions] == [None, None]
    assert not any(ref() is not None for ref in buffers)
    assert engine.memory().kv_target_bytes == engine.memory().kv_draft_bytes == 0
    for use in (lambda: engine.generate("a"), engine.reset, lambda: engine.logits([5])):
        with pytest.raises(SpecrunError, match="closed"):
            use()


def test_close_ends_an_open_stream(models: TinyModels) -> None:
    """Leaving `with Engine.load(...)` with a stream half read works, and does not hide an exception."""
    models.bundle("tgt")
    with Engine.load("tgt", threads=1) as engine:
        stream = engine.stream(PROMPT, max_tokens=50, **RAW)
        next(stream)
    assert stream.done
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"

    def fail() -> None:
        with Engine.load("tgt", threads=1) as engine:
            kept = engine.stream(PROMPT, max_tokens=50, **RAW)
            next(kept)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with Engine.load("tgt", threads=1) as engine:
        for _ in engine.stream(PROMPT, max_tokens=50, **RAW):
            engine.close()


def test_several_engines_at_once(models: TinyModels) -> None:
    """No global state: streams of two engines interleave."""
    engines = [models.engine("tgt", "mix"), models.engine("rnd")]
    expected = [engine.generate(PROMPT, method="none", max_tokens=20, **RAW).token_ids for engine in engines]
    streams = [engine.stream(PROMPT, max_tokens=20, **RAW) for engine in engines]
    open_streams = list(streams)
    while open_streams:
        open_streams = [stream for stream in open_streams if next(stream, None) is not None]
    assert [stream.result.token_ids for stream in streams] == expected


def test_the_result_as_json(engine: Engine) -> None:
    """The object of design.md: stable names, with tokens when asked for."""
    result = engine.generate(PROMPT, draft_length=4, max_tokens=12, logprobs=1, **RAW)
    texts = [engine.tokenizer.token_text(token) for token in result.token_ids]
    body = result.to_json(texts)
    assert list(body) == [
        "text", "token_ids", "finish_reason", "model", "method", "exactness", "seed", "usage", "timings",
        "speculation", "memory", "tokens",
    ]  # fmt: skip
    assert body["exactness"] == "bitwise"
    assert body["model"] == "tgt"
    assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert set(body["timings"]) == {
        "load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s",
    }  # fmt: skip
    assert set(body["speculation"]) == {
        "rounds", "proposed", "evaluated", "accepted", "corrections", "bonuses", "discarded",
        "mean_accepted_tokens", "acceptance_rate", "accepted_histogram", "draft_s", "verify_s",
    }  # fmt: skip
    assert set(body["memory"]) == {"weights_bytes", "kv_target_bytes", "kv_draft_bytes"}
    assert all(body["memory"].values())
    assert [token["id"] for token in body["tokens"]] == body["token_ids"]
    assert set(body["tokens"][0]) == {"id", "text", "source", "logprob", "top_logprobs"}
    assert "tokens" not in result.to_json()


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_impossible_thread_counts_are_refused(models: TinyModels, threads: int) -> None:
    with pytest.raises(UsageError, match="threads must be between 1 and"):
        Engine(models.bundle("tgt"), threads=threads)
