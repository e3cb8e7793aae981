"""The rows of a pool: parts of one buffer, copies of beginnings, moves; every bit as in a session of one row."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.runtime.batching.row_pool import RowPool
from specrun.runtime.kv_cache import KVCache

from .conftest import TinyModels
from .tiny_bundles import PROMPT


def filled(batch: int = 3) -> KVCache:
    cache = KVCache(layers=2, kv_heads=2, head_dim=4, capacity=8, limit=600, batch=batch)
    rng = np.random.default_rng(1)
    for array in cache._arrays:
        array[:] = rng.random(array.shape)
    cache.lengths = [5, 3, 0]
    return cache


def test_a_part_is_the_same_memory() -> None:
    cache = filled()
    part = cache.part(1, 2)
    assert (part.batch, part.lengths, part.capacity) == (2, [3, 0], cache.capacity)
    assert not part.reserve(cache.capacity)
    with pytest.raises(ValueError, match="positions"):
        part.reserve(cache.capacity + 1)
    part._arrays[0][0, 0, 0] = 7.0
    assert (cache._arrays[0][1, 0, 0] == 7.0).all()
    part.lengths[0] = 1
    assert cache.lengths == [5, 3, 0]
    assert np.shares_memory(part.values[3].numpy(), cache._arrays[3]) or (
        part.values[3].data_ptr() == cache._arrays[3][1:].ctypes.data
    )


def test_a_copied_beginning() -> None:
    cache = filled()
    before = [array.copy() for array in cache._arrays]
    cache.copy_prefix(0, 2, 4)
    assert cache.lengths == [5, 3, 4]
    for array, old in zip(cache._arrays, before, strict=True):
        assert (array[2, :, :4] == old[0, :, :4]).all()
        assert (array[2, :, 4:] == old[2, :, 4:]).all()
        assert (array[:2] == old[:2]).all()
    with pytest.raises(ValueError, match="holds 3"):
        cache.copy_prefix(1, 2, 4)


def test_runs_equal_a_session_of_one_row(models: TinyModels) -> None:
    """Chunks, ragged rounds over some of the rows, copies and moves: logits as of the same tokens alone."""
    target = models.engine("tgt-int8").target
    text = models.engine("tgt-int8").encode(PROMPT * 3, raw=True)
    texts = [text[3:40], text[:33], text[10:70]]

    def alone(tokens: list[int]) -> np.ndarray:
        target.rewind_to(0)
        return target.run(tokens, rows=1)[0].copy()

    pool = RowPool(target, 4)
    for slot, own in enumerate(texts):
        assert pool.begin(slot, own) == 0
        pool.run(slot, [own[:20]], rows=1)
        logits, seconds = pool.run(slot, [own[20:30]], rows=1)
        assert seconds > 0
        assert (logits[0, 0] == alone(own[:30])).all()
    logits, _ = pool.run(0, [texts[0][30:32], [], texts[2][30:35]], rows=2)
    assert pool.cache.lengths == [32, 30, 35, 0]
    assert (logits[0, -1] == alone(texts[0][:32])).all()
    assert (logits[0, -2] == alone(texts[0][:31])).all()
    assert (logits[2, -1] == alone(texts[2][:35])).all()
    logits, _ = pool.run(1, [texts[1][30:31], texts[2][35:36]], rows=1)
    assert (logits[0, 0] == alone(texts[1][:31])).all()
    assert (logits[1, 0] == alone(texts[2][:36])).all()

    other = [*texts[2][:25], 5, 6, 7]
    assert pool.begin(3, other) == 25
    logits, _ = pool.run(3, [other[25:]], rows=1)
    assert (logits[0, 0] == alone(other)).all()
    pool.move(3, 0)
    assert pool.cache.lengths[0] == len(other)
    assert pool.cache.lengths[3] == 0
    logits, _ = pool.run(0, [[9]], rows=1)
    assert (logits[0, 0] == alone([*other, 9])).all()
    assert pool.begin(0, other) == len(other) - 1  # its own row: nothing is copied, one token is always run
    pool.close()


def test_a_row_never_trusts_its_newest_token(models: TinyModels) -> None:
    """Where a draft token stands in the cache behind the text, only the text's own beginning is taken over."""
    target = models.engine("tgt").target
    pool = RowPool(target, 2)
    text = list(range(10, 30))
    pool.begin(0, text)
    pool.run(0, [[*text, 99, 98]], rows=1)
    assert pool.begin(1, [*text, 50]) == len(text) - 1
