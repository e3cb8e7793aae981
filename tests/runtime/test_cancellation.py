"""A request cancelled at any run of any model, in prefill, draft or verify: the engine is as if it had never been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from specrun.runtime import Engine, Stream
from specrun.runtime.session import ModelSession
from specrun.runtime.speculator import HeadSession

from .checks import check_counters, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
CASES = (("tgt", "mix", "draft"), ("heads", None, "eagle+ngram"), ("heads", None, "medusa"), ("tgt", None, "lookahead"))
POINTS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 23)


class Interrupted(BaseException):
    """What Ctrl-C is in a thread that reads a stream."""


@contextmanager
def at_run(number: int, act: Any) -> Iterator[list[str]]:
    """Call `act` inside run `number` of target, draft and heads, counted together; the runs that came are listed."""
    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((ModelSession, "run_batch"), (HeadSession, "_run")):
            inner = getattr(kind, name)

            def watched(self: Any, *args: Any, _inner: Any = inner, _kind: type = kind, **more: Any) -> Any:
                seen.append(_kind.__name__)
                made = _inner(self, *args, **more)
                if len(seen) == number + 1:
                    act()
                return made

            patch.setattr(kind, name, watched)
        yield seen


def counted(engine: Engine, **options: Any) -> tuple[Any, Any, np.ndarray]:
    """What a request gives, counters and logits included."""
    result = engine.generate(PROMPT, max_tokens=24, **RAW, **options)
    return result, result.speculation.accepted, engine.logits(engine.encode(PROMPT, raw=True))


@pytest.mark.parametrize(("name", "draft", "method"), CASES)
@pytest.mark.parametrize("how", ["cancel", "interrupt"])
def test_cancelled_at_any_run(models: TinyModels, name: str, draft: str | None, method: str, how: str) -> None:
    """`Stream.cancel` from outside, or an exception out of the run; then a request and logits as of a fresh engine."""
    engine, fresh = models.engine(name, draft), Engine.load(models.bundle(name).path, threads=1)
    options = {"method": method, "draft_length": 3}
    expected, _, logits = counted(fresh, method="none")
    counted(engine, **options)  # loads what drafts, and measures it
    long = text_of(300)  # two chunks of prefill
    whole = fresh.generate(long, method="none", max_tokens=40, **RAW)
    kinds: set[str] = set()
    for point in POINTS:
        engine.reset(texts_only=True)
        stream: Stream = engine.stream(long, max_tokens=40, **options, **RAW)

        def act(stream: Stream = stream) -> None:
            if how == "interrupt":
                raise Interrupted
            stream.cancel()

        with at_run(point, act) as seen:
            try:
                for _ in stream:
                    pass
            except Interrupted:
                stream.close()
        if len(seen) <= point:  # the text came in fewer runs
            assert point > 7
            break
        kinds.add(seen[point])
        assert stream.done
        result = stream.result
        assert result.finish_reason == "cancelled"
        assert whole.token_ids[: len(result.token_ids)] == result.token_ids
        if how == "cancel":
            assert len(seen) <= point + 12  # the round is finished and no other begun
            check_counters(result)
        after, _, found = counted(engine, **options)
        same_output(after, expected)
        assert np.array_equal(found, logits)
    fresh.close()
    assert "ModelSession" in kinds
    if name == "heads":
        assert len(kinds) == 2


def test_cancelled_requests_leave_no_proposals_behind(models: TinyModels) -> None:
    """After a reset the counters of a draft, too, are those of an engine that never saw the cancelled request."""
    engine = models.engine("tgt", "mix")
    _, accepted, _ = counted(engine, method="draft", draft_length=3)
    for point in POINTS:
        engine.reset()
        stream = engine.stream(text_of(60), max_tokens=40, method="draft", draft_length=3, **RAW)
        with at_run(point, stream.cancel):
            for _ in stream:
                pass
        after, again, _ = counted(engine, method="draft", draft_length=3)
        assert again == accepted
        assert after.usage.cached_tokens == 0
