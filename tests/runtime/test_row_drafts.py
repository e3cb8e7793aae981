"""What speculators draft for rows together: for each row the candidates of a fresh one, and asked where it pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.speculator import find_speculator
from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime.backend import create_session
from specrun.runtime.batching import eagle_forest
from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.batching.draft_rows import DraftRow, DraftRows
from specrun.runtime.batching.eagle_forest import EagleForest, ForestRow
from specrun.runtime.batching.eagle_rows import EagleRow, EagleRows
from specrun.runtime.batching.medusa_rows import MedusaRow, MedusaRows
from specrun.runtime.batching.row_drafts import RowDrafts
from specrun.runtime.batching.row_proposer import RowProposer
from specrun.runtime.speculator import Candidates, Choice, EagleSession, MedusaSession

from .checks import same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
PROMPTS = [
    PROMPT,
    PROMPT[:20],
    PROMPT,
    text_of(300) + "a",
    PROMPT + "x",
    text_of(300) + "b",
    "zebra",
    PROMPT + "ab" * 90,
]


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs under which wide rounds and asking heads pay; those measured on a tiny model are mostly noise."""
    monkeypatch.setattr(BatchCosts, "round", lambda self, rows, width: 1.0 + 0.001 * width)


def run(engine: Engine, size: int, prompts: Sequence[str] = PROMPTS, **options: Any) -> BatchEngine:
    """Answer prompts, with answers of different lengths; each is that of plain decoding."""
    batch = BatchEngine(engine, batch_size=size)
    requests = [
        BatchRequest(index, prompt, {"max_tokens": 9 + 7 * (index % 4), **RAW, **options})
        for index, prompt in enumerate(prompts)
    ]
    found = {answer.index: answer.result for answer in batch.run(requests)}
    for request in requests:
        result = found[request.index]
        assert isinstance(result, Result), result
        plain = engine.generate(request.prompt, **{**request.options, "method": "none", "draft_length": None})
        same_output(result, plain)
    return batch


class FreshEagle:
    """Compares the candidates of each row at each level with those of a head that sees this row alone."""

    def __init__(self, models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        found = find_speculator(models.bundle("heads40"), name)
        sizes = found.manifest.sizes
        self.session = EagleSession(
            name,
            create_session(found.graph_path(), threads=1),
            feature_width=len(found.manifest.taps) * sizes.hidden,
            hidden=sizes.hidden,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            draft_vocabulary=sizes.draft_vocabulary,
            positions=sizes.positions,
        )
        self.rows: dict[tuple[int, ...], np.ndarray] = {}  # features, by the text up to their token
        self.compared, self.shared, self.dropped = 0, 0, 0
        self.offset = 0  # where positions begin: 8-bit matrices round what was rotated further differently
        run_frame = self.session._run

        def shifted(frame: Any, choice: Choice, *, planted: bool = False) -> Candidates:
            frame.inputs["position_ids"] += self.offset
            return run_frame(frame, choice, planted=planted)

        monkeypatch.setattr(self.session, "_run", shifted)
        take, extend, enter = EagleRow.take_features, EagleRows._extend, EagleRows.enter

        def watched_take(row: EagleRow, position: int, features: np.ndarray) -> None:
            for index, values in enumerate(features[:, row.features._columns]):
                self.rows[tuple(row.text[: position + index + 1])] = values.copy()
            take(row, position, features)

        def watched_enter(group: EagleRows, row: EagleRow, position: int) -> None:
            enter(group, row, position)
            self.shared += row.slots.length > 0

        def watched_extend(group: EagleRows, rows: Any, candidates: Candidates, noises: Any) -> Any:
            for place, (row, head) in enumerate(rows):
                self.check(row, head, candidates.tokens[place])
            return extend(group, rows, candidates, noises)

        monkeypatch.setattr(EagleRow, "take_features", watched_take)
        monkeypatch.setattr(EagleRows, "enter", watched_enter)
        monkeypatch.setattr(EagleRows, "_extend", watched_extend)

    def check(self, row: RowProposer, head: EagleRow, tokens: Sequence[int]) -> None:
        first = head.first + head.slots.dropped
        context = list(row.context)
        rows = np.stack([self.rows[tuple(context[: position + 1])] for position in range(first, len(context) - 1)])
        self.session.rewind_to(0)
        self.offset = head.slots.dropped
        found = self.session.append(rows, context[first + 1 :])
        place = -1
        for depth, token in enumerate(head.chain.drafted, 1):
            found, [place] = self.session.grow([token], [place], depth)
        assert list(tokens) == found.tokens[0]
        self.compared += 1
        self.dropped += head.slots.dropped > 0


@pytest.mark.parametrize("method", ["eagle", "eagle+ngram"])
@pytest.mark.parametrize("draft_length", [3, None])
@pytest.mark.parametrize("name", ["eagle", "eagle1"])
def test_eagle_rows_have_the_candidates_of_a_fresh_head(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None, name: str, draft_length: int | None, method: str
) -> None:
    """After rounds of any outcome, in rows that begin with another one's slots, move, and end."""
    fresh = FreshEagle(models, monkeypatch, name)
    run(models.engine("heads40", name), 3, method=method, draft_length=draft_length)
    assert fresh.compared > 30
    assert fresh.shared >= 3


def test_a_forest_that_is_full_is_tidied(models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    """Slots of ended rows go, then the oldest ones of the others; what is left guesses what a fresh head would."""
    fresh = FreshEagle(models, monkeypatch, "eagle")
    monkeypatch.setattr(eagle_forest, "TIDIED_FROM", 16)
    tidied: list[int] = []
    tidy, init = EagleForest._tidy, EagleForest.__init__

    def small(self: EagleForest, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.positions = 300

    def watched(self: EagleForest, slots: int) -> None:
        tidied.append(self.end)
        tidy(self, slots)
        assert self.end <= tidied[-1]

    monkeypatch.setattr(EagleForest, "__init__", small)
    monkeypatch.setattr(EagleForest, "_tidy", watched)
    run(models.engine("heads40", "eagle"), 3, PROMPTS * 2, method="eagle", draft_length=2)
    assert fresh.compared > 100
    assert fresh.dropped > 10
    assert tidied


def test_a_head_that_was_not_asked_for_long_begins_anew(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None
) -> None:
    """It keeps a bounded number of features, and its guesses go by the newest ones."""
    fresh = FreshEagle(models, monkeypatch, "eagle")
    monkeypatch.setattr("specrun.runtime.batching.eagle_rows.WINDOW", 8)
    draft, rounds, held = EagleRows.draft, [0], [0]

    def seldom(self: EagleRows, rows: Any, goes_on: Any) -> None:
        rounds[0] += 1
        for row in rows:
            features = row.head.features
            held[0] = max(held[0], features.end - row.head.written)
        if rounds[0] % 23 == 0:
            draft(self, rows, goes_on)

    monkeypatch.setattr(EagleRows, "draft", seldom)
    run(models.engine("heads40", "eagle"), 2, ["a", "b", PROMPT], method="eagle", draft_length=2, max_tokens=60)
    assert fresh.compared > 4
    assert held[0] <= 16 + 3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}], ids=["greedy", "coupled"])
