"""Draft tokens that a grammar forbids are left out before the run, where nothing else is changed by that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.chooser import Chooser
from specrun.runtime.grammar import Matcher, constraint_of
from specrun.runtime.options import GenerationOptions
from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import Distribution
from specrun.runtime.session import ModelSession

from .checks import same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT, token_id

A, B, C, D = (token_id(letter) for letter in "abcd")
REGEX = r"(the|and|ring) ([a-f]{2,5} ){3,9}end\."


def matcher(engine: Engine, **options: Any) -> Matcher:
    made = engine.grammars.matcher(constraint_of(options))
    assert made is not None
    return made


def chooser(engine: Engine, grammar: Matcher | None) -> Chooser:
    options = GenerationOptions()
    return Chooser(options, prompt=[5, 6, 7], tokens=engine.tokenizer.tokens, eos=(2,), grammar=grammar)


def test_what_fits(models: TinyModels) -> None:
    """From the first token on, behind what was committed and whatever was looked at before; ends of text count."""
    engine = models.engine("tgt")
    state = matcher(engine, regex="(ab|ac)d?")
    end = min(engine.tokenizer.special_ids.eos)
    assert state.fitting([]) == 0
    assert state.fitting([A, B, D]) == 3
    assert state.fitting([A, B, C]) == 2
    assert state.fitting([B]) == 0
    assert state.fitting([A, 286]) == 1  # an id that is none
    state.allowed([A, C])
    assert state.fitting([A, B, D, end]) == 4
    assert state.fitting([A, B, end, D]) == 3
    state.commit([A])
    assert state.fitting([A]) == 0
    assert state.fitting([C, D, D]) == 2
    state.commit([C, end])
    assert state.fitting([D]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_as_masks_say(models: TinyModels, seed: int) -> None:
    """Random walks: a token fits exactly where the mask allows it."""
    engine, rng = models.engine("tgt"), np.random.default_rng(seed)
    state = matcher(engine, regex=REGEX)
    for _ in range(12):
        drafts: list[int] = []
        for _ in range(6):
            mask = state.allowed(drafts)
            assert mask is not None
            drafts.append(int(rng.choice(np.flatnonzero(mask)) if rng.random() < 0.8 else rng.integers(mask.size)))
            if state.allowed(drafts) is None:
                break
        wanted = len(drafts)
        for count in range(len(drafts)):
            mask = state.allowed(drafts[:count])
            if mask is None or not mask[drafts[count]]:
                wanted = count
                break
        assert state.fitting(drafts) == wanted
        mask = state.allowed()
        assert mask is not None
        state.commit([int(rng.choice(np.flatnonzero(mask)))])
        if state.allowed() is None:
            return


def test_the_allowed_part(models: TinyModels) -> None:
    engine = models.engine("tgt")
    judge = chooser(engine, matcher(engine, regex="(ab|ac)d?"))
    chain = Proposal((A, B, B, D), "deterministic")
    assert judge.allowed_part(chain, 3).tokens == (A, B)
    assert judge.allowed_part(chain, 4) is chain  # behind a token that is not committed
    tree = Proposal((B, A, C, D, D, B, A), "deterministic", parents=(-1, -1, 1, 2, 0, 1, 5))
    part = judge.allowed_part(tree, 3)
    assert part.tokens == (A, C, D, B)
    assert part.parents == (-1, 0, 1, 0)
    fine = Proposal((A, B, C), "deterministic", parents=(-1, 0, 0))
    assert judge.allowed_part(fine, 3) is fine
    point = Distribution.point(D)
    drawn = Proposal((D,), "sampled", (point,))
    assert judge.allowed_part(drawn, 3) is drawn
    free = chooser(engine, None)
    assert free.allowed_part(chain, 3) is chain


METHODS = (("ngram", 5), ("ngram", None), ("eagle", 4), ("eagle", None), ("medusa+ngram", None), ("draft+ngram", 3))


def runs_of(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[tuple[int, ...]]:
    """What the target runs."""
    runs: list[tuple[int, ...]] = []
    run = ModelSession.run_batch

    def watched(self: ModelSession, tokens: Sequence[Sequence[int]], **options: Any) -> Any:
        if self.bundle is engine.bundle:
            runs.extend(tuple(own) for own in tokens if own)
        return run(self, tokens, **options)

    monkeypatch.setattr(ModelSession, "run_batch", watched)
    return runs


@pytest.mark.parametrize(("method", "draft_length"), METHODS)
@pytest.mark.parametrize("size", [1, 3])
def test_forbidden_tokens_are_not_run(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str, draft_length: int | None, size: int
) -> None:
    """Alone and in rows, chains and trees: every token that is run could stand, and the text is plain decoding's."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)
    engine = models.engine("heads")
    options: dict[str, Any] = {"regex": REGEX, "max_tokens": 60, "raw": True}
    prompt = PROMPT + "xyz the abc def xyz abc the abz and qrs the a"
    plain = engine.generate(prompt, method="none", **options)
    assert plain.usage.prompt_tokens > 30
    runs = runs_of(monkeypatch, engine)
    requests = [
        BatchRequest(index, prompt, {**options, "method": method, "draft_length": draft_length}) for index in range(3)
    ]
    proposed = 0
    for answer in BatchEngine(engine, batch_size=size).run(requests):
        assert isinstance(answer.result, Result), answer.result
        same_output(answer.result, plain)
        proposed += answer.result.speculation.proposed
    if "ngram" in method:  # heads with random weights hardly guess what may stand
        assert proposed > 3
    ids = list(plain.token_ids)
    allowed = matcher(engine, regex=REGEX)
    checked = 0
    for run in runs:
        if not 1 < len(run) < 30 or run[0] not in ids:
            continue
        places = [at for at, token in enumerate(ids) if token == run[0]]
        first = [set(np.flatnonzero(mask)) for at in places if (mask := allowed.allowed(ids[: at + 1])) is not None]
        assert any(run[1] in tokens for tokens in first)
        checked += 1
    assert checked or not proposed


def test_lookahead_keeps_its_window(models: TinyModels) -> None:
    """Its nodes are what it goes on with, so none is left out; the text is plain decoding's all the same."""
    engine = models.engine("heads")
    options: dict[str, Any] = {"regex": REGEX, "max_tokens": 60, "raw": True}
    plain = engine.generate(PROMPT, method="none", **options)
    same_output(engine.generate(PROMPT, method="lookahead", **options), plain)
