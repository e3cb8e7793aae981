"""Streams that end early: left, cancelled, interrupted, or with an error in the middle."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from specrun.models_cache.errors import BackendError, SpecrunError, UsageError
from specrun.runtime import Engine
from specrun.runtime.chooser import Chooser
from specrun.runtime.session import ModelSession

from .checks import check_counters, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
METHODS = ("none", "draft", "ngram")


@pytest.fixture
def engine(models: TinyModels) -> Engine:
    return models.engine("tgt", "mix")


# Early ends


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_closed_anywhere(engine: Engine, models: TinyModels, method: str) -> None:
    """openvino.genai#1658: after an end at any piece, the next request equals that of a fresh engine."""
    fresh = models.engine("tgt")
    whole = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    for count in (0, 1, 2, 3, 5, 8, 13):
        stream = engine.stream(PROMPT, method=method, draft_length=5, max_tokens=40, **RAW)
        for _ in range(count):
            next(stream)
        stream.close()
        stream.close()
        result = stream.result
        assert result.finish_reason == "cancelled"
        assert whole.text.startswith(result.text)
        assert whole.token_ids[: len(result.token_ids)] == result.token_ids
        if count:
            check_counters(result)
        follow_up = PROMPT + result.text
        fresh.reset()
        expected = fresh.generate(follow_up, method="none", max_tokens=20, **RAW)
        assert engine.generate(follow_up, method=method, max_tokens=20, **RAW).token_ids == expected.token_ids


@pytest.mark.parametrize("method", METHODS)
def test_cancel(engine: Engine, method: str) -> None:
    """Cancelling ends after the round that runs, with the text of what was decided."""
    whole = engine.generate(PROMPT, method="none", max_tokens=60, **RAW)
    stream = engine.stream(PROMPT, method=method, draft_length=4, max_tokens=60, **RAW)
    for index, _ in enumerate(stream):
        if index == 6:
            thread = threading.Thread(target=stream.cancel)
            thread.start()
            thread.join()
    result = stream.result
    assert result.finish_reason == "cancelled"
    assert 6 < len(result.token_ids) < 20
    assert result.text == engine.tokenizer.decode(result.token_ids)
    assert whole.token_ids[: len(result.token_ids)] == result.token_ids
    assert result.speculation.discarded == 0
    check_counters(result)
    same_output(engine.generate(PROMPT, method=method, max_tokens=60, **RAW), whole)


def test_leaving_the_loop_frees_the_engine(engine: Engine) -> None:
    """`for piece in engine.stream(...): break` and a dropped stream free the engine at once, without the collector."""
    gc.collect()
    gc.disable()
    try:
        for _ in engine.stream(PROMPT, **RAW):
            break
        engine.generate(PROMPT, max_tokens=3, **RAW)
        named = engine.stream(PROMPT, max_tokens=9, **RAW)
        for _ in named:
            break
        assert named.result.finish_reason == "cancelled"
        engine.generate(PROMPT, max_tokens=3, **RAW)
        stream = engine.stream(PROMPT, **RAW)
        next(stream)
        del stream
        engine.generate(PROMPT, max_tokens=3, **RAW)
    finally:
        gc.enable()


def test_an_exception_of_the_reader(engine: Engine) -> None:
    whole = engine.generate(PROMPT, method="none", max_tokens=30, **RAW)

    def read_badly() -> None:
        for piece in engine.stream(PROMPT, draft_length=4, max_tokens=30, **RAW):
            if len(piece.text) >= 0:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_badly()
    same_output(engine.generate(PROMPT, draft_length=4, max_tokens=30, **RAW), whole)


def test_results_are_asked_for_at_the_end(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=5, **RAW)
    with pytest.raises(SpecrunError, match="not ended"):
        _ = stream.result
    assert not stream.done
    next(stream)
    with pytest.raises(SpecrunError, match="not ended"):
        _ = stream.result
    list(stream)
    assert stream.done
    assert stream.result.usage.completion_tokens == 5
    assert list(stream) == []


def test_a_stream_never_begun(engine: Engine) -> None:
    stream = engine.stream(PROMPT, **RAW)
    stream.close()
    assert stream.result.token_ids == ()
    assert list(stream) == []


def test_the_readers_time_is_not_decoding_time(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=10, **RAW)
    begun = time.perf_counter()
    for _ in stream:
        time.sleep(0.02)
    elapsed = time.perf_counter() - begun
    timings = stream.result.timings
    assert 0 < timings.decode_s + timings.prefill_s < elapsed - 0.09


