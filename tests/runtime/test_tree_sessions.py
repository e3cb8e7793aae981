"""Sessions that run token trees: exact main branches, rounded side branches, kept paths, features."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specrun.models_cache.manifest import KVSpec
from specrun.runtime import session as session_module
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.session import ModelSession, WidthRule, session_opener

from .conftest import TinyModels

NAMES = ["tgt", "tgt-int8", "tgt-int4", "tgt-source"]
CLOSE = {"tgt": 2e-5, "tgt-int8": 0.2, "tgt-int4": 0.3, "tgt-source": 0.2}


def any_tree(rng: np.random.Generator, nodes: int) -> list[int]:
    """Parents of a tree whose main branch is a few nodes long."""
    return [node - 1 if rng.random() < 0.6 else int(rng.integers(-1, node)) for node in range(nodes)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def main_length(parents: list[int]) -> int:
    return next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))


def chain_of(session: ModelSession, base: list[int], new: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of `new`, run as a chain behind `base`, which stays in the cache."""
    session.rewind_to(len(base))
    logits = session.run(new, rows=len(new)).copy()
    return logits, session.features.copy()


@pytest.mark.parametrize("multiple", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_nodes_have_the_logits_of_their_path(models: TinyModels, name: str, multiple: int) -> None:
    """Of the main branch to the last bit; and a chain run after a tree knows nothing of it."""
    session = session_opener(models.bundle(name), 1)(1, WidthRule(multiple=multiple))
    rng = np.random.default_rng(3)
    base = rng.integers(3, 270, 90).tolist()
    session.run(base, rows=1)
    main_nodes = side_nodes = 0
    for nodes in (1, 2, 3, 5, 8, 15, 16, 17, 24, 32):
        parents, tokens = any_tree(rng, nodes), rng.integers(3, 270, nodes).tolist()
        pending = rng.integers(3, 270, int(rng.integers(1, 5))).tolist()
        main = main_length(parents)
        session.rewind_to(len(base))
        rows = session.run([*pending, *tokens], rows=nodes + 1, parents=parents).copy()
        features = session.features.copy()
        assert session.length == len(base) + len(pending) + nodes
        assert features.shape == (len(pending) + nodes, 3 * session.sizes.hidden)
        for node in range(-1, nodes):
            path = path_to(node, parents)
            logits, wanted = chain_of(session, base, [*pending, *(tokens[at] for at in path)])
            got = features[[*range(len(pending)), *(len(pending) + at for at in path)]]
            if node < main:
                assert (rows[node + 1] == logits[-1]).all()
                assert (got == wanted).all()
                main_nodes += 1
            else:
                assert np.abs(rows[node + 1] - logits[-1]).max() < CLOSE[name]
                assert np.abs(got - wanted).max() < CLOSE[name]
                side_nodes += 1
    assert main_nodes > 20
    assert side_nodes > 40


@pytest.mark.parametrize("name", NAMES)
def test_append_after_a_kept_path(models: TinyModels, name: str) -> None:
    """Random trees, random paths: what is appended then has a fresh chain's bits, or is close to it behind a branch."""
    session = session_opener(models.bundle(name), 1)(1, WidthRule())
    rng = np.random.default_rng(4)
    exact = close = 0
    for _ in range(40):
        text = rng.integers(3, 270, int(rng.integers(2, 60))).tolist()
        session.rewind_to(0)
        session.run(text[:-1], rows=1)
        kept_exact = True
        for _ in range(3):
            nodes = int(rng.integers(1, 20))
            parents, tokens = any_tree(rng, nodes), rng.integers(3, 270, nodes).tolist()
            start = len(text)
            session.run([*text[session.length :], *tokens], rows=1, parents=parents)
            last = int(rng.integers(-1, main_length(parents) if rng.random() < 0.6 else nodes))
            path = path_to(last, parents)
            session.keep_path(start, path)
            assert session.length == start + len(path)
            text += [tokens[node] for node in path] + [int(rng.integers(3, 270))]
            kept_exact = kept_exact and path == list(range(len(path)))
        more = rng.integers(3, 270, 4).tolist()
        got = session.run([text[-1], *more], rows=5).copy()
        session.rewind_to(0)
        wanted = session.run([*text, *more], rows=5)
        if kept_exact:
            assert (got == wanted).all()
        else:
            assert np.abs(got - wanted).max() < CLOSE[name]
        exact, close = exact + kept_exact, close + (not kept_exact)
    assert exact > 5
    assert close > 5


def test_keep_path_moves_only_what_it_must(rng: np.random.Generator) -> None:
    cache = KVCache(layers=2, kv_heads=2, head_dim=4, capacity=40, limit=700, batch=3)
    for value in cache.values:
        value.numpy()[:] = rng.standard_normal(value.numpy().shape)
    before = [value.numpy().copy() for value in cache.values]
    cache.lengths[:] = [30, 20, 25]
    cache.keep_path(1, 10, [0, 1, 4, 9])
    assert cache.lengths == [30, 14, 25]
    for value, old in zip(cache.values, before, strict=True):
        array = value.numpy()
        assert (array[[0, 2]] == old[[0, 2]]).all()
        assert (array[1, :, :12] == old[1, :, :12]).all()
        assert (array[1, :, 12:14] == old[1][:, [14, 19]]).all()
        assert (array[1, :, 14:] == old[1, :, 14:]).all()
    cache.keep_path(2, 20, [])
    cache.keep_path(0, 27, [0, 1, 2])
    assert cache.lengths == [30, 14, 20]
    for row, start, nodes in ((0, 27, [0, 1, 3]), (0, 20, [2, 1]), (0, 20, [1, 1]), (0, -1, []), (1, 15, [])):
        with pytest.raises(ValueError, match="cannot keep nodes"):
            cache.keep_path(row, start, nodes)
    assert cache.lengths == [30, 14, 20]


def test_an_interrupted_tree_leaves_nothing_behind(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What hides a tree's branches from each other is cleared by the next run, whatever happened to its own."""
    session = session_opener(models.bundle("tgt"), 1)(1, WidthRule())
    tokens = np.random.default_rng(5).integers(3, 270, 40).tolist()
    expected = session.run(tokens, rows=40).copy()
    session.rewind_to(10)
    session.run(tokens[10:16], rows=6)
    session.rewind_to(10)
    onnx_session = session._onnx_session

    class Failing:
        def run_with_iobinding(self, binding: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(session, "_onnx_session", Failing())
    with pytest.raises(KeyboardInterrupt):
        session.run(tokens[10:16], rows=6, parents=[-1, -1, 0, 1, 2])
    assert session.length == 10
    monkeypatch.setattr(session, "_onnx_session", onnx_session)
    assert (session.run(tokens[10:16], rows=6) == expected[10:16]).all()
    assert (session.run(tokens[16:40], rows=24) == expected[16:40]).all()


@pytest.mark.parametrize("count", [1, 4, 5, 9, 33])
def test_long_inputs_run_in_chunks(models: TinyModels, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Tokens before the rows that are wanted: bits and features of the last ones do not depend on the chunks."""
    session = session_opener(models.bundle("tgt"), 1)(1, WidthRule())
    tokens = np.random.default_rng(6).integers(3, 270, 60).tolist()
    parents = [-1, 0, 1, 0, -1]
    session.run(tokens[:20], rows=1)
    whole = session.run(tokens[20 : 25 + count], rows=6, parents=parents).copy()
    features = session.features.copy()
    session.rewind_to(20)
    monkeypatch.setattr(session_module, "PREFILL_CHUNK", 4)
    rows = session.run(tokens[20 : 25 + count], rows=6, parents=parents)
    assert (rows[:4] == whole[:4]).all()
    assert np.abs(rows - whole).max() < 1e-4
    last = session.features
    assert 6 <= len(last) < 10
    assert (last[:-2] == features[-len(last) : -2]).all()


def test_the_variant_for_older_runtimes(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without query_seqlens runs trees by its batch-1 graph, with the same bits."""
    tokens = np.random.default_rng(8).integers(3, 270, 60).tolist()
    parents = any_tree(np.random.default_rng(9), 20)

    def rows(session: ModelSession) -> np.ndarray:
        session.run(tokens[:30], rows=1)
        session.run(tokens[30:51], rows=1, parents=parents)
        session.keep_path(31, path_to(19, parents))
        return session.run(tokens[51:], rows=9).copy()

    bundle = models.bundle("tgt-int8")
    expected = rows(session_opener(bundle, 1)(1, WidthRule()))
    monkeypatch.setattr(session_module, "build_features", frozenset)
    old = session_opener(bundle, 1)(1, WidthRule())
    assert not old.ragged
    assert (rows(old) == expected).all()


def test_features_of_every_run(models: TinyModels) -> None:
    """Rows of the context's tokens, whatever the width; a bundle without that output gives none."""
    bundle = models.bundle("tgt")
    session = session_opener(bundle, 1)(1, WidthRule(multiple=4))
    assert session.features.shape == (0, 3 * 64)
    tokens = np.random.default_rng(7).integers(3, 270, 60).tolist()
    session.run(tokens, rows=1)
    expected = session.features.copy()
    session.rewind_to(0)
    for width in (1, 2, 7, 16, 17):
        start = session.length
        session.run(tokens[start : start + width], rows=1)
        assert (session.features == expected[start : start + width]).all()
    old = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, features=None))
    session = session_opener(old, 1)(1, WidthRule())
    session.run(tokens, rows=1)
    assert session.features.shape == (60, 0)


def test_room_for_trees(models: TinyModels) -> None:
    """None where a window counts slots of the cache; less where the rotary tables end."""
    bundle = models.bundle("tgt")
    session = session_opener(bundle, 1)(1, WidthRule())
    assert session.tree_room(100) == 32
    positions = bundle.manifest.kv.positions
    assert session.tree_room(positions - 20) < 20
    windowed = dataclasses.replace(bundle.manifest, kv=KVSpec("float32", positions, window=16))
    session = session_opener(dataclasses.replace(bundle, manifest=windowed), 1)(1, WidthRule())
    assert session.tree_room(100) == 0
