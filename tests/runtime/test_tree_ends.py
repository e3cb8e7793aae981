"""Where texts end inside token trees, and what is left in the engine however a stream with trees ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import BackendError
from specrun.runtime import Engine
from specrun.runtime import running as running_module
from specrun.runtime.chooser import Chooser
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.proposal import Proposal
from specrun.runtime.session import ModelSession

from .checks import check_counters, close_logprobs, read, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT, token_id
from .toys import LOWER, TURN_END_ID
from .tree_proposers import SHAPES, TreeProposer, proposing, side_right

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
# Whether side branches are trusted, and how rough they are. The bound is far above what the noise can turn.
POLICIES: dict[str, tuple[str, float | None, float]] = {
    "margin": ("tgt", 0.3, 1e-3),
    "re-verify": ("tgt-int8", None, 0.3),
}


@pytest.mark.parametrize("margin", [1e-3, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_eos_at_every_place_of_a_tree(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, shape: str, margin: float | None
) -> None:
    """In the main branch, in a side branch, as what is carried, and with tokens after it: cut there each time."""
    engine = models.engine("table")
    after = [token_id(digit) for digit in "123456789"]
    for start in range(len(LOWER) - 1):
        expected = (*LOWER[start + 1 :], TURN_END_ID)
        proposer = TreeProposer([*expected, *after], SHAPES[shape], depth=8, seed=start)
        with proposing(monkeypatch, proposer, margin):
            _, result = read(engine.stream(chr(ord("a") + start), method="ngram", raw=True))
        assert result.token_ids == expected
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", ["main", "side", "random"])
def test_limits_inside_a_tree(models: TinyModels, monkeypatch: pytest.MonkeyPatch, shape: str, policy: str) -> None:
    """Exactly so many tokens; nothing deeper than could be committed is proposed."""
    name, margin, noise = POLICIES[policy]
    engine = models.engine(name)
    for limit in range(1, 14):
        plain = engine.generate(PROMPT, method="none", max_tokens=limit, **RAW)
        for draft_length in (1, 3, 16):
            text = engine.generate(PROMPT, method="none", max_tokens=40, **RAW).token_ids
            proposer = TreeProposer(text, SHAPES[shape], depth=12, seed=limit)
            with proposing(monkeypatch, proposer, margin, noise):
                result = engine.generate(PROMPT, method="ngram", draft_length=draft_length, max_tokens=limit, **RAW)
            same_output(result, plain)
            assert len(result.token_ids) == limit


@pytest.mark.parametrize("shape", ["main", "side", "random"])
def test_the_end_of_the_context(models: TinyModels, monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    engine = models.engine("tgt-64")
    for count in (1, 40, 56, 60, 62, 63):
        prompt = text_of(count)
        plain = engine.generate(prompt, method="none", **RAW)
        for margin, noise in ((None, 0.3), (0.3, 1e-3)):
            proposer = TreeProposer(plain.token_ids, SHAPES[shape], depth=20, seed=count)
            with proposing(monkeypatch, proposer, margin, noise):
                _, result = read(engine.stream(prompt, method="ngram", **RAW))
            same_output(result, plain)
            assert result.usage.completion_tokens == 64 - count


def test_stop_strings_inside_a_tree(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.engine("table")
    plain = engine.generate("A", method="none", raw=True, stop=["END"], max_tokens=12, logprobs=2)
    text = engine.generate("A", method="none", raw=True, max_tokens=12).token_ids
    for shape in ("main", "side", "random"):
        for seed in range(5):
            with proposing(monkeypatch, TreeProposer(text, SHAPES[shape], depth=8, seed=seed)):
                _, result = read(engine.stream("A", method="ngram", raw=True, stop=["END"], max_tokens=12, logprobs=2))
            same_output(result, plain)
            close_logprobs(result, plain, within=0.0)
            assert result.text == " b "


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_inexact_is_left_for_the_next_request(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Closed after any piece, or read to the end: what stays in the cache has plain decoding's bits."""
    name, margin, noise = POLICIES[policy]
    engine = models.engine(name)
    tokens = engine.encode(PROMPT, raw=True)
    whole = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    engine.reset()
    text = [*tokens, *whole.token_ids]
    expected = [engine.logits(text[:count]) for count in range(len(tokens), len(text))]
    inexact = reused = 0
    for count in (1, 2, 3, 5, 8, 13, 99):
        engine.reset()
        proposer = TreeProposer(whole.token_ids, SHAPES["side"], seed=count)
        with proposing(monkeypatch, proposer, margin, noise) as record:
            stream = engine.stream(PROMPT, method="ngram", max_tokens=40, **RAW)
            for _, _ in zip(range(count), stream, strict=False):
                pass
            stream.close()
        result = stream.result
        assert whole.token_ids[: len(result.token_ids)] == result.token_ids
        check_counters(result)
        inexact += record.inexact
        held = engine.target.length
        reused += held - len(tokens)
        assert engine._target_tokens == text[:held]
        keys = [value.numpy()[:, :, :held].copy() for value in engine.target.cache.values]
        for at, row in list(enumerate(expected))[::-1]:  # the longest first: it reuses all there is
            assert (engine.logits(text[: len(tokens) + at]) == row).all()
        engine.reset()
        engine.logits(text)
        for value, key in zip(engine.target.cache.values, keys, strict=True):
            assert (value.numpy()[:, :, :held] == key).all()
    assert reused > 0
    assert (inexact > 0) == (policy == "margin")


