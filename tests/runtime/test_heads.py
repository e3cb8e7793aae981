"""Heads and draft speculators through the engine: no text changes, what is right is accepted, lacks are told."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import BackendError, IntegrityError, ModelNotFoundError, UsageError
from specrun.runtime import Engine
from specrun.runtime.kv_cache import CAPACITY_STEP
from specrun.runtime.proposal import Proposal
from specrun.runtime.proposers.eagle import EagleProposer
from specrun.runtime.proposers.medusa import MedusaProposer
from specrun.runtime.request import METHODS as METHODS_OF_ALL
from specrun.runtime.speculator import EagleSession
from specrun.runtime.verify import verify

from .checks import check_counters, make_speculation_pay, read, same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

METHODS = ("medusa", "eagle", "draft", "medusa+ngram", "eagle+ngram", "draft+ngram")
DRAFT_LENGTHS = (1, 2, 3, 4, 5, 8, 16, None)
PROMPTS = (PROMPT, "a", "red blue red blue red blue", text_of(300))
RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
COUPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7}
FILTERED: dict[str, Any] = {"temperature": 0.8, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["heads", "heads-int8", "heads40"])
def test_equals_plain(models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, method: str) -> None:
    """Greedy and coupled, every K and adaptive trees: the ids of plain decoding."""
    engine = models.engine(name)
    make_speculation_pay(engine, monkeypatch)
    proposed = 0
    for options in ({}, COUPLED, FILTERED):
        for prompt in PROMPTS if not options else PROMPTS[:1]:
            plain = engine.generate(prompt, method="none", max_tokens=40, **RAW, **options)
            for draft_length in DRAFT_LENGTHS:
                _, result = read(
                    engine.stream(prompt, method=method, draft_length=draft_length, max_tokens=40, **RAW, **options)
                )
                assert result.method == method
                same_output(result, plain)
                proposed += result.speculation.proposed
                if draft_length is not None:
                    assert result.speculation.proposed <= draft_length * result.speculation.rounds
    assert proposed > 0


@pytest.mark.parametrize("draft", ["eagle1", "eagle", "medusa", "medusa1"])
def test_a_speculator_by_its_name(models: TinyModels, draft: str) -> None:
    models.bundle("heads")
    method = draft.removesuffix("1")
    with Engine.load("heads", draft=draft, threads=1) as engine:
        assert engine.resolve_method("auto") == f"{method}+ngram"
        assert engine.memory().weights_bytes == engine.bundle.weights_bytes  # loaded by the first request
        plain = engine.generate(PROMPT, method="none", max_tokens=30, **RAW)
        result = engine.generate(PROMPT, draft_length=3, max_tokens=30, **RAW)
        assert result.method == engine.default_method == method
        same_output(result, plain)
        memory = engine.memory()
        assert memory.weights_bytes > engine.bundle.weights_bytes
        assert (memory.kv_draft_bytes > 0) == (method == "eagle")
    path = models.bundle("heads").path / "speculators" / draft
    with Engine.load("heads", draft=path, threads=1) as engine:
        assert engine.resolve_method("auto") == f"{method}+ngram"


@pytest.mark.parametrize("method", ["medusa", "eagle", "medusa+ngram", "eagle+ngram"])
@pytest.mark.parametrize("draft_length", [1, 2, 3, None])
def test_what_is_right_is_accepted(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str, draft_length: int | None
) -> None:
    """Heads that are right by construction: every draft token on the main branch stands."""
    engine = models.engine("table-heads")
    make_speculation_pay(engine, monkeypatch)
    for options in ({}, {"temperature": 0.5, "seed": 3}):
        plain = engine.generate("a", method="none", max_tokens=60, **RAW, **options)
        engine.reset()
        _, result = read(engine.stream("a", method=method, draft_length=draft_length, max_tokens=60, **RAW, **options))
        same_output(result, plain)
        if draft_length is not None:
            assert result.speculation.acceptance_rate == 1.0
            assert result.speculation.mean_accepted_tokens > 0.9 * (draft_length + 1)
        else:
            assert result.speculation.mean_accepted_tokens > 2.5


@pytest.mark.parametrize("method", ["medusa", "eagle", "draft"])
def test_a_fixed_k_is_a_chain_of_exactly_k(models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    engine = models.engine("heads")
    for draft_length in (1, 2, 3, 5):
        k = min(draft_length, 3) if method == "medusa" else draft_length  # it has three heads
        result = engine.generate(PROMPT, method=method, draft_length=draft_length, max_tokens=40, **RAW)
        full = result.speculation.rounds - draft_length - 1  # the last rounds are cut short by the limit
        assert full * k <= result.speculation.proposed <= result.speculation.rounds * k


def watch(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> list[Proposal]:
    proposals: list[Proposal] = []
    propose = kind.propose

    def watched(self: Any, context: Sequence[int], limit: int) -> Proposal:
        proposals.append(propose(self, context, limit))
        return proposals[-1]

    monkeypatch.setattr(kind, "propose", watched)
    return proposals


@pytest.mark.parametrize(("method", "kind"), [("medusa", MedusaProposer), ("eagle", EagleProposer)])
def test_adaptive_proposals_are_trees_where_runs_cost_little(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str, kind: type[Any]
) -> None:
    """And their side branches come true now and then."""
    from specrun.runtime.calibration import Calibration
    from specrun.runtime.round_costs import RoundCosts

    engine = models.engine("toy-heads")
    monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 17: 1.1}).cost))
    proposals = watch(monkeypatch, kind)
    for seed in range(6):
        options = {"temperature": 1.0, "seed": seed, "max_tokens": 40, "raw": True, "ignore_eos": True}
        plain = engine.generate("a", method="none", **options)
        same_output(engine.generate("a", method=method, **options), plain)
    trees = [proposal for proposal in proposals if proposal.parents is not None]
    assert len(trees) > len(proposals) / 2
    assert max(map(len, trees)) > 6


def test_heads_that_are_never_right_are_given_up(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrun.runtime.calibration import Calibration
    from specrun.runtime.round_costs import RoundCosts

    engine = models.engine("heads")
    monkeypatch.setattr(engine, "_costs", RoundCosts(Calibration(1, {1: 1.0, 17: 9.0}).cost))
    for method in ("medusa", "eagle"):
        engine.reset()
        fixed = engine.generate(PROMPT, method=method, draft_length=3, max_tokens=200, **RAW)
        adaptive = engine.generate(PROMPT, method=method, max_tokens=200, **RAW)
        assert adaptive.token_ids == fixed.token_ids
        assert fixed.speculation.acceptance_rate < 0.2
        assert adaptive.speculation.proposed < 80 < fixed.speculation.proposed
        check_counters(adaptive)


def test_methods_of_an_engine(models: TinyModels) -> None:
    assert models.engine("tgt").methods == ("none", "ngram", "lookahead")
    assert models.engine("tgt", "mix").methods == ("none", "draft", "ngram", "lookahead", "draft+ngram")
    assert models.engine("heads").methods == METHODS_OF_ALL[1:]  # all but "auto"
    automatic = {"tgt": "ngram", "heads": "eagle+ngram"}
    assert {name: models.engine(name).resolve_method("auto") for name in automatic} == automatic
    assert models.engine("tgt", "mix").resolve_method("auto") == "draft+ngram"
    swapped = models.engine("heads").generate("a", method="ngram+eagle", max_tokens=2, **RAW)
    assert swapped.method == "eagle+ngram"


@pytest.mark.parametrize("method", ["medusa", "eagle+ngram"])
def test_no_speculator(models: TinyModels, method: str) -> None:
    with pytest.raises(UsageError, match=r"needs a speculator, and tgt has none: make one with `specrun train"):
        models.engine("tgt").stream("a", method=method)


def test_no_draft(models: TinyModels) -> None:
    with pytest.raises(UsageError, match=r"give one with --draft, or make one with `specrun train draft"):
        models.engine("tgt").stream("a", method="draft+ngram")


def test_a_bundle_without_features(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from specrun.models_cache.errors import UnsupportedModelError

    bundle = models.bundle("heads")
    old = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, features=None))
    with Engine(old, threads=1) as engine, pytest.raises(UnsupportedModelError, match="export it again"):
        engine.stream("a", method="medusa")


def test_verify_covers_heads(models: TinyModels) -> None:
    found = list(verify(models.engine("heads-int8"), PROMPTS[:2], draft_lengths=(3,), max_tokens=16))
    assert all(case.equal for case in found)
    assert {(case.method, case.draft_length) for case in found if case.batch == 1} == {
        (method, draft_length) for method in METHODS_OF_ALL[2:] for draft_length in (3, None)
    }


@pytest.mark.parametrize("method", ["medusa", "eagle", "eagle+ngram", "draft"])
def test_a_chat_with_heads(models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Turns reuse the cache of those before, also where another method wrote some of them."""
    engine = models.engine("heads")
    make_speculation_pay(engine, monkeypatch)
    texts: dict[str, list[str]] = {}
    for one, two in (("none", "none"), (method, method), ("none", method), (method, "none")):
        engine.reset()
        chat = engine.chat()
        said = []
        for turn, used in enumerate((one, two, one, two)):
            for _ in (answer := chat.send(f"the ring {turn}", method=used, max_tokens=12, ignore_eos=True)):
                continue
            said.append(answer.result.text)
        texts[f"{one} {two}"] = said
    assert len({tuple(said) for said in texts.values()}) == 1