def test_draft_rows_have_the_logits_of_a_fresh_draft(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None, sampling: dict[str, Any]
) -> None:
    """Bit for bit, whatever stood in the row before, and after rows that ended and moved."""
    engine = models.engine("tgt", "mix")
    compared, extend = [0], DraftRows._extend

    def watched(group: DraftRows, rows: Any, logits: dict[int, np.ndarray]) -> Any:
        session = engine.drafting.draft
        assert session is not None
        for row, head, slot in rows:
            session.rewind_to(0)
            assert isinstance(head, DraftRow)
            assert np.array_equal(logits[slot], session.prefill([*row.context, *head.chain.drafted])[0])
            compared[0] += 1
        return extend(group, rows, logits)

    monkeypatch.setattr(DraftRows, "_extend", watched)
    for method, draft_length in (("draft", 3), ("draft+ngram", None)):
        engine.reset()
        batch = run(engine, 3, method=method, draft_length=draft_length, **sampling)
        assert batch.stats.accepted > 10
    assert compared[0] > 200


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", ["medusa", "medusa1"])
def test_medusa_in_one_run(models: TinyModels, name: str, noisy: bool, rng: np.random.Generator) -> None:
    """Several sequences at once are the same as one after another, as graphs of before have to be run."""
    session = models.engine("heads40", name).drafting.heads.loaded("medusa").session
    assert isinstance(session, MedusaSession)
    assert not session.one_by_one
    features = rng.standard_normal((3, session._width)).astype(np.float32)
    noise = rng.gumbel(size=(3 * session.heads, session.draft_vocabulary)).astype(np.float32) if noisy else None
    choice = Choice(noise=noise, logits=True)
    together = session.run(features, [40, 41, 42], choice)
    logits = np.array(together.logits)
    session.one_by_one = True
    try:
        apart = session.run(features, [40, 41, 42], choice)
    finally:
        session.one_by_one = False
    assert together.tokens == apart.tokens
    np.testing.assert_allclose(together.log_probs, apart.log_probs, atol=1e-4)
    assert apart.logits is not None
    np.testing.assert_allclose(logits, apart.logits, atol=1e-4)


