"""Token trees never change a text: equal to plain decoding for every shape, sampling, precision and policy."""

from __future__ import annotations

from typing import Any

import pytest

from specrun.runtime.result import Result

from .checks import same_output, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .tree_proposers import SHAPES, Record, TreeProposer, proposing

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "cold": {"temperature": 0.3, "seed": 1},
    "warm": {"temperature": 0.9, "seed": 2},
    "hot": {"temperature": 2.0, "seed": 3},
    "top-k": {"temperature": 1.0, "top_k": 5, "seed": 4},
    "top-p": {"temperature": 1.0, "top_p": 0.8, "seed": 5},
    "min-p": {"temperature": 1.2, "min_p": 0.1, "seed": 6},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "seed": 7},
    "greedy, penalised": {"presence_penalty": 1.0},
    "minimum": {"temperature": 0.9, "min_tokens": 20, "seed": 8, "ignore_eos": False},
    "logprobs": {"logprobs": 2},
}
TRUSTED = ("greedy", "cold", "warm", "hot", "minimum")  # samplings for which fp32 graphs go by the margin


def trees(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, shape: str, options: dict[str, Any], **how: Any
) -> tuple[Result, Record, TreeProposer]:
    """A request with such trees, equal to plain decoding, whose record is returned."""
    engine = models.engine(name)
    prompt, margin, noise = how.pop("prompt", PROMPT), how.pop("margin", "own"), how.pop("noise", 0.0)
    plain = engine.generate(prompt, method="none", **options)
    engine.reset()
    proposer = TreeProposer(plain.token_ids, SHAPES[shape], **how)
    with proposing(monkeypatch, proposer, margin, noise) as record:
        result = engine.generate(prompt, method="ngram", **options)
        same_output(result, plain)
        assert engine.target.length == len(engine._target_tokens)
    return result, record, proposer


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["tgt", "tgt-int8"])
def test_trees_equal_plain(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, shape: str, sampling: str
) -> None:
    options = {"max_tokens": 60, **RAW, **SAMPLINGS[sampling]}
    result, record, proposer = trees(models, monkeypatch, name, shape, options)
    margin = name == "tgt" and sampling in TRUSTED
    s = result.speculation
    assert s.proposed >= sum(proposer.sizes) > 0
    if shape == "wrong":
        assert s.accepted == 0
    if shape == "main":
        assert s.mean_accepted_tokens > 5
        assert record.carried == record.side == 0
    if shape in ("side", "random"):
        assert (record.side > 0) == margin
        assert (record.carried > 0) == (not margin)
        assert s.mean_accepted_tokens > 2
    if shape == "side" and not margin:
        assert record.carried_accepted > record.carried // 2 > 3


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", ["side", "random"])
def test_rough_side_branches_are_verified_again(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, shape: str, sampling: str
) -> None:
    """Side branches as far off as those of a real 8-bit graph, and further: what they said is carried, and checked."""
    options = {"max_tokens": 60, **RAW, **SAMPLINGS[sampling]}
    carried = stood = 0
    for noise in (0.3, 2.0):
        result, record, _ = trees(models, monkeypatch, "tgt-int8", shape, options, noise=noise)
        carried, stood = carried + record.carried, stood + record.carried_accepted
        assert result.speculation.accepted > 0
    assert 2 < stood < carried


@pytest.mark.parametrize("sampling", TRUSTED)
@pytest.mark.parametrize("shape", ["main", "side", "random"])
@pytest.mark.parametrize(("margin", "noise"), [(0.3, 1e-3), (1.0, 4e-3), (60.0, 0.5)])
def test_choices_left_open_are_made_again(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, shape: str, sampling: str, margin: float, noise: float
) -> None:
    """A larger bound and rougher side branches: choices are left open, and decided on exact rows afterwards."""
    options = {"max_tokens": 60, **RAW, **SAMPLINGS[sampling]}
    counts = dict.fromkeys(("open", "side", "inexact"), 0)
    for seed in range(3):
        result, record, _ = trees(models, monkeypatch, "tgt", shape, options, margin=margin, noise=noise, seed=seed)
        counts = {name: count + getattr(record, name) for name, count in counts.items()}
        s = result.speculation
        assert s.rounds >= s.corrections + s.bonuses + record.open
    if shape == "main":
        assert set(counts.values()) == {0}
    else:
        assert counts["open"] > 0
        assert counts["side"] > 0
        assert (counts["inexact"] > 0) == (margin < 60.0)  # else nothing is sure enough to leave the cache inexact


@pytest.mark.parametrize(("name", "noise"), [("tgt-int8", 0.5), ("tgt", 0.03)])
def test_the_policies_are_needed(models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, noise: float) -> None:
    """Negative control: side branches that are simply trusted, margin 0, do not write plain decoding's text."""
    engine, options = models.engine(name), {"max_tokens": 60, **RAW}
    plain = engine.generate(PROMPT, method="none", **options)
    texts = set()
    for seed in range(6):
        engine.reset()
        proposer = TreeProposer(plain.token_ids, SHAPES["side"], seed=seed)
        with proposing(monkeypatch, proposer, 0.0, noise):
            texts.add(engine.generate(PROMPT, method="ngram", **options).token_ids)
    assert texts - {plain.token_ids}


@pytest.mark.parametrize("name", ["tgt", "tgt-int8", "tgt-int4", "tgt-source"])
def test_many_random_trees(models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Other prompts, depths and seeds; the widths go beyond 16, with a dummy row."""
    widest = 0
    for seed in range(12):
        options = {"max_tokens": 50, **RAW, "temperature": 0.7 * (seed % 3), "seed": seed}
        how = {"prompt": text_of(10 + 23 * seed), "depth": 1 + seed % 9, "seed": seed}
        _, _, proposer = trees(models, monkeypatch, name, "random", options, **how)
        widest = max(widest, *proposer.sizes)
    assert widest > 20
