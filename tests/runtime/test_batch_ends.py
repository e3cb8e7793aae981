"""A batch that does not run smoothly to its end: errors, closing, what the engine is like afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from specrun.models_cache.errors import BackendError, ContextLengthError, SpecrunError, UsageError
from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.scheduler import Scheduler
from specrun.runtime.chooser import Chooser
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.session import ModelSession

from .checks import same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


def requests(count: int, prefix: str = "", **options: Any) -> list[BatchRequest]:
    return [
        BatchRequest(index, f"{prefix}{index} {PROMPT}", {"max_tokens": 12, **RAW, **options}) for index in range(count)
    ]


def usable(engine: Engine) -> None:
    """The engine is free, and says what it always said."""
    result = engine.generate(PROMPT, method="ngram", max_tokens=20, **RAW)
    engine.reset()
    same_output(result, engine.generate(PROMPT, method="none", max_tokens=20, **RAW))


@pytest.mark.parametrize("size", [1, 3])
def test_errors_of_single_requests(models: TinyModels, size: int) -> None:
    """Over-long and empty prompts, options that cannot be: each is the answer of its own request; the rest go on."""
    engine = models.engine("tgt-64")
    bad: list[tuple[Any, dict[str, Any], type[Exception]]] = [
        (text_of(64), {}, ContextLengthError),
        ("", {}, UsageError),
        ("a", {"temperature": -1}, UsageError),
        ("a", {"colour": "red"}, UsageError),
        ("a", {"method": "medusa"}, UsageError),
        ("a", {"method": "psychic"}, UsageError),
        ("a", {"stop": 5}, UsageError),
        (7, {}, UsageError),
        ([{"role": "user", "content": "a"}], {"raw": True}, UsageError),
    ]
    given, wanted = [], {}
    for place, (prompt, options, kind) in enumerate(bad):
        given += requests(1) if not place else []
        given.append(BatchRequest(100 + place, prompt, {"max_tokens": 5, **RAW, **options}))
        wanted[100 + place] = kind
        given.append(BatchRequest(place + 1, f"{place}", {"max_tokens": 5, **RAW}))
    batch = BatchEngine(engine, batch_size=size)
    found = {answer.index: answer.result for answer in batch.run(given)}
    assert len(found) == len(given)
    for request in given:
        result = found[request.index]
        if request.index in wanted:
            assert type(result) is wanted[request.index], result
        else:
            assert isinstance(result, Result)
            same_output(result, engine.generate(request.prompt, **request.options))
    assert (batch.stats.done, batch.stats.failed) == (len(given), len(bad))
    usable(engine)


def test_a_method_that_a_batch_does_not_have(models: TinyModels) -> None:
    """It is refused in a batch, with what to do, and runs with a batch size of 1; by default the draft is used."""
    engine = models.engine("tgt", "mix")
    asked = BatchRequest(0, PROMPT, {"method": "lookahead", "max_tokens": 12, **RAW})
    (answer,) = BatchEngine(engine, batch_size=2).run([asked])
    assert isinstance(answer.result, UsageError)
    assert "batch size of 1" in str(answer.result)
    (answer,) = BatchEngine(engine, batch_size=1).run([asked])
    assert isinstance(answer.result, Result)
    assert answer.result.method == "lookahead"
    (default,) = BatchEngine(engine, batch_size=2).run(requests(1))
    assert isinstance(default.result, Result)
    assert default.result.method == "draft+ngram"


def test_an_error_while_a_row_runs(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row whose own logic fails in the middle leaves; the others do not notice."""
    engine = models.engine("tgt")
    given = requests(5)
    plain = [engine.generate(request.prompt, method="none", **request.options) for request in given]
    decide, broken = Chooser.decide, len(engine.encode(given[2].prompt, raw=True)) + 5

    def fail(self: Chooser, proposal: Any, logits: Any, committed: int, **options: Any) -> Any:
        if self._options.min_tokens == 1 and committed >= broken:
            raise SpecrunError("this row only")
        return decide(self, proposal, logits, committed, **options)

    given[2] = BatchRequest(2, given[2].prompt, given[2].options | {"min_tokens": 1})
    monkeypatch.setattr(Chooser, "decide", fail)
    found = {answer.index: answer.result for answer in BatchEngine(engine, batch_size=3).run(given)}
    for index, theirs in enumerate(plain):
        ours = found[index]
        if index == 2:
            assert str(ours) == "this row only"
        else:
            assert isinstance(ours, Result)
            same_output(ours, theirs)
    usable(engine)


PLACES = [(ModelSession, "run_batch"), (Chooser, "commit"), (KVCache, "keep_path"), (KVCache, "copy_prefix")]