@pytest.mark.parametrize("policy", POLICIES)
def test_cancel_between_trees(models: TinyModels, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    name, margin, noise = POLICIES[policy]
    engine = models.engine(name)
    whole = engine.generate(PROMPT, method="none", max_tokens=60, **RAW)
    with proposing(monkeypatch, TreeProposer(whole.token_ids, SHAPES["side"]), margin, noise):
        stream = engine.stream(PROMPT, method="ngram", max_tokens=60, **RAW)
        for index, _ in enumerate(stream):
            if index == 4:
                thread = threading.Thread(target=stream.cancel)
                thread.start()
                thread.join()
        assert stream.result.finish_reason == "cancelled"
        assert whole.token_ids[: len(stream.result.token_ids)] == stream.result.token_ids
        check_counters(stream.result)
        same_output(engine.generate(PROMPT, method="ngram", max_tokens=60, **RAW), whole)
    same_output(engine.generate(PROMPT, method="ngram", max_tokens=60, **RAW), whole)


PLACES = [(Chooser, "decide"), (Chooser, "commit"), (KVCache, "keep_path"), (ModelSession, "run_batch")]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("owner", "place"), PLACES, ids=[name for _, name in PLACES])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_error_at_any_step(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, policy: str, owner: type, place: str, late: bool
) -> None:
    """Before or after each step of a round: the engine is free, and no node is taken for text later."""
    name, margin, noise = POLICIES[policy]
    engine = models.engine(name)
    tokens = engine.encode(PROMPT, raw=True)
    whole = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    text = [*tokens, *whole.token_ids]
    counts = [len(text) - 1, *range(len(tokens) + 12, len(tokens) - 1, -1)]  # the longest first: it reuses the most
    engine.reset()
    expected = [engine.logits(text[:count]) for count in counts]
    for failing in (1, 2, 3, 4, 6, 9):
        engine.reset()
        proposer = TreeProposer(whole.token_ids, SHAPES["side"], seed=failing)
        with proposing(monkeypatch, proposer, margin, noise):
            original, calls = getattr(owner, place), [0]

            def fail(*args: Any, original=original, calls=calls, failing=failing, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] == failing and not late:
                    raise BackendError("out of memory")
                result = original(*args, **options)
                if calls[0] == failing:
                    raise KeyboardInterrupt
                return result

            with monkeypatch.context() as patch:
                patch.setattr(owner, place, fail)
                with pytest.raises((BackendError, KeyboardInterrupt)):
                    engine.generate(PROMPT, method="ngram", max_tokens=40, **RAW)
        held = engine._target_tokens
        assert held == text[: len(held)]
        assert len(held) <= engine.target.length
        for count, row in zip(counts, expected, strict=True):
            assert (engine.logits(text[:count]) == row).all()