def test_medusa_rows_read_the_newest_feature(models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    """Heads that are right are accepted to the last token, so every row has its own feature and position."""
    engine = models.engine("table-heads")
    seen = [0]
    draft = MedusaRows.draft

    def watched(self: MedusaRows, rows: Sequence[RowProposer], goes_on: Any) -> None:
        for row in rows:
            assert isinstance(row.head, MedusaRow)
            assert row.head.position == len(row.context) - 2
            seen[0] += 1
        draft(self, rows, goes_on)

    monkeypatch.setattr(MedusaRows, "draft", watched)
    batch = run(engine, 3, ["a", "bcd", "A", "xyz", "q"], method="medusa", draft_length=3)
    assert seen[0] > 10
    assert batch.stats.accepted == batch.stats.evaluated > 20


@pytest.mark.parametrize("method", ["eagle", "medusa"])
def test_heads_that_are_right(models: TinyModels, wide: None, method: str) -> None:
    """An adaptive chain of a head that is never wrong grows."""
    batch = run(models.engine("table-heads"), 4, ["a", "bcd", "A", "xyz", "q"] * 3, method=method, max_tokens=40)
    assert batch.stats.acceptance_rate > 0.95
    assert batch.stats.completion_tokens > 2.5 * batch.stats.row_rounds


@pytest.mark.parametrize("method", ["medusa", "eagle", "draft", "eagle+ngram", "draft+ngram"])
def test_the_rejection_rule(models: TinyModels, wide: None, method: str) -> None:
    """Draws with their q go through rounds of rows beside greedy and coupled ones."""
    engine = models.engine("heads")
    kinds: list[dict[str, Any]] = [
        {"sampling": "rejection", "temperature": 0.9, "seed": 5},
        {},
        {"temperature": 0.7, "seed": 9},
    ]
    requests = [
        BatchRequest(index, f"{PROMPT}{index}", {"max_tokens": 25, "method": method, **RAW, **kinds[index % 3]})
        for index in range(9)
    ]
    found = {answer.index: answer.result for answer in BatchEngine(engine, batch_size=4).run(requests)}
    accepted = 0
    for request in requests:
        result = found[request.index]
        assert isinstance(result, Result), result
        assert result.usage.completion_tokens == 25
        if request.index % 3:
            same_output(result, engine.generate(request.prompt, **{**request.options, "method": "none"}))
        else:
            accepted += result.speculation.evaluated
    assert accepted > 0


class TestAsking:
    def asked(
        self, models: TinyModels, monkeypatch: pytest.MonkeyPatch, cost: Any, method: str = "medusa+ngram"
    ) -> Any:
        """(rounds in which the head was asked, rounds) under these costs."""
        monkeypatch.setattr(BatchCosts, "round", cost)
        asked = [0]
        draft = MedusaRows.draft

        def watched(self: MedusaRows, rows: Any, goes_on: Any) -> None:
            asked[0] += 1
            draft(self, rows, goes_on)

        monkeypatch.setattr(MedusaRows, "draft", watched)
        batch = run(models.engine("heads"), 4, [f"{index}" for index in range(8)], method="medusa", max_tokens=60)
        return asked[0], batch.stats.rounds

    def test_where_rounds_are_dear_and_wide_ones_as_well(
        self, models: TinyModels, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No width but 1 pays: a head would only cost, so it is hardly asked."""
        asked, rounds = self.asked(models, monkeypatch, lambda self, rows, width: 1e-4 * width)
        assert rounds > 60
        assert asked < 0.1 * rounds

    def test_where_a_head_costs_next_to_nothing(self, models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
        asked, rounds = self.asked(models, monkeypatch, lambda self, rows, width: 1.0 + 0.001 * width)
        assert asked > 0.5 * rounds

    def test_a_head_that_is_far_behind(self, models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reading the texts would take longer than the head can bring back."""
        monkeypatch.setattr(MedusaRows, "behind", lambda self, rows: 1e9)
        asked, _ = self.asked(models, monkeypatch, lambda self, rows, width: 1.0 + 0.001 * width)
        assert asked == 0

    def test_speculators_are_loaded_when_a_request_names_them(self, models: TinyModels) -> None:
        models.bundle("heads")
        with Engine.load("heads", threads=1) as engine:
            list(BatchEngine(engine, batch_size=2).run([BatchRequest(0, "a", {"method": "ngram", "max_tokens": 3})]))
            assert engine.memory().weights_bytes == engine.bundle.weights_bytes
            list(BatchEngine(engine, batch_size=2).run([BatchRequest(0, "a", {"method": "medusa", "max_tokens": 3})]))
            assert engine.memory().weights_bytes > engine.bundle.weights_bytes


def test_rows_of_a_forest_share_a_beginning() -> None:
    row = ForestRow(range(5), dropped=2)
    assert row.length == 7
    copy = row.copy(4)
    assert (copy.places, copy.length) == ([0, 1], 4)
    copy.places.append(9)
    assert row.places == [0, 1, 2, 3, 4]
    assert row.copy(1).length == 1
    row.rewind_to(3)
    assert (row.places, row.length) == ([0], 3)


def test_a_batch_frees_what_it_drafted_with(models: TinyModels, monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    made: list[RowDrafts] = []
    init = RowDrafts.__init__

    def watched(self: RowDrafts, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(RowDrafts, "__init__", watched)
    for method in ("eagle", "draft"):
        run(models.engine("heads"), 3, PROMPTS[:4], method=method)
        assert made[-1].nbytes == 0
