"""Batches hold every token with its own features, position and dialogue; each pass has an order of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specrun.export.training.batches import Batch, Batches
from specrun.export.training.text_store import TextStore

from .conftest import HIDDEN, TAPS

ALL = np.arange(TAPS * HIDDEN)


def batches(store: TextStore, *, rows: int = 2, length: int = 20, seed: int = 1, columns: np.ndarray = ALL) -> Batches:
    return Batches([store.load(name) for name in store.names()], rows=rows, length=length, columns=columns, seed=seed)


def of_store(store: TextStore) -> dict[bytes, tuple[int, int, int, bool]]:
    """(token, dialogue, position, answer) of each token by its features, which are unlike any other's."""
    found = {}
    dialogue = 0
    for shard in map(store.load, store.names()):
        for start, end in zip(shard.starts[:-1], shard.starts[1:], strict=True):
            dialogue += 1
            for place in range(start, end):
                values = int(shard.tokens[place]), dialogue, int(place - start), bool(shard.answer[place])
                found[shard.features[place].tobytes()] = values
    return found


def test_a_pass_holds_every_token_once_with_what_belongs_to_it(store: TextStore) -> None:
    known = of_store(store)
    data = batches(store)
    seen = []
    for step in range(len(data)):
        batch = data.batch(step)
        for row in range(2):
            for place in range(21):
                key = batch.features[row, place].numpy().tobytes()
                token, dialogue, position, answer = known[key]
                seen.append(key)
                assert int(batch.tokens[row, place]) == token
                assert bool(batch.answer[row, place]) == answer
                if place < 20:
                    assert int(batch.positions[row, place]) == position
                before = batch.segments[row, place - 1] if place else None
                if place:  # the same number where, and only where, it is the same dialogue
                    other = known[batch.features[row, place - 1].numpy().tobytes()][1]
                    assert bool(before == batch.segments[row, place]) == (other == dialogue)
    assert len(set(seen)) == len(seen) == len(data) * 42
    assert store.tokens() - len(seen) < 42


def test_passes_differ_and_every_batch_is_known_by_its_number(store: TextStore) -> None:
    data, again = batches(store), batches(store)
    steps = [0, 1, len(data), len(data) + 1, 3 * len(data) - 1]
    first = [data.batch(step) for step in steps]
    for step, batch in reversed(list(zip(steps, first, strict=True))):  # as a training that goes on there asks
        found = again.batch(step)
        for item in ("tokens", "features", "positions", "segments", "answer"):
            assert torch.equal(getattr(found, item), getattr(batch, item))
    assert not torch.equal(first[0].tokens, first[2].tokens)
    assert not torch.equal(first[0].tokens, batches(store, seed=2).batch(0).tokens)


def test_masks_and_places_that_count(store: TextStore) -> None:
    batch = batches(store).batch(0)
    segments, answer = batch.segments.tolist(), batch.answer.tolist()
    mask = batch.mask()
    for row in range(2):
        for place in range(20):
            for other in range(20):
                same = segments[row][place] == segments[row][other]
                assert bool(mask[row, 0, place, other]) == (same and other <= place)
            for ahead in (1, 2, 5, 20, 21):
                there = place + ahead
                expected = there <= 20 and segments[row][there] == segments[row][place] and answer[row][there]
                assert bool(batch.scored(ahead)[row, place]) == expected
                token = int(batch.tokens[row, there]) if there <= 20 else 0
                assert int(batch.ahead(ahead)[row, place]) == token


def test_columns(store: TextStore) -> None:
    last = np.arange(HIDDEN, 2 * HIDDEN)
    found, whole = batches(store, columns=last).batch(1), batches(store).batch(1)
    assert torch.equal(found.features, whole.features[..., HIDDEN:])


def test_no_whole_batch(store: TextStore) -> None:
    assert len(batches(store, rows=50, length=100)) == 0


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_batch_on_another_device(store: TextStore, device: str) -> None:
    batch: Batch = batches(store).batch(0).to(torch.device(device))
    assert {batch.tokens.device.type, batch.mask().device.type, batch.scored(2).device.type} == {device}
