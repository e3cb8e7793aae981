"""How many rows a batch should have: by what a token costs, as far as the memory reaches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from specrun.runtime.batching.batch_costs import BatchCosts
from specrun.runtime.cuda_runtime import free_memory
from specrun.runtime.device import CPU, RESERVE, Device

SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
ENOUGH: Final = 1.05  # of two sizes whose tokens cost nearly the same the smaller one: the last rows end sooner
MEMORY_SHARE: Final = 4  # the KV buffers take one part in so many of the RAM that is free


def choose_batch_size(costs: BatchCosts, row_bytes: int, memory: int | None) -> int:
    """The smallest of `SIZES` whose plain rounds cost about the least a token, of those whose rows fit into `memory`.

    row_bytes: KV buffers of a row. memory: bytes, None where it is not known.
    """
    fit = [size for size in SIZES if size == 1 or memory is None or size * row_bytes <= memory]
    best = min(costs.round(size, 1) / size for size in fit)
    return next(size for size in fit if costs.round(size, 1) / size <= ENOUGH * best)


def memory_for_rows(device: Device = CPU) -> int | None:
    """Bytes that the KV buffers of a batch may take of RAM, or of a GPU's memory; None where nothing tells."""
    if device.kind == "cuda":
        return max(0, free_memory(device.index)[0] - RESERVE)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" not in names:
            return None
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // MEMORY_SHARE