def test_a_window_leaves_only_the_main_branch(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.engine("tgt")
    plain = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    parents: list[Any] = []
    run = ModelSession.run

    def watched(self: ModelSession, tokens: Sequence[int], **options: Any) -> np.ndarray:
        parents.append(options.get("parents"))
        return run(self, tokens, **options)

    monkeypatch.setattr(ModelSession, "run", watched)
    for room, wanted in ((0, False), (32, True)):
        parents.clear()
        monkeypatch.setattr(ModelSession, "tree_room", lambda self, length, room=room: room)
        with proposing(monkeypatch, TreeProposer(plain.token_ids, SHAPES["main"])):
            result = engine.generate(PROMPT, method="ngram", max_tokens=40, **RAW)
        same_output(result, plain)
        assert any(parents) == wanted
        assert result.speculation.accepted > 25


def test_a_long_inexact_text_is_run_anew_in_chunks(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hundred tokens behind one kept side branch, then a choice that is left open."""
    engine = models.engine("tgt")
    options = {"max_tokens": 450, **RAW}
    plain = engine.generate("ab", method="none", **options)
    engine.reset()
    widths: list[int] = []
    run = ModelSession.run_batch

    def watched(self: ModelSession, tokens: Any, **options: Any) -> np.ndarray:
        widths.append(len(tokens[0]))
        return run(self, tokens, **options)

    def shape(ahead: Sequence[int], rng: np.random.Generator) -> Proposal:
        return side_right(ahead, rng, right=1)

    proposer = TreeProposer(plain.token_ids, shape)
    with proposing(monkeypatch, proposer, 0.0) as record:
        monkeypatch.setattr(ModelSession, "run_batch", watched)
        wins = Chooser._wins

        def strict(self: Chooser, row: Any, p: Any, position: int, *args: Any) -> bool:
            return not (position > 400 and not record.open) and wins(self, row, p, position, *args)

        monkeypatch.setattr(Chooser, "_wins", strict)
        result = engine.generate("ab", method="ngram", **options)
    same_output(result, plain)
    assert record.open == 1
    assert widths.count(256) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_growth_of_the_cache_under_trees(models: TinyModels, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """The buffers move while trees are run and paths are kept."""
    name, margin, noise = POLICIES[policy]
    options = {"max_tokens": 460, **RAW}
    plain = models.engine(name).generate(text_of(30), method="none", **options)
    monkeypatch.setattr(running_module, "RESERVED_TOKENS", 1)
    with Engine.load(name, threads=1) as engine:
        with proposing(monkeypatch, TreeProposer(plain.token_ids, SHAPES["random"], depth=9), margin, noise):
            started = engine.stream(text_of(30), method="ngram", **options)
            next(started)
            before = engine.memory()
            for _ in started:
                continue
        assert engine.memory().kv_target_bytes > before.kv_target_bytes
    same_output(started.result, plain)


def test_requests_one_after_another(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation with trees: each turn equals that of a fresh engine without, and reuses the turns before."""
    for name, margin, noise in POLICIES.values():
        engine, plain = models.engine(name), models.engine(name, context=500)
        assert isinstance(engine, Engine)
        history = ""
        for turn in ("red", "blue 12", "the ring", "and"):
            history += f" {turn}: "
            plain.reset()
            wanted = plain.generate(history, method="none", max_tokens=24, **RAW)
            with proposing(monkeypatch, TreeProposer(wanted.token_ids, SHAPES["random"]), margin, noise):
                result = engine.generate(history, method="ngram", max_tokens=24, **RAW)
            same_output(result, wanted)
            assert turn == "red" or result.usage.cached_tokens > 0
            history += result.text
