"""The graphs of heads and drafts against numpy: to rounding in float32, closely in 8 bits; the choice of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from specrun.export import speculator_parts
from specrun.export.graph import build_target, feature_taps
from specrun.export.quantize import FloatMatrix, Matrix, dequantize_matrix
from specrun.export.speculator_config import EAGLE_LAYOUTS, MEDUSA_LAYOUTS, DraftConfig
from specrun.export.speculator_parts import SpeculatorParts, model_config
from specrun.export.speculator_weights import Speculator
from specrun.export.weight_file import WeightFile

from .graph_runner import GraphRunner, open_session
from .speculator_reference import (
    EagleRunner,
    plain_choice,
    random_ends,
    reference_draft,
    reference_eagle,
    reference_medusa,
    write_graph,
)
from .tiny_speculators import tiny_speculator

OPTIONAL = ("tap_norms", "fc_bias", "qkv_bias", "layers.0.qkv_bias")
OWN_HEADS = ("heads.0.head", "heads.1.head", "heads.2.head")
TOKENS = [5, 17, 203, 4, 4, 288, 91, 60]
ENDS = random_ends(300, 64)

Check = Callable[[np.ndarray, np.ndarray], None]


def close_in_8_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Within what rounding activations to 8 bits costs."""
    assert found.shape == expected.shape
    assert np.sqrt(np.mean((found - expected) ** 2)) < 0.06 * expected.std()
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.995


def equal_in_float32(found: np.ndarray, expected: np.ndarray) -> None:
    """Within rounding of float32."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-4)


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs compute with the dequantised weights in float32."""

    def rows(matrix: Matrix, ids: np.ndarray | None = None) -> FloatMatrix:
        return FloatMatrix(dequantize_matrix(matrix, slice(None) if ids is None else ids))

    monkeypatch.setattr(speculator_parts, "_matrix", lambda speculator, name: FloatMatrix(speculator.tensor(name)))
    monkeypatch.setattr(speculator_parts, "rows_8bit", rows)


@pytest.fixture(params=["float32", "int8"])
def check(request: pytest.FixtureRequest) -> Check:
    """How a graph must agree with numpy, in either arithmetic."""
    if request.param == "int8":
        return close_in_8_bits
    request.getfixturevalue("float32")
    return equal_in_float32


