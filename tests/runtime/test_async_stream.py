"""`async for` and `await`: right texts, a free event loop, turns in order, and cancellation that leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Coroutine
from typing import Any

import pytest

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime import Engine
from specrun.runtime.session import ModelSession

from .checks import same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


@pytest.fixture
def engine(models: TinyModels) -> Engine:
    return models.engine("tgt", "mix")


def within(work: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
    """Run a coroutine; TimeoutError if it hangs."""

    async def bounded() -> Any:
        return await asyncio.wait_for(work, seconds)

    return asyncio.run(bounded())


async def eventually(done: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("method", ["none", "draft", "ngram"])
def test_pieces_and_result_are_those_of_a_stream(engine: Engine, method: str) -> None:
    plain = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)

    async def work() -> None:
        stream = engine.astream(PROMPT, method=method, draft_length=3, max_tokens=40, **RAW)
        with pytest.raises(SpecrunError, match="not ended"):
            _ = stream.result
        pieces = [piece async for piece in stream]
        assert stream.done
        assert "".join(piece.text for piece in pieces) == plain.text
        assert [token.id for piece in pieces for token in piece.tokens] == list(plain.token_ids)
        same_output(stream.result, plain)
        assert [piece async for piece in stream] == []
        same_output(await engine.agenerate(PROMPT, method=method, max_tokens=40, **RAW), plain)

    within(work())
    same_output(engine.generate(PROMPT, method=method, max_tokens=40, **RAW), plain)


def test_the_event_loop_is_never_blocked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 20 ms, and a lock that another thread holds: a ticking task is never kept waiting for a run."""
    run = ModelSession.run_batch

    def slow(self: Any, *args: Any, **more: Any) -> Any:
        time.sleep(0.02)
        return run(self, *args, **more)

    monkeypatch.setattr(ModelSession, "run_batch", slow)
    held = engine.stream(PROMPT, max_tokens=30, **RAW)
    next(held)
    ticks: list[int] = []

    async def tick() -> None:
        while True:
            ticks.append(threading.get_ident())
            await asyncio.sleep(0.001)

    async def work() -> None:
        ticking = asyncio.create_task(tick())
        asking = asyncio.create_task(engine.agenerate(PROMPT, method="none", max_tokens=10, **RAW))
        await eventually(lambda: len(ticks) > 20)
        assert not asking.done()  # it waits for the engine, and we do not
        held.close()
        before = len(ticks)
        result = await asking
        assert result.usage.completion_tokens == 10
        assert len(ticks) - before > 20  # 10 runs of 20 ms and more
        ticking.cancel()

    within(work())