@pytest.mark.parametrize(("owner", "place"), PLACES, ids=[name for _, name in PLACES])
def test_a_failure_ends_the_batch(models: TinyModels, monkeypatch: pytest.MonkeyPatch, owner: type, place: str) -> None:
    """ONNX Runtime fails, or the user interrupts, at any step: the engine is free and right."""
    engine = models.engine("tgt")
    original = getattr(owner, place)
    for error in (BackendError, KeyboardInterrupt):
        for failing in (1, 2, 4) if place == "copy_prefix" else (1, 2, 5, 11):
            calls = [0]

            def fail(*args: Any, calls=calls, failing=failing, error=error, **options: Any) -> Any:
                calls[0] += 1
                if calls[0] == failing:
                    raise error("stop")
                return original(*args, **options)

            engine.reset()
            with monkeypatch.context() as patch:
                patch.setattr(owner, place, fail)
                answers = BatchEngine(engine, batch_size=3).run(requests(9, prefix=text_of(20), method="ngram"))
                with pytest.raises(error):
                    list(answers)
            usable(engine)


def test_requests_that_fail_to_come(models: TinyModels) -> None:
    """The caller's own error passes through, and the engine is free."""
    engine = models.engine("tgt")

    def broken() -> Iterator[BatchRequest]:
        yield from requests(4)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        list(BatchEngine(engine, batch_size=2).run(broken()))
    usable(engine)


@pytest.mark.parametrize("size", [1, 4])
def test_closing_early(models: TinyModels, size: int) -> None:
    """Closed, or dropped, after some answers: the engine is free, and another run of the batch goes through."""
    engine = models.engine("tgt")
    batch = BatchEngine(engine, batch_size=size)
    for count in (0, 1, 3):
        answers: Any = batch.run(requests(9))
        for _ in range(count):
            next(answers)
        answers.close()
        usable(engine)
    answers = batch.run(requests(9))
    next(answers)
    del answers
    gc.collect()
    usable(engine)
    assert len(list(batch.run(requests(6)))) == 6


def test_the_engine_is_held(models: TinyModels) -> None:
    """While answers are read this thread cannot start another request, and another thread waits."""
    engine = models.engine("tgt")
    answers: Any = BatchEngine(engine, batch_size=2).run(requests(5))
    next(answers)
    with pytest.raises(SpecrunError, match="busy"):
        engine.generate(PROMPT, max_tokens=2, **RAW)
    with pytest.raises(SpecrunError, match="busy"):
        list(BatchEngine(engine, batch_size=2).run(requests(1)))
    results: list[Result] = []
    other = threading.Thread(target=lambda: results.append(engine.generate(PROMPT, max_tokens=2, **RAW)))
    other.start()
    other.join(0.2)
    assert not results
    assert len(list(answers)) == 4
    other.join(20)
    assert len(results) == 1


def test_closing_the_engine_ends_the_batch(models: TinyModels) -> None:
    models.bundle("tgt")
    engine = Engine.load("tgt", threads=1)
    answers: Any = BatchEngine(engine, batch_size=2).run(requests(5))
    next(answers)
    engine.close()
    assert list(answers) == []


def test_a_build_without_ragged_runs(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a batch is one request after another, with the same answers."""
    engine = models.engine("tgt")
    monkeypatch.setattr(engine.target, "ragged", False)
    batch = BatchEngine(engine, batch_size=8)
    assert batch.batch_size == 1
    answers = list(batch.run(requests(3)))
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert batch.stats.rounds == batch.stats.row_rounds > 0


@pytest.mark.parametrize("size", [0, -1, 257, True])
def test_batch_sizes_that_cannot_be(models: TinyModels, size: int) -> None:
    with pytest.raises(UsageError, match="batch size"):
        BatchEngine(models.engine("tgt"), batch_size=size)


def test_memory_limits_the_rows(models: TinyModels) -> None:
    """A request that does not fit beside those that run waits for them; alone it always runs."""
    engine = models.engine("tgt")
    batch = BatchEngine(engine, batch_size=4)
    bytes_of_position = 2 * 2 * 2 * 16 * 4
    scheduler_memory = 2 * 60 * bytes_of_position
    plain = [engine.generate(request.prompt, method="none", **request.options) for request in requests(6)]
    batch._memory = scheduler_memory
    found = {answer.index: answer.result for answer in batch.run(requests(6))}
    for index, theirs in enumerate(plain):
        same_output(found[index], theirs)  # type: ignore[arg-type]
    assert max(rows for rows, _ in batch.stats.widths) < 4
    batch = BatchEngine(engine, batch_size=4)
    batch._memory = 1
    assert len(list(batch.run(requests(3)))) == 3
    assert {rows for rows, _ in batch.stats.widths} == {1}


def test_memory_stays_flat(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is freed with its run."""
    engine = models.engine("tgt")
    alive: list[Any] = []
    init = Scheduler.__init__

    def watched(self: Scheduler, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        alive.append(self._pool.cache)

    monkeypatch.setattr(Scheduler, "__init__", watched)
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)
    for _ in range(3):
        list(BatchEngine(engine, batch_size=3).run(requests(4, method="ngram")))
    assert [cache.nbytes for cache in alive] == [0, 0, 0]
