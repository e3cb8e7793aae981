"""What `specrun plan` is made of: the essay's figures, shapes, speed-ups, memory, and costs of real bundles."""

from __future__ import annotations

import dataclasses

import pytest

from specrun.models_cache.errors import UsageError
from specrun.models_cache.speculator import find_speculator
from specrun.runtime import cost_model, essay
from specrun.runtime.calibration import Calibration
from specrun.runtime.kv_shape import SHAPES, KVShape
from specrun.runtime.measured_costs import NGRAM, DraftCosts, MeasuredCosts, measured_costs
from specrun.runtime.plan import (
    DEFAULT_ALPHAS,
    BestLength,
    plan_memory,
    plan_pass_at_k,
    plan_samples,
    plan_speed,
)

from .conftest import TinyModels

V = {width: 1.0 + 0.15 * (width - 1) for width in range(1, 18)}
EAGLE = DraftCosts("heads", "eagle", 0.2, 0.03, (0.56, 0.57, 0.58, 0.6))


def measured(draft: DraftCosts = NGRAM) -> MeasuredCosts:
    return MeasuredCosts("model", 2, 0.005, V, draft)


def test_the_essays_table() -> None:
    rows = [(row.alpha, row.draft_length, row.phi, row.printed, f"{row.speedup:.2f}") for row in essay.SPEEDUPS]
    assert rows == [
        (0.5, 2, 0.1, 1.35, "1.46"),
        (0.7, 5, 0.1, 1.86, "1.96"),
        (0.75, 5, 0.1, 2.03, "2.19"),
        (0.9, 8, 0.1, 2.59, "3.40"),
    ]
    for row in essay.SPEEDUPS:
        a, k = row.alpha, row.draft_length
        assert row.tokens_per_round == pytest.approx((1 - a ** (k + 1)) / (1 - a), rel=1e-12)
        assert row.speedup == pytest.approx((1 - a ** (k + 1)) / ((1 - a) * (k * 0.1 + 1)), rel=1e-12)


def test_the_essays_other_figures() -> None:
    figures = {figure.printed: (figure.value, figure.right) for figure in essay.figures()}
    assert figures == {
        "7.73 (and 16.90) GB": (2**35, "34.4 GB (32 GiB)"),
        "O(3 L d b)": (3 * 2**35, "103.1 GB; two buffers 68.7"),
        "phi = 1": (0.8, "phi = 0.8 (K = 5)"),
        "99.2 %": (pytest.approx(1 - 0.3**16, abs=1e-12), "0.999999996 (99.2 % is N = 4)"),
        "56.25 %": (pytest.approx(0.5625, abs=1e-12), "56.25 % (right)"),
    }


def test_shapes() -> None:
    assert KVShape.parse("LLaMA-7B") == SHAPES["llama-7b"] == KVShape("llama-7b", 32, 32, 128, 2)
    assert KVShape.parse("2x12x64") == KVShape("2x12x64", 2, 12, 64, 2)
    assert KVShape.parse("2x12x64").kv_bytes(10, 3) == 2 * 2 * 12 * 64 * 10 * 3 * 2
    for text in ("llama", "2x12", "0x1x1", "1x1x1x1", "ax1x1", "", "1x1x9999999"):
        with pytest.raises(UsageError, match="is no shape: give llama-7b, or layers"):
            KVShape.parse(text)


def test_shapes_are_those_of_the_real_buffers(models: TinyModels) -> None:
    engine = models.engine("heads", "eagle")
    for method in ("none", "eagle"):
        engine.generate("hello", max_tokens=4, method=method)
    kept, capacity = engine.memory(), engine.target.cache.capacity
    assert KVShape.of_bundle(engine.bundle).kv_bytes(capacity) == kept.kv_target_bytes
    eagle = find_speculator(engine.bundle, "eagle")
    shape = KVShape.of_drafting(eagle, engine.bundle)
    assert shape is not None
    assert shape.kv_bytes(256) == kept.kv_draft_bytes
    medusa = KVShape.of_drafting(find_speculator(engine.bundle, "medusa"), engine.bundle)
    assert medusa is not None
    assert medusa.kv_bytes(capacity) == 0
    assert KVShape.of_drafting(None, engine.bundle) is None
    assert KVShape.of_drafting(models.bundle("mix"), engine.bundle) == KVShape.of_bundle(models.bundle("mix"))


def test_speed_from_flags() -> None:
    plan = plan_speed((0.7,), (1, 5), 0.1)
    assert [row.draft_length for row in plan.rows] == [1, 4, 5]  # with the best one
    assert plan.best == (BestLength(0.7, 4, None),)
    for row in plan.rows:
        assert row.tokens_per_round == cost_model.expected_tokens(0.7, row.draft_length)
        assert row.speedup == cost_model.speedup(0.7, row.draft_length, 0.1)
        assert row.speedup_measured is None


def test_what_is_left_out() -> None:
    plan = plan_speed()
    assert (plan.phi, plan.first) == (0.1, 0.1)
    assert tuple(best.alpha for best in plan.best) == DEFAULT_ALPHAS
    assert plan_speed((0.9,), (100,), 0.0).best[0].draft_length == 100
    assert plan_speed((0.05,), (4,), 0.1).rows[0].draft_length == 0  # nothing pays