def test_turns_come_in_order(engine: Engine) -> None:
    """Tasks are served in the order in which they asked, each undisturbed, together with threads."""
    prompts = [text_of(10 + 5 * index) for index in range(6)]
    expected = [engine.generate(prompt, method="none", max_tokens=12, **RAW).token_ids for prompt in prompts]
    order: list[int] = []

    async def ask(index: int) -> tuple[int, ...]:
        ids: list[int] = []
        async for piece in engine.astream(prompts[index], method="draft", max_tokens=12, **RAW):
            if not order or order[-1] != index:
                order.append(index)
            ids += [token.id for token in piece.tokens]
        return tuple(ids)

    async def work() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(*map(ask, range(6))))

    threads = [
        threading.Thread(target=lambda: [engine.generate("x", max_tokens=3, **RAW) for _ in range(5)]) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert within(work()) == expected
    assert order == list(range(6))
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("pieces", [0, 1, 2, 5, 11])
@pytest.mark.parametrize("how", ["cancel", "leave", "aclose", "drop", "timeout"])
def test_cancellation(engine: Engine, pieces: int, how: str) -> None:
    """However a request is left, it ends at once and the next equals one of a fresh engine."""
    plain = engine.generate(PROMPT, method="none", max_tokens=20, **RAW)
    engine.reset()
    seen: list[str] = []

    async def read(stream: Any) -> None:
        async for piece in stream:
            seen.append(piece.text)
            if len(seen) > pieces:
                if how == "leave":
                    break
                await asyncio.sleep(3600)

    async def work() -> None:
        stream = engine.astream(text_of(400), method="draft", draft_length=3, **RAW)
        if how == "aclose":
            for _ in range(pieces):
                await anext(stream)
            await stream.aclose()
            await stream.aclose()
            if pieces:
                assert stream.result.finish_reason == "cancelled"
        elif how == "drop":
            for _ in range(pieces):
                await anext(stream)
            del stream
        else:
            task = asyncio.create_task(read(stream))
            del stream
            if how == "leave":
                await task
            elif how == "timeout":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(task, 0.05 * pieces)
            else:
                await eventually(lambda: len(seen) > pieces)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            del task
        start = time.monotonic()
        after = await engine.agenerate(PROMPT, method="draft", max_tokens=20, **RAW)
        same_output(after, plain)
        assert time.monotonic() - start < 20

    within(work())
    same_output(engine.generate(PROMPT, method="none", max_tokens=20, **RAW), plain)


def test_a_request_cancelled_while_it_waits_runs_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        first = engine.astream(PROMPT, max_tokens=60, **RAW)
        await anext(first)
        waiting = asyncio.create_task(engine.agenerate("other", max_tokens=400, **RAW))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async for _ in first:
            continue
        assert first.result.usage.completion_tokens == 60
        assert (await engine.agenerate("a", max_tokens=2, **RAW)).usage.completion_tokens == 2

    within(work())


def test_errors_reach_the_task(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        with pytest.raises(UsageError, match="no option"):
            engine.astream("x", colour="red")  # type: ignore[call-arg]
        for bad in ({"prompt": ""}, {"prompt": "x", "regex": "[a"}):
            failing: Awaitable[Any] = engine.agenerate(**{**RAW, "ignore_eos": False, **bad})
            with pytest.raises(UsageError):
                await failing
        with monkeypatch.context() as patch:
            patch.setattr(ModelSession, "run_batch", lambda *args, **more: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await engine.agenerate(PROMPT, max_tokens=30, **RAW)
        assert (await engine.agenerate("a", max_tokens=2, **RAW)).usage.completion_tokens == 2

    within(work())


def test_a_loop_that_ends_half_way_ends_its_requests(engine: Engine) -> None:
    """`asyncio.run` is left by an exception, or closed with a stream that somebody still refers to."""
    kept = []

    async def work() -> None:
        stream = engine.astream(PROMPT, **RAW)
        kept.append(stream)
        await anext(stream)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        within(work())
    assert engine.generate("a", max_tokens=2, **RAW).usage.completion_tokens == 2


def test_two_engines_in_one_loop(models: TinyModels) -> None:
    engines = [models.engine("tgt", "mix"), models.engine("rnd")]
    expected = [engine.generate(PROMPT, method="none", max_tokens=20, **RAW).token_ids for engine in engines]

    async def work() -> list[Any]:
        return list(await asyncio.gather(*(engine.agenerate(PROMPT, max_tokens=20, **RAW) for engine in engines)))

    assert [result.token_ids for result in within(work())] == expected


def test_closing_the_engine(models: TinyModels) -> None:
    """Streams that wait, and those that come later, get one clear error; the worker thread ends."""
    engine = Engine(models.bundle("tgt"), threads=1)

    async def work() -> None:
        stream = engine.astream(PROMPT, max_tokens=20, **RAW)
        await anext(stream)
        await stream.aclose()
        engine.close()
        with pytest.raises(SpecrunError, match="closed"):
            await engine.agenerate("x")

    within(work())
    gc.collect()
    end = time.monotonic() + 20
    while any(thread.name.startswith("specrun") and _of(thread, engine) for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.01)


def _of(thread: threading.Thread, engine: Engine) -> bool:
    executor = engine.worker._executor
    return executor is not None and thread in executor._threads
