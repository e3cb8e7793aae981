"""KV buffers in a device's own memory do what those on the host do; the device is the CPU, the calls are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.runtime.device import Device
from specrun.runtime.device_buffers import HOST, DeviceBuffers, HostBuffers, minus_infinity
from specrun.runtime.kv_cache import KVCache

DEVICE = Device("cpu", resident=True)
BUFFERS = DeviceBuffers(DEVICE)


def cache(buffers: Any, dtype: str, *, batch: int = 1, limit: int = 700) -> KVCache:
    return KVCache(layers=2, kv_heads=2, head_dim=4, capacity=1, limit=limit, batch=batch, dtype=dtype, buffers=buffers)


def fill(caches: list[KVCache], lengths: list[int]) -> None:
    """The same content in each, for its first positions."""
    rng = np.random.default_rng(5)
    for row, length in enumerate(lengths):
        dtype = np.float32 if caches[0].dtype == "float32" else np.float16
        parts = [rng.standard_normal((2, length, 4)).astype(dtype) for _ in range(4)]
        for one in caches:
            one.reserve(max(lengths))
            one.restore(parts, length, row)


def same(left: KVCache, right: KVCache, row: int = 0) -> bool:
    if left.lengths != right.lengths:
        return False
    pairs = zip(left.copy_of(left.lengths[row], row), right.copy_of(right.lengths[row], row), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_operation_gives_what_it_gives_on_the_host(dtype: str) -> None:
    host, device = cache(HOST, dtype, batch=3), cache(BUFFERS, dtype, batch=3)
    fill([host, device], [60, 20, 5])
    for row in range(3):
        assert same(host, device, row)
    for one in (host, device):
        one.keep_path(0, 40, [0, 2, 3, 7])
        one.copy_prefix(0, 2, 43)
        one.rewind_to(11, 1)
        one.copy_prefix(1, 1, 9)
    for row in range(3):
        assert same(host, device, row)
    assert host.lengths == [44, 9, 43]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_growing_keeps_what_is_there(dtype: str) -> None:
    device, host = cache(BUFFERS, dtype, batch=2, limit=3000), cache(HOST, dtype, batch=2, limit=3000)
    fill([device, host], [600, 30])
    before = device.capacity
    assert device.reserve(before + 1)
    assert before < device.capacity <= 3000
    for row in range(2):
        assert same(host, device, row)


def test_a_row_alone_has_all_its_room_at_once() -> None:
    assert cache(BUFFERS, "float16", limit=650).capacity == 650
    assert cache(HOST, "float16", limit=650).capacity == 256


def test_rows_of_a_batch_are_a_cache_over_the_same_memory() -> None:
    device = cache(BUFFERS, "float16", batch=3)
    fill([device], [10, 20, 30])
    part = device.part(1, 2)
    assert part.lengths == [20, 30]
    assert part.values[0].pointer == device.values[0].pointer + device.values[0].size // 3 * 2
    for ours, theirs in zip(part.copy_of(30, 1), device.copy_of(30, 2), strict=True):
        assert np.array_equal(ours, theirs)
    part.keep_path(1, 0, [4, 9])
    expected = device.copy_of(2, 2)
    assert all(np.array_equal(a, b) for a, b in zip(part.copy_of(2, 1), expected, strict=True))


def test_the_memory_is_not_the_arrays() -> None:
    array = np.arange(6, dtype=np.int64)
    value = BUFFERS.input("input_ids", array)
    array += 1
    assert BUFFERS.read(value).tolist() == [0, 1, 2, 3, 4, 5]
    BUFFERS.send({"input_ids": value}, {"input_ids": array})
    assert BUFFERS.read(value).tolist() == [1, 2, 3, 4, 5, 6]
    read = BUFFERS.read(value)
    BUFFERS.send({"input_ids": value}, {"input_ids": array + 1})
    assert read.tolist() == [1, 2, 3, 4, 5, 6]  # a copy


def test_what_kernels_read_on_the_host_stays_there() -> None:
    kept = BUFFERS.input("max_total_length", np.array([5], np.int32))
    assert kept.device_name() == "cpu"


def test_minus_infinity_has_the_bits_of_its_type() -> None:
    assert minus_infinity("float32") == -np.inf
    assert minus_infinity("float16") == -np.inf
    row = np.zeros(2, np.float16)
    row[:] = minus_infinity("bfloat16")
    assert row.view(np.uint16).tolist() == [0xFF80, 0xFF80]


def test_nbytes() -> None:
    assert cache(BUFFERS, "float16", limit=100).nbytes == 4 * 2 * 100 * 4 * 2
    assert cache(HOST, "float32", limit=100).nbytes == 2 * cache(BUFFERS, "bfloat16", limit=100).nbytes
    assert isinstance(HOST, HostBuffers)