def test_speed_from_measured_costs() -> None:
    plan = plan_speed(measured=measured(EAGLE))
    alpha = cost_model.equivalent_alpha(EAGLE.acceptance)
    (best,) = plan.best
    assert best == BestLength(alpha, 5, 2)
    for row in plan.rows:
        k = row.draft_length
        cost = 0.0 if k == 0 else 0.2 + (k - 1) * 0.03
        assert row.speedup == pytest.approx(row.tokens_per_round / (cost + 1), rel=1e-12)
        assert row.speedup_measured == pytest.approx(row.tokens_per_round / (cost + V[k + 1]), rel=1e-12)
    given = plan_speed((0.9,), (3,), 0.5, measured(EAGLE))
    assert (given.first, given.phi, given.draft) == (0.5, 0.5, None)
    assert plan.draft is EAGLE
    assert given.rows[-1].speedup_measured == cost_model.speedup_measured(0.9, 3, 0.5, V)


def test_what_is_not_known_of_a_draft_is_a_range() -> None:
    plan = plan_speed(measured=measured(DraftCosts("small", "draft", 0.1, 0.1)))
    assert tuple(best.alpha for best in plan.best) == DEFAULT_ALPHAS
    free = plan_speed(measured=measured())
    assert [best.draft_length for best in free.best] == [16] * 5
    assert all(best.draft_length_measured is not None and best.draft_length_measured < 16 for best in free.best)


def test_a_draft_length_that_nothing_drafts() -> None:
    medusa = dataclasses.replace(EAGLE, name="medusa", phi=0.0, most=4)
    assert max(row.draft_length for row in plan_speed(measured=measured(medusa)).rows) == 4
    with pytest.raises(UsageError, match="medusa drafts at most 4 tokens a round: give a K up to 4"):
        plan_speed(None, (5,), None, measured(medusa))
    with pytest.raises(UsageError, match="ngram drafts at most 16"):
        plan_speed(None, (17,), None, measured())


def test_memory() -> None:
    plan = plan_memory(SHAPES["llama-7b"], KVShape.parse("2x12x64"), batch=32, positions=2048)
    assert plan.target_bytes == 2**35
    assert plan.draft_bytes == 2 * 2 * 12 * 64 * 2 * 65536
    assert plan.dual_bytes == plan.target_bytes + plan.draft_bytes
    assert plan.naive_bytes == 3 * 2**35
    assert plan.share_of_naive == pytest.approx(0.337, abs=1e-3)
    assert plan_memory(SHAPES["llama-7b"], None, batch=1, positions=1).share_of_naive == pytest.approx(1 / 3)


def test_samples() -> None:
    plan = plan_samples(16, prefix=768, suffix=512, p=0.7)
    assert (plan.saving, plan.coverage) == (cost_model.prefix_saving(768, 512, 16), cost_model.coverage_bound(0.7, 16))
    assert plan_samples(4, p=0.5).saving is None
    assert plan_samples(4, prefix=1, suffix=0).coverage is None
    with pytest.raises(UsageError, match="--prefix and --suffix"):
        plan_samples(4, prefix=1)
    with pytest.raises(UsageError, match="--p for its coverage"):
        plan_samples(4)
    assert plan_pass_at_k(5, 2, 1).pass_at_k == pytest.approx(0.4, rel=1e-12)


def test_costs_of_a_bundle(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.engine("heads")
    calibration = Calibration(1, {1: 0.002, 2: 0.003, 4: 0.005, 17: 0.018})
    monkeypatch.setattr(engine, "calibration", calibration)
    costs = measured_costs(engine)
    assert (costs.model, costs.threads, costs.step_s, costs.draft) == ("heads", 1, 0.002, NGRAM)
    assert sorted(costs.v) == list(range(1, 18))
    assert [costs.v[width] for width in (1, 2, 3, 4, 17)] == pytest.approx([1.0, 1.5, 2.0, 2.5, 9.0], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "most", "further"), [("medusa", 3, False), ("eagle", 16, True), ("eagle1", 16, True), ("draft", 16, True)]
)
def test_costs_of_speculators(models: TinyModels, name: str, most: int, further: bool) -> None:
    engine = models.engine("heads")
    draft = measured_costs(engine, find_speculator(engine.bundle, name)).draft
    assert (draft.name, draft.method, draft.most) == (name, name.removesuffix("1"), most)
    assert draft.first > 0
    assert (draft.phi > 0) is further
    assert draft.acceptance == (0.45, 0.4, 0.4)
    assert draft.alpha == cost_model.equivalent_alpha((0.45, 0.4, 0.4))


def test_costs_of_a_draft_model(models: TinyModels) -> None:
    engine = models.engine("tgt", "mix")
    draft = measured_costs(engine, models.bundle("mix")).draft
    assert (draft.name, draft.method, draft.alpha) == ("mix", "draft", None)
    assert draft.first == draft.phi > 0
