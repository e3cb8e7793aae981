"""`tune`: what it measures, where it is kept, and what requests begin from afterwards."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime import Engine
from specrun.runtime.head_estimate import HeadEstimate, Learnt
from specrun.runtime.proposers.ngram import PRIORS
from specrun.runtime.tune import candidates, tune
from specrun.runtime.tuning import UNTUNED, MethodFigures, Tuning, load_tuning, save_tuning, tuning_path

from .conftest import TinyModels

PROMPTS = ("one two three one two three", "a b c d a b c d a b")
ACCEPTANCE = ((0.5, 0.2), (0.4, 0.1))


@pytest.fixture
def engine(models: TinyModels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    """An engine with heads, whose tuning is kept in a folder of this test."""
    engine = models.engine("heads")
    monkeypatch.setattr("specrun.runtime.tuning.tuning_path", lambda bundle, threads, device: tmp_path / "tuning.json")
    engine.begin_from(UNTUNED)
    return engine


def figures(seconds: float) -> MethodFigures:
    return MethodFigures(100, seconds, 1.0, 1.5, 0.5, 0.1, 5.0)


def test_what_is_measured(engine: Engine) -> None:
    tuning = tune(engine, PROMPTS, max_tokens=24)
    assert set(tuning.methods) == set(candidates(engine)) == {
        "none", "ngram", "lookahead", "draft+ngram", "medusa+ngram", "eagle+ngram"
    }  # fmt: skip
    plain = tuning.methods["none"]
    assert (plain.ratio, plain.mean_accepted_tokens, plain.acceptance_rate) == (1.0, 1.0, 0.0)
    for method, row in tuning.methods.items():
        assert row.tokens == 24 * len(PROMPTS)
        assert row.seconds_per_token > 0
        assert row.ratio == pytest.approx(plain.seconds_per_token / row.seconds_per_token)
        assert bool(row.acceptance) == method.startswith(("medusa", "eagle"))
    assert tuning.prompts == len(PROMPTS)
    assert set(tuning.lifts) == {"draft", "eagle", "medusa"}
    assert set(tuning.ngram) == set(PRIORS)
    assert {found.digest for found in engine.bundle.speculators() if found.name in ("eagle", "medusa")} & set(
        tuning.heads
    )
    assert load_tuning(engine.bundle, engine.threads) == tuning == engine.tuning


def test_texts_are_those_of_before(engine: Engine) -> None:
    before = engine.generate(PROMPTS[0], method="none", max_tokens=30).token_ids
    tune(engine, PROMPTS, max_tokens=16)
    for method in ("auto", "eagle+ngram", "ngram"):
        assert engine.generate(PROMPTS[0], method=method, max_tokens=30).token_ids == before


def test_auto_is_the_fastest_that_was_measured(engine: Engine) -> None:
    assert engine.resolve_method("auto") == "eagle+ngram"  # before anything was measured
    seconds = {"none": 1.0, "ngram": 0.9, "medusa+ngram": 0.7, "eagle+ngram": 0.8}
    engine.begin_from(Tuning({method: figures(each) for method, each in seconds.items()}))
    assert engine.resolve_method("auto") == "medusa+ngram"
    assert engine.generate("a", max_tokens=2).method == "medusa+ngram"
    # What two figures differ by through chance alone decides nothing.
    seconds |= {"medusa+ngram": 0.78}
    engine.begin_from(Tuning({method: figures(each) for method, each in seconds.items()}))
    assert engine.resolve_method("auto") == "eagle+ngram"
    # Where nothing beats plain decoding, n-grams, which propose only what pays.
    seconds |= {"none": 0.1, "ngram": 0.2}
    engine.begin_from(Tuning({method: figures(each) for method, each in seconds.items()}))
    assert engine.resolve_method("auto") == "ngram"
    assert engine.resolve_method("eagle") == "eagle"


def test_lookahead_is_no_choice_of_auto(engine: Engine) -> None:
    engine.begin_from(Tuning({"lookahead": figures(0.1), "ngram": figures(0.9)}))
    assert engine.resolve_method("auto") == "ngram"


def test_requests_begin_from_what_was_learnt(engine: Engine) -> None:
    """The estimates of a tuned engine are those that the tuning ended with, before any request and after a reset."""
    tuning = tune(engine, PROMPTS, max_tokens=24)
    known = engine.learnt()
    assert known.ngram == pytest.approx(tuning.ngram)
    for digest, learnt in known.heads.items():
        for name in ("by_rank", "by_sureness"):
            for ours, theirs in zip(getattr(learnt, name), getattr(tuning.heads[digest], name), strict=True):
                assert ours == pytest.approx(theirs)
    engine.generate(PROMPTS[1], method="eagle+ngram", max_tokens=20)
    assert engine.learnt().ngram != known.ngram
    engine.reset()
    assert engine.learnt().ngram == known.ngram


def test_only_texts_may_be_forgotten(engine: Engine) -> None:
    engine.generate(PROMPTS[1], method="ngram", max_tokens=20)
    learnt = engine.learnt().ngram
    assert learnt != dict(PRIORS)
    engine.reset(texts_only=True)
    assert engine.learnt().ngram == learnt
    assert engine.generate(PROMPTS[1], method="none", max_tokens=2).usage.cached_tokens == 0


def test_no_prompts(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no prompt to tune with"):
        tune(engine, ())


def test_a_method_that_cannot_run(models: TinyModels) -> None:
    with pytest.raises(UsageError, match="needs a speculator"):
        tune(models.engine("tgt"), PROMPTS, methods=("eagle+ngram",))


def test_kept_and_read_again(engine: Engine) -> None:
    head = HeadEstimate(ACCEPTANCE)
    for stood in (True, False, True):
        head.learn(0, 0, -0.5, stood)
    tuning = Tuning(
        {"ngram": replace(figures(0.5), acceptance=(0.5, 0.25))},
        beyond=2e-6,
        ngram=dict(PRIORS),
        heads={"abc": head.learnt},
        prompts=3,
    )
    save_tuning(engine.bundle, 1, tuning)
    assert load_tuning(engine.bundle, 1) == tuning
    again = HeadEstimate(ACCEPTANCE, tuning.heads["abc"])
    assert again.learnt == head.learnt


@pytest.mark.parametrize(
    "harm",
    [
        lambda raw: raw.pop("heads"),
        lambda raw: raw["ngram"].pop(),
        lambda raw: raw["ngram"][0].__setitem__(2, 1.5),
        lambda raw: raw.__setitem__("beyond", "much"),
        lambda raw: raw.__setitem__("beyond", -1.0),
        lambda raw: raw["methods"].__setitem__("none", {}),
        lambda raw: raw["heads"]["abc"]["opinions"].pop(),
        lambda raw: raw["heads"]["abc"]["by_sureness"][0].__setitem__(0, 2.0),
        lambda raw: raw["heads"]["abc"]["opinions"].__setitem__(0, -1e308),
        lambda raw: raw["heads"]["abc"]["opinions"].__setitem__(0, 10**400),
        lambda raw: raw["heads"]["abc"]["opinions"].__setitem__(0, 21.0),
        lambda raw: raw.__setitem__("beyond", 10**400),
        lambda raw: raw.__setitem__("prompts", float("inf")),
        lambda raw: raw["methods"]["none"].__setitem__("tokens", float("inf")),
        lambda raw: raw["methods"]["none"].__setitem__("seconds_per_token", 0.0),
        lambda raw: raw["methods"].__setitem__("\ud800", dict(raw["methods"]["none"], acceptance=[])),
    ],
)
def test_what_cannot_be_read_is_as_nothing(engine: Engine, harm: object) -> None:
    learnt = HeadEstimate(ACCEPTANCE).learnt
    tuning = Tuning({"none": figures(1.0)}, 0.0, dict(PRIORS), {"abc": learnt}, 1)
    path = save_tuning(engine.bundle, 1, tuning)
    raw = json.loads(path.read_text(encoding="utf-8"))
    harm(raw)  # type: ignore[operator]
    path.write_text(json.dumps(raw), encoding="utf-8")
    assert load_tuning(engine.bundle, 1) == UNTUNED
    for content in (b"\xff{", b"[" * 100_000):
        path.write_bytes(content)
        assert load_tuning(engine.bundle, 1) == UNTUNED


def test_what_was_learnt_of_another_head_does_not_fit() -> None:
    other = HeadEstimate(((0.9,), (0.8,), (0.7,))).learnt
    assert not other.fits(ACCEPTANCE)
    assert HeadEstimate(ACCEPTANCE, other).learnt == HeadEstimate(ACCEPTANCE).learnt


def test_opinions_stay_within_what_is_read_again() -> None:
    for stood in (True, False):
        estimate = HeadEstimate(ACCEPTANCE)
        for _ in range(200):
            estimate.learn_pooled(0, float(not stood), stood)
        learnt = estimate.learnt
        assert abs(learnt.opinions[0]) == 20.0
        assert Learnt.read(json.loads(json.dumps(asdict(learnt)))) == learnt


def test_chances_are_checked() -> None:
    learnt = HeadEstimate(ACCEPTANCE).learnt
    raw = {"by_rank": learnt.by_rank, "by_sureness": learnt.by_sureness, "opinions": learnt.opinions}
    assert Learnt.read(raw) == learnt
    with pytest.raises(ValueError, match="no chances"):
        Learnt.read(raw | {"by_rank": ((1.2,),)})


def test_every_setting_has_a_file_of_its_own(models: TinyModels) -> None:
    bundle = models.bundle("heads")
    paths = {tuning_path(bundle, 1), tuning_path(bundle, 2), tuning_path(models.bundle("tgt-int8"), 1)}
    assert len(paths) == 3


def test_a_kept_slope_that_cannot_be_is_bounded(models: TinyModels) -> None:
    """A token of text costs at most what reading its KV as slowly as an eighth of the weights' speed would."""
    engine = models.engine("heads")
    sizes = engine.bundle.manifest.sizes
    kv = 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * 4
    engine.begin_from(Tuning({}, beyond=1.0))
    most = 8 * kv / engine.bundle.weights_bytes * engine.calibration.cost(1)
    assert engine.learnt().beyond == pytest.approx(most)
    engine.begin_from(Tuning({}, beyond=most / 2))
    assert engine.learnt().beyond == pytest.approx(most / 2)