# Errors in the middle


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("error", [BackendError("out of memory"), KeyboardInterrupt()])
def test_an_error_at_any_run(
    engine: Engine, models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException
) -> None:
    """A run of target or draft that fails, the prefill included: the engine is free, and its caches hold the truth."""
    prompt = text_of(300)  # two chunks
    tokens = engine.encode(prompt, raw=True)
    engine.reset()
    whole = engine.generate(prompt, method="none", max_tokens=24, **RAW).token_ids
    fresh = models.engine("tgt")
    expected = [fresh.logits([*tokens, *whole[:count]]) for count in (1, 4, 9, 23)]
    for failing in (1, 2, 3, 4, 7, 12):
        engine.reset()
        engine.generate("other text", method=method, draft_length=3, max_tokens=20, **RAW)
        run = ModelSession.run_batch
        calls = [0]

        def fail(self: ModelSession, tokens: Any, *, run=run, calls=calls, failing=failing, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == failing:
                raise error
            return run(self, tokens, **options)

        with monkeypatch.context() as patch:
            patch.setattr(ModelSession, "run_batch", fail)
            stream = engine.stream(prompt, method=method, draft_length=3, max_tokens=24, **RAW)
            with pytest.raises(type(error)):
                list(stream)
        assert stream.done
        assert whole[: len(stream.result.token_ids)] == stream.result.token_ids
        for count, row in zip((1, 4, 9, 23), expected, strict=True):
            assert (engine.logits([*tokens, *whole[:count]]) == row).all()
        again = engine.generate(prompt, method=method, draft_length=3, max_tokens=24, **RAW)
        assert again.token_ids == whole
        check_counters(again)


@pytest.mark.parametrize("place", ["decide", "commit"])
def test_an_interrupt_between_verify_and_rewind(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Where rejected draft tokens still stand in the caches, nothing of them is taken for text later."""
    engine, fresh, fresh_draft = models.engine("tgt", "rnd"), models.engine("tgt"), models.engine("rnd").target
    draft = engine.drafting.draft
    assert draft is not None
    prompt = text_of(30)
    tokens = engine.encode(prompt, raw=True)
    whole = engine.generate(prompt, method="none", max_tokens=30, **RAW).token_ids
    for interrupted in range(2, 9):
        engine.reset()
        calls = [0]
        original = getattr(Chooser, place)

        def interrupt(self: Chooser, *args: Any, original=original, calls=calls, interrupted=interrupted, **kw) -> Any:
            calls[0] += 1
            if calls[0] == interrupted:
                raise KeyboardInterrupt
            return original(self, *args, **kw)

        with monkeypatch.context() as patch:
            patch.setattr(Chooser, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(prompt, method="draft", draft_length=4, max_tokens=30, **RAW)
        known = engine.drafting.draft_tokens[: draft.length]
        assert len(known) >= len(tokens)
        draft.rewind_to(len(known))
        fresh_draft.rewind_to(0)
        assert (draft.run([5], rows=1) == fresh_draft.prefill([*known, 5])).all()
        draft.rewind_to(len(known))
        # The longest first: a shorter one would write the newest token's entry anew.
        for count in (interrupted + 1, interrupted, interrupted - 1, 20):
            text = [*tokens, *whole[:count]]
            fresh.reset()
            assert (engine.logits(text) == fresh.logits(text)).all()


def test_logits_that_are_no_numbers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN is an error, not a token; afterwards the engine goes on."""
    whole = engine.generate(PROMPT, method="none", max_tokens=20, **RAW)
    run = ModelSession.run

    def broken(self: ModelSession, tokens: Sequence[int], *, rows: int, parents: Any = None) -> Any:
        logits = run(self, tokens, rows=rows, parents=parents)
        logits[:] = float("nan")
        return logits

    for method in METHODS:
        with monkeypatch.context() as patch:
            patch.setattr(ModelSession, "run", broken)
            with pytest.raises(BackendError, match="not numbers"):
                engine.generate(PROMPT, method=method, draft_length=3, max_tokens=20, **RAW)
        same_output(engine.generate(PROMPT, method=method, draft_length=3, max_tokens=20, **RAW), whole)


# Work cut short


def _interrupt_after_first_run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    run = engine.target.run

    def interrupted(*args: Any, **options: Any) -> Any:
        run(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.target, "run", interrupted)
    return monkeypatch


def test_interrupted_logits_leave_no_foreign_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = text_of(400), text_of(390)[::-1]
    options: dict[str, Any] = {"max_tokens": 16, "method": "none", **RAW}
    wanted = engine.generate(first, **options).token_ids
    with monkeypatch.context() as patch:
        _interrupt_after_first_run(engine, patch)
        with pytest.raises(KeyboardInterrupt):
            engine.logits(engine.encode(other, raw=True))
    assert engine.generate(first, **options).token_ids == wanted


@pytest.mark.parametrize("token", [-1, 10**6])
def test_logits_of_ids_that_do_not_exist(engine: Engine, token: int) -> None:
    with pytest.raises(UsageError, match=f"no token {token}"):
        engine.logits([3, token])


def test_a_cancel_during_the_prefill_ends_after_its_chunk(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = text_of(400)
    stream = engine.stream(prompt, max_tokens=8, **RAW)
    runs: list[int] = []
    run = engine.target.run

    def watched(tokens: Sequence[int], *, rows: int, parents: Any = None) -> Any:
        runs.append(len(tokens))
        stream.cancel()
        return run(tokens, rows=rows, parents=parents)

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "run", watched)
        assert list(stream) == []
    assert len(runs) == 1
    assert runs[0] < len(stream.prompt_tokens)
    assert (stream.result.finish_reason, stream.result.token_ids) == ("cancelled", ())
    plain = engine.generate(prompt, max_tokens=8, method="none", **RAW)
    same_output(engine.generate(prompt, max_tokens=8, **RAW), plain)


def test_a_stream_cancelled_before_its_start_runs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = engine.stream(PROMPT, max_tokens=8, **RAW)
    stream.cancel()
    monkeypatch.setattr(engine.target, "run", None)
    assert list(stream) == []
    assert stream.result.finish_reason == "cancelled"


def test_a_stream_read_on_by_another_thread_belongs_to_that_thread(engine: Engine) -> None:
    stream = engine.stream(PROMPT, max_tokens=24, **RAW)
    next(stream)
    errors: list[str] = []

    def read_on() -> None:
        next(stream)
        next(stream)
        try:
            engine.generate(PROMPT, max_tokens=2, **RAW)
        except SpecrunError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read_on)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert errors
    assert "busy" in errors[0]
    stream.close()


@pytest.mark.parametrize("prompt", [123, None, ["a"], [], {}, b"bytes"])
def test_prompts_of_another_kind_are_usage_errors(engine: Engine, prompt: Any) -> None:
    with pytest.raises(UsageError, match="A prompt is text, or a list of messages"):
        engine.generate(prompt, max_tokens=1)