@pytest.mark.parametrize("method", ["medusa", "eagle", "medusa+ngram", "eagle+ngram", "draft+ngram"])
def test_streams_that_end_early(models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Closed, cancelled or failed in the head: the next request is as if nothing had been."""
    engine = models.engine("heads")
    make_speculation_pay(engine, monkeypatch)
    options = {"max_tokens": 40, **RAW}
    plain = engine.generate(PROMPT, method="none", **options)
    for pieces in (1, 3, 9):
        stream = engine.stream(PROMPT, method=method, **options)
        for _ in range(pieces):
            next(stream)
        stream.close()
        same_output(engine.generate(PROMPT, method=method, **options), plain)
    if method.startswith("draft"):
        return
    session = engine.drafting.heads.loaded(method.partition("+")[0]).session
    run, calls = session._run, iter(range(1000))

    def failing(frame: Any, choice: Any) -> Any:
        if next(calls) == 1:
            raise BackendError("a failure")
        return run(frame, choice)

    engine.reset()  # else n-grams know it all
    with monkeypatch.context() as patch:
        patch.setattr(session, "_run", failing)
        with pytest.raises(BackendError, match="a failure"):
            engine.generate(PROMPT, method=method, **options)
    same_output(engine.generate(PROMPT, method=method, **options), plain)


@pytest.mark.parametrize("method", ["medusa", "eagle", "draft"])
@pytest.mark.parametrize("context", [64, None])
def test_to_the_end_of_the_context(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, method: str, context: int | None
) -> None:
    models.bundle("heads")
    with Engine.load("heads", threads=1, context=context) as engine:
        make_speculation_pay(engine, monkeypatch)
        prompt = text_of(engine.context - 30)
        plain = engine.generate(prompt, method="none", **RAW)
        assert plain.finish_reason == "length"
        for draft_length in (1, 3, 16, None):
            same_output(engine.generate(prompt, method=method, draft_length=draft_length, **RAW), plain)


@pytest.mark.parametrize("name", ["medusa1", "eagle"])
def test_damaged_weights_are_told(models: TinyModels, tmp_path: Path, name: str) -> None:
    """Files that changed after they were attached, sizes and all; the text by other methods stays."""
    folder = tmp_path / "heads"
    shutil.copytree(models.bundle("heads").path, folder)
    data = folder / "speculators" / name / "speculator.onnx.data"
    data.write_bytes(b"\xff" * data.stat().st_size)
    with Engine.load(folder, draft=name, threads=1) as engine:
        with pytest.raises(IntegrityError, match=f"{name} guesses what is no token: its files are damaged"):
            engine.generate(PROMPT, max_tokens=8, **RAW)
        expected = models.engine("heads").generate(PROMPT, method="none", max_tokens=8, **RAW)
        same_output(engine.generate(PROMPT, method="ngram", max_tokens=8, **RAW), expected)


def test_a_tree_that_outgrows_the_buffers_keeps_its_nodes(models: TinyModels) -> None:
    """The same candidates whether or not the head's buffers had to grow between two levels."""
    engine = models.engine("heads")
    width = engine.target.features.shape[1]
    rng = np.random.default_rng(5)
    count = CAPACITY_STEP - 2
    features = rng.standard_normal((count, width)).astype(np.float32)
    tokens = rng.integers(3, 270, count).tolist()
    found = []
    for room in (0, 2 * CAPACITY_STEP):
        with Engine.load("heads", threads=1) as fresh:
            session = fresh.drafting.heads.loaded("eagle").session
            assert isinstance(session, EagleSession)
            session.reserve(room)
            session.append(features[:, fresh.drafting.heads.loaded("eagle").columns], tokens)
            first, places = session.grow([7, 8], [-1, -1], 1)
            second, _ = session.grow([9, 10], places, 2)
            found.append((first.log_probs, second.tokens, second.log_probs))
            assert session.cache.capacity == 2 * CAPACITY_STEP
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-5)
    assert found[0][1] == found[1][1]
    np.testing.assert_allclose(found[0][2], found[1][2], atol=1e-5)


def test_an_unknown_draft_is_told_with_what_there_is(models: TinyModels) -> None:
    models.bundle("heads")
    with pytest.raises(ModelNotFoundError, match=r"heads has no speculator 'nope' \(it has: .*eagle.*\), and there is"):
        Engine.load("heads", draft="nope", threads=1)