def inputs_for(speculator: Speculator, features: int, recycled: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    hidden = speculator.target.hidden
    wide = rng.standard_normal((features, len(speculator.taps) * hidden)) * 2
    return wide.astype(np.float32), rng.standard_normal((recycled, hidden)).astype(np.float32)


@pytest.mark.parametrize("own", [(), OWN_HEADS])
@pytest.mark.parametrize("draft_vocabulary", [120, None])
@pytest.mark.parametrize("layout", MEDUSA_LAYOUTS)
def test_medusa(layout: str, own: tuple[str, ...], draft_vocabulary: int | None, check: Check, tmp_path: Path) -> None:
    optional = (*own, "tap_norms") if layout == "medusa-joined" else own
    speculator = tiny_speculator(layout, draft_vocabulary=draft_vocabulary, with_optional=optional)
    session = open_session(write_graph(speculator, ENDS, tmp_path / "graph"))
    feature, _ = inputs_for(speculator, 1, 0)
    choice = plain_choice(speculator.draft_vocabulary)
    token = {"input_ids": np.array(TOKENS[:1], np.int64)} if layout == "medusa-joined" else {}
    tokens, log_probs, logits = session.run(None, {"features": feature, **token, **choice})
    check(logits, reference_medusa(speculator, ENDS, feature, TOKENS[0]))
    check_choice(speculator, logits, tokens, log_probs)


@pytest.mark.parametrize("optional", [(), OPTIONAL, ("head", "embedding")])
@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_eagle(layout: str, optional: tuple[str, ...], check: Check, tmp_path: Path) -> None:
    speculator = tiny_speculator(layout, with_optional=optional)
    features, recycled = inputs_for(speculator, 6, 2)
    expected, hidden = reference_eagle(speculator, ENDS, features, recycled, TOKENS)
    runner = EagleRunner(write_graph(speculator, ENDS, tmp_path / "graph"), speculator)
    # A prompt in two pieces, one of them alone, and the last feature with both recycled ones behind it.
    first = runner.run(features[:4], None, TOKENS[:4])
    lone = runner.run(features[4:5], None, TOKENS[4:5])
    last = runner.run(features[5:], recycled, TOKENS[5:])
    check(np.concatenate([first["logits"], lone["logits"], last["logits"]]), expected)
    check(np.concatenate([first["hidden"], lone["hidden"], last["hidden"]]), hidden)
    check_choice(speculator, last["logits"], last["tokens"], last["log_probs"])
    # Back before the end, and only the recycled ones again.
    runner.length = 6
    again = runner.run(None, recycled, TOKENS[6:], rows=[1])
    check(again["logits"], expected[-1:])


@pytest.mark.usefixtures("float32")
def test_what_an_eagle_draws_goes_back_in(tmp_path: Path) -> None:
    speculator = tiny_speculator("eagle3")
    features, _ = inputs_for(speculator, 3, 0)
    runner = EagleRunner(write_graph(speculator, ENDS, tmp_path / "graph"), speculator)
    hidden = runner.run(features, None, TOKENS[:3])["hidden"][2:]
    found = runner.run(None, hidden, TOKENS[3:4])
    expected, _ = reference_eagle(speculator, ENDS, features, hidden, TOKENS[:4])
    equal_in_float32(found["logits"], expected[3:])


@pytest.mark.usefixtures("float32")
def test_branches_of_a_tree_are_what_their_chains_are(tmp_path: Path) -> None:
    speculator = tiny_speculator("eagle3")
    features, recycled = inputs_for(speculator, 3, 3)
    path = write_graph(speculator, ENDS, tmp_path / "graph")
    runner = EagleRunner(path, speculator)
    runner.run(features, None, TOKENS[:3])
    # Nodes 0 -> 1 and the sibling 2 of node 0, at position 3 too.
    blocked = -np.inf
    bias = np.array([[0, blocked, blocked], [0, 0, blocked], [blocked, blocked, 0]], np.float32)
    tree = runner.run(None, recycled, [10, 11, 12], bias=bias, positions=[3, 4, 3])["logits"]
    for nodes, tokens in (([0, 1], [10, 11]), ([2], [12])):
        chain = EagleRunner(path, speculator)
        chain.run(features, None, TOKENS[:3])
        alone = chain.run(None, recycled[nodes], tokens)["logits"]
        equal_in_float32(tree[nodes], alone)


@pytest.mark.parametrize("ragged", [True, False])
def test_draft(ragged: bool, check: Check, tmp_path: Path) -> None:
    speculator = tiny_speculator("draft", with_optional=OPTIONAL)
    config = speculator.config
    assert isinstance(config, DraftConfig)
    model = model_config(speculator, config, 64)
    with WeightFile(tmp_path / "draft.onnx.data") as file:
        stored = SpeculatorParts(speculator, ENDS, file, 64 + 320).draft(config)
        ir.save(build_target(model, stored, file, ragged=ragged, taps=feature_taps(2)), tmp_path / "draft.onnx")
    weights: Any = SimpleNamespace(config=model)
    logits = GraphRunner(tmp_path / "draft.onnx", weights).chain(TOKENS, [3, 1, 2])
    check(logits, reference_draft(speculator, ENDS, TOKENS))


def test_the_choice_follows_temperature_and_noise(tmp_path: Path) -> None:
    speculator = tiny_speculator("medusa")
    session = open_session(write_graph(speculator, ENDS, tmp_path / "graph"))
    feature, _ = inputs_for(speculator, 1, 0)
    noise = np.random.default_rng(2).gumbel(size=(3, 120)).astype(np.float32)
    choice = {"inverse_temperature": np.array([2.5], np.float32), "noise": noise, "top_k": np.array([120], np.int64)}
    tokens, log_probs, logits = session.run(None, {"features": feature, **choice})
    check_choice(speculator, logits, tokens, log_probs, **choice)
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)
    assert speculator.vocabulary is not None
    assert sorted(tokens[0]) == list(speculator.vocabulary)


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_an_older_onnxruntime_knows_the_attention(layout: str, tmp_path: Path) -> None:
    graph = ir.load(write_graph(tiny_speculator(layout), ENDS, tmp_path / "graph")).graph
    (attention,) = [node for node in graph if node.op_type == "GroupQueryAttention"]
    assert len(attention.inputs) == 11  # without query_seqlens, which came with 1.32


def check_choice(
    speculator: Speculator,
    logits: np.ndarray,
    tokens: np.ndarray,
    log_probs: np.ndarray,
    inverse_temperature: np.ndarray | float = 1.0,
    noise: np.ndarray | float = 0.0,
    top_k: np.ndarray | None = None,
) -> None:
    """Tokens and their log-probabilities are those of the logits, with the noise only in the order."""
    scaled = logits.astype(np.float64) * inverse_temperature
    count = 4 if top_k is None else int(top_k[0])
    best = np.argsort(-(scaled + noise), axis=-1, kind="stable")[:, :count]
    ids = np.arange(logits.shape[1]) if speculator.vocabulary is None else speculator.vocabulary
    assert tokens.dtype == np.int64
    np.testing.assert_array_equal(tokens, ids[best])
    shifted = scaled - scaled.max(-1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_probs, np.take_along_axis(expected, best, -1), atol=1e-5, rtol=1e-5)
