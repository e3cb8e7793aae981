"""Lookahead decoding through the engine: no text changes, its pool is filled and kept, it ends where it should."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import IntegrityError, UsageError
from specrun.runtime import Engine
from specrun.runtime.bench import BenchPrompt, run_bench
from specrun.runtime.lookahead import LookaheadShape
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.proposal import MAX_NODES
from specrun.runtime.proposers.lookahead import LookaheadProposer
from specrun.runtime.result import SpeculationStats
from specrun.runtime.session import ModelSession
from specrun.runtime.verify import verify
from specrun.runtime.worth import speed_ratio

from .checks import close_logprobs, read, same_output, text_of
from .conftest import TinyModels
from .test_engine_sampling import joint, p_value
from .test_trees import SAMPLINGS
from .tiny_bundles import PROMPT, token_id
from .toys import LOWER, TURN_END_ID
from .tree_proposers import Record, proposing

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
LOOKAHEAD: dict[str, Any] = {"method": "lookahead"}
SHAPES = ((1, 2, 1), (3, 3, 3), (5, 4, 5), (2, 6, 4))
PROMPTS = (PROMPT, "a", "red blue red blue red blue", text_of(300))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["tgt", "tgt-int8", "tgt-int4"])
def test_equals_plain(models: TinyModels, name: str, shape: tuple[int, int, int]) -> None:
    """Greedy and sampled, every depth: the ids of plain decoding."""
    engine = models.engine(name)
    accepted = 0
    for options in SAMPLINGS.values():
        for prompt in PROMPTS if not options else PROMPTS[:1]:
            given: dict[str, Any] = {"max_tokens": 40, **RAW, **options}
            plain = engine.generate(prompt, method="none", **given)
            for draft_length in (1, 3, None):
                _, result = read(
                    engine.stream(prompt, lookahead=shape, draft_length=draft_length, **LOOKAHEAD, **given)
                )
                assert result.method == "lookahead"
                same_output(result, plain)
                if options.get("logprobs"):
                    close_logprobs(result, plain, within=0.0)
                most = LookaheadShape(*shape).nodes
                assert 0 < result.speculation.proposed <= most * result.speculation.rounds
                accepted += result.speculation.accepted
    assert accepted > 300


@pytest.mark.parametrize("sampling", ["greedy", "warm", "penalties"])
@pytest.mark.parametrize(("name", "margin", "noise"), [("tgt", 0.3, 1e-3), ("tgt", 1.5, 4e-3), ("tgt-int8", None, 0.5)])
def test_rough_side_branches(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, margin: float | None, noise: float, sampling: str
) -> None:
    """Window and guesses beside the best one as far off as those of a real graph, and further."""
    engine, options = models.engine(name), {"max_tokens": 80, **RAW, **SAMPLINGS[sampling], "seed": 1}
    plain = engine.generate(PROMPT, method="none", **options)
    engine.reset()
    records: list[Record] = []
    for _ in range(2):  # the second time with a full pool
        proposer = LookaheadProposer(engine.drafting.table, LookaheadShape(4, 4, 4), tokens=270)
        with proposing(monkeypatch, proposer, margin, noise) as record:
            same_output(engine.generate(PROMPT, **LOOKAHEAD, **options), plain)
        records.append(record)
    trusted = name == "tgt" and sampling != "penalties"
    if trusted:
        assert sum(record.side for record in records) > 0
    else:
        assert sum(record.carried for record in records) > 0


def greedy_watch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """(what a column's end sees, the token that was taken for it) of every column of every round."""
    seen: list[tuple[list[int], int]] = []
    propose, take = LookaheadProposer.propose, LookaheadProposer.take_logits
    latest: dict[str, list[int]] = {}

    def watched(self: LookaheadProposer, context: Sequence[int], limit: int) -> Any:
        latest["context"] = list(context)
        return propose(self, context, limit)

    def taking(self: LookaheadProposer, logits: np.ndarray) -> None:
        columns = [list(column) for column in self._window.columns]
        take(self, logits)
        for index, column in enumerate(columns):
            if self._window.columns[index] != column:
                zero = [other[0] for other in columns[1 : index + 1]]
                seen.append(([*latest["context"], *zero, *column[1:]], self._window.columns[index][-1]))

    monkeypatch.setattr(LookaheadProposer, "propose", watched)
    monkeypatch.setattr(LookaheadProposer, "take_logits", taking)
    return seen


@pytest.mark.parametrize("margin", [1e-3, None])
def test_the_window_is_filled_by_plain_decodings_choice(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, margin: float | None
) -> None:
    """Each new token of the window is the most probable one after what its column sees, also behind what is carried."""
    engine = models.engine("tgt")
    monkeypatch.setattr(Engine, "margin", margin)
    with monkeypatch.context() as patch:
        seen = greedy_watch(patch)
        for prompt in ("red blue red blue red blue", PROMPT):
            engine.generate(prompt, lookahead=(3, 4, 3), max_tokens=40, **LOOKAHEAD, **RAW)
    assert len(seen) > 120
    for context, token in seen[::3]:
        logits = engine.logits(context)
        assert logits[token] >= logits[:276].max() - 1e-3


def test_it_finds_what_was_never_written(models: TinyModels) -> None:
    """A text without a repeat, of which n-grams know next to nothing: the window has been through it before."""
    engine = models.engine("table")
    plain = engine.generate("smga", method="none", max_tokens=34, **RAW)
    ngram = engine.generate("smga", method="ngram", draft_length=4, max_tokens=34, **RAW)
    assert ngram.speculation.accepted < 3
    engine.reset()
    _, result = read(engine.stream("smga", lookahead=(4, 4, 3), max_tokens=34, **LOOKAHEAD, **RAW))
    same_output(result, plain)
    assert result.speculation.accepted > 10


def test_eos_wherever_it_stands(models: TinyModels) -> None:
    engine = models.engine("table")
    for start in range(len(LOWER) - 1):
        prompt = chr(ord("a") + start)
        expected = (*LOWER[start + 1 :], TURN_END_ID)
        for shape in SHAPES:
            _, result = read(engine.stream(prompt, lookahead=shape, raw=True, **LOOKAHEAD))
            assert result.token_ids == expected
            assert result.finish_reason == "stop"
    assert len(engine.drafting.table.pool) > 20
    assert not any({0, TURN_END_ID} & {*gram} for gram in engine.drafting.table.pool)


def test_stop_strings(models: TinyModels) -> None:
    engine = models.engine("table")
    options: dict[str, Any] = {"raw": True, "stop": ["END"], "max_tokens": 12, "logprobs": 2}
    plain = engine.generate("A", method="none", **options)
    for shape in SHAPES:
        _, result = read(engine.stream("A", lookahead=shape, **LOOKAHEAD, **options))
        same_output(result, plain)
        close_logprobs(result, plain, within=0.0)
        assert result.text == " b "


@pytest.mark.parametrize("name", ["tgt", "tgt-int8"])
def test_limits(models: TinyModels, name: str) -> None:
    """Exactly so many tokens, and no deeper node is run than could be committed."""
    engine = models.engine(name)
    for limit in range(1, 14):
        plain = engine.generate(PROMPT, method="none", max_tokens=limit, **RAW)
        for shape in SHAPES:
            result = engine.generate(PROMPT, lookahead=shape, max_tokens=limit, **LOOKAHEAD, **RAW)
            same_output(result, plain)
            assert len(result.token_ids) == limit
            if limit < 3:
                assert result.speculation.proposed == 0


def test_the_end_of_the_context(models: TinyModels) -> None:
    engine = models.engine("tgt-64")
    for count in (1, 40, 56, 60, 62, 63):
        prompt = text_of(count)
        plain = engine.generate(prompt, method="none", **RAW)
        for shape in SHAPES:
            _, result = read(engine.stream(prompt, lookahead=shape, **LOOKAHEAD, **RAW))
            same_output(result, plain)
            assert result.usage.completion_tokens == 64 - count


@pytest.mark.parametrize("room", [0, 4, 9])
def test_little_room_for_nodes(models: TinyModels, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """A sliding window, or the end of the buffers: less of the tree is run, down to its main branch."""
    engine = models.engine("tgt")
    plain = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    monkeypatch.setattr(ModelSession, "tree_room", lambda self, length: room)
    result = engine.generate(PROMPT, lookahead=(3, 4, 5), max_tokens=40, **LOOKAHEAD, **RAW)
    same_output(result, plain)
    assert result.speculation.proposed <= result.speculation.rounds * max(room, 15)


@pytest.mark.parametrize("name", ["tgt", "tgt-int8"])
def test_the_third_call(models: TinyModels, name: str) -> None:
    """TensorRT-LLM#2263: right on the third call too, other requests between them, with the pool of those before."""
    engine = models.engine(name)
    plain = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    other = engine.generate("red blue", method="none", max_tokens=20, **RAW)
    engine.reset()
    for _ in range(3):
        same_output(engine.generate(PROMPT, max_tokens=40, **LOOKAHEAD, **RAW), plain)
        same_output(engine.generate("red blue", max_tokens=20, **LOOKAHEAD, **RAW), other)
        same_output(engine.generate(PROMPT, method="ngram", max_tokens=40, **RAW), plain)


def test_streams_that_end_early(models: TinyModels) -> None:
    engine = models.engine("tgt-int8")
    plain = engine.generate(PROMPT, method="none", max_tokens=40, **RAW)
    for pieces in (1, 3, 9):
        stream = engine.stream(PROMPT, max_tokens=40, **LOOKAHEAD, **RAW)
        for _ in range(pieces):
            next(stream)
        stream.close()
        same_output(engine.generate(PROMPT, max_tokens=40, **LOOKAHEAD, **RAW), plain)


def test_a_chat(models: TinyModels) -> None:
    """Turns reuse the cache of those before, whichever method wrote it."""
    engine = models.engine("tgt-int8")
    texts = set()
    for methods in (("none", "none"), ("lookahead", "lookahead"), ("ngram", "lookahead"), ("lookahead", "none")):
        engine.reset()
        chat, said = engine.chat(), []
        for turn, method in enumerate((*methods, *methods)):
            _, result = read(chat.send(f"the ring {turn}", method=method, max_tokens=12, ignore_eos=True))
            assert turn == 0 or result.usage.cached_tokens > 0
            said.append(result.text)
        texts.add(tuple(said))
    assert len(texts) == 1


def test_the_pool_is_kept_with_the_texts(models: TinyModels, tmp_path: Path) -> None:
    """Saved, loaded, and of use: what the pool holds is guessed in the first round."""
    engine = models.engine("table")
    cold = engine.generate("a", max_tokens=20, **LOOKAHEAD, **RAW)
    pool = list(engine.drafting.table.pool)
    assert len(pool) > 20
    path = tmp_path / "texts.npz"
    engine.save_ngrams(path)
    engine.reset()
    assert len(engine.drafting.table.pool) == 0
    engine.load_ngrams(path)
    assert list(engine.drafting.table.pool) == pool
    warm = engine.generate("a", max_tokens=20, **LOOKAHEAD, **RAW)
    assert warm.speculation.rounds < cold.speculation.rounds
    assert warm.token_ids == cold.token_ids
    same_output(engine.generate("a", method="ngram", max_tokens=20, **RAW), cold)
    foreign = NgramTable()
    foreign.pool.add(token_id("a"), (5000,), 1)
    foreign.save(path)
    with pytest.raises(IntegrityError, match="5000"):
        engine.load_ngrams(path)


def test_the_joint_of_three_tokens_under_the_rejection_rule(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real graphs, rough side branches: guesses and window of all requests before, 2,000 seeds."""
    engine = models.engine("toy")
    options: dict[str, Any] = {"temperature": 0.7, "sampling": "rejection"}
    proposer = LookaheadProposer(engine.drafting.table, LookaheadShape(3, 3, 3), tokens=276)
    seen = []
    with proposing(monkeypatch, proposer, noise=0.5) as record:
        for seed in range(2000):
            result = engine.generate("abcabca", raw=True, max_tokens=4, seed=seed, **LOOKAHEAD, **options)
            seen.append(result.token_ids[:3])
    expected = joint(options, engine.encode("a", raw=True)[0], 3)
    assert p_value(seen, expected) > 1e-4
    assert record.carried_accepted > 100
    assert record.side == 0


def test_verify_covers_it(models: TinyModels) -> None:
    found = list(verify(models.engine("tgt-int8"), PROMPTS[:2], draft_lengths=(3,), max_tokens=16))
    assert {case.method for case in found if case.batch == 1} == {"ngram", "lookahead"}
    found += verify(
        models.engine("tgt-int8"), PROMPTS[:2], methods=["lookahead"], draft_lengths=(2,), lookahead=(5, 4, 5)
    )
    assert all(case.equal for case in found)


def test_verify_finds_a_window_that_changes_the_text(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of the window that see what stands beside them."""
    plant = vars(ModelSession)["run_batch"]

    def blind(self: ModelSession, tokens: Any, *, rows: int, parents: Any = None) -> np.ndarray:
        logits = plant(self, tokens, rows=rows, parents=parents)
        if parents is not None:
            logits[0, 1:] = np.roll(logits[0, 1:], 1, axis=0)
        return logits

    monkeypatch.setattr(ModelSession, "run_batch", blind)
    assert not all(case.equal for case in verify(models.engine("tgt"), PROMPTS[:1], methods=["lookahead"]))


def test_bench_takes_shapes(models: TinyModels) -> None:
    engine = models.engine("tgt")
    methods = ["none", "lookahead", "lookahead:5/4/5", "lookahead:2"]
    runs = run_bench(engine, [BenchPrompt("1", "qa", PROMPT)], methods=methods, max_tokens=30, repeats=1).runs
    assert [run.method for run in runs] == ["baseline", *methods]
    assert len({run.ids_digest for run in runs}) == 1
    assert len({run.rounds for run in runs}) > 1


def test_the_option_is_checked(models: TinyModels) -> None:
    engine = models.engine("tgt")
    for method in (None, "ngram"):
        with pytest.raises(UsageError, match="choose method 'lookahead' too"):
            engine.stream("a", method=method, lookahead=(3, 3, 3))
    with pytest.raises(UsageError, match="three whole numbers W, N, G"):
        engine.stream("a", method="lookahead", lookahead=(3, 3))
    with pytest.raises(UsageError, match=f"{MAX_NODES} are the most"):
        engine.stream("a", method="lookahead", lookahead=(7, 5, 7))
    result = engine.generate("a", method="lookahead", lookahead=None, draft_length=0, max_tokens=5, **RAW)
    assert result.speculation.proposed == 0


def counts(**changed: Any) -> SpeculationStats:
    values = {"rounds": 10, "proposed": 70, "accepted": 5, "bonuses": 10, "draft_s": 0.1, "verify_s": 1.0}
    return SpeculationStats(**(values | changed))


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (counts(), 1.5 * 1.0 / (1.7 * 1.1)),
        (counts(draft_s=0.0), 1.5 / 1.7),
        (counts(accepted=20, draft_s=0.0), 3.0 / 1.7),
        (counts(proposed=0), None),
        (SpeculationStats(), None),
    ],
)
def test_what_drafting_brought(stats: SpeculationStats, expected: float | None) -> None:
    """Tokens a round, over the cost of its width and the share of drafting."""
    found = speed_ratio(stats, lambda width: 1.0 + 0.1 * (width - 1))
    assert found == (None if expected is None else pytest.approx(expected))
