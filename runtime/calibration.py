"""What a probe found on this machine: at which widths rows are bit-equal, and what a run of each width costs.

The rule is a property of graph, ONNX Runtime build, processor and thread count, so the result is kept per those under
the cache root, never inside the bundle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.diskerrors import cache_errors
from specrun.models_cache.errors import BackendError, CacheError
from specrun.models_cache.layout import Bundle, cache_root
from specrun.runtime.backend import onnxruntime, threads_are_shared
from specrun.runtime.cuda_runtime import gpu
from specrun.runtime.device import CPU, Device
from specrun.runtime.session import PROBED_ROWS, WIDEST_BARE, ModelSession, WidthRule, choose_graph

VERSION = 4
PROBED_WIDTHS = tuple(range(1, WIDEST_BARE + 1))
LONG_WIDTHS = (64, 256)  # and one that leaves a lone row in the attention's last block
TIMED_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17)
MULTIPLES = (1, 2, 4)
DEVICE_MULTIPLES = (*MULTIPLES, 8, 16)  # in a device's own memory; where none of these holds, one width for all runs
PINNED_WIDTHS = (8, 16, 32, 64)
BASE = 24  # tokens before the probed ones
LONE_TOKENS = 160  # probed one by one, where the attention may see a lone row
TREE = (-1, 0, 1, -1, 3, 3, 5)  # parents of the nodes of the probed tree
TREE_BASES = (BASE, 200)  # tokens before it
RAGGED = ((5, 3, 1), (2, 4, 6), (1, 1, 1), (1, 0, 1), (1, 1, 1))  # new tokens of `PROBED_ROWS` rows, run after run
TIMING_ROUNDS = 4
SHORTEST, LONGEST = 1e-7, 1e5  # seconds that a run may be said to take


@dataclass(frozen=True, slots=True)
class Calibration:
    """`width_multiple` of the smallest rule that held (None: none did); `costs[width]` in seconds for exact runs.

    pinned: whether it is the width of every run (`WidthRule.pinned`). batches: whether rows of a batch have the bits
    that they have alone. bound: the largest difference of a logit that was seen between runs of different widths;
    0 under a rule that holds. tree_bound: the same between a chain's run and a tree's, and behind a cache that a tree
    left, where trees have a graph of their own; else None. batch_bound: the same between a row of a batch and the row
    alone; 0 where these have equal bits.
    """

    width_multiple: int | None
    costs: dict[int, float]
    pinned: bool = False
    batches: bool = True
    bound: float = 0.0
    tree_bound: float | None = None
    batch_bound: float = 0.0

    @property
    def rule(self) -> WidthRule:
        """The rule to run by."""
        if self.width_multiple is None:
            return WidthRule(multiple=1, exact=False)
        return WidthRule(multiple=self.width_multiple, pinned=self.pinned)

    @property
    def exactness(self) -> str:
        """ "bitwise", or "rounding" where no rule held."""
        return "rounding" if self.width_multiple is None else "bitwise"

    @property
    def batch_exactness(self) -> str:
        """The same for rows of a batch."""
        return self.exactness if self.batches else "rounding"

    def bound_of(self, batch: int) -> float:
        """The bound for rows of a batch of so many."""
        return self.bound if batch == 1 else max(self.bound, self.batch_bound)

    def cost(self, width: int) -> float:
        """Seconds of a run of `width` positions, interpolated between the measured ones."""
        widths = sorted(self.costs)
        return (
            float(np.interp(width, widths, [self.costs[w] for w in widths]))
            if width <= widths[-1]
            else (self.costs[widths[-1]] * width / widths[-1])
        )


def calibrate(
    bundle: Bundle,
    threads: int,
    open_session: Callable[[int, WidthRule], ModelSession],
    *,
    force: bool = False,
    device: Device = CPU,
) -> Calibration:
    """The kept calibration of this bundle on this machine, or a new probe (about two seconds for a small model).

    `open_session(batch, rule)` opens a session of the bundle; it is called only for a probe. `force`: probe anew.
    """
    path = kept_path("calibration", VERSION, bundle, threads, device)
    kept = None if force else _load(path)
    if kept is not None:
        return kept
    found = probe(open_session)
    _save(path, found)
    return found


def probe(open_session: Callable[[int, WidthRule], ModelSession]) -> Calibration:
    """Run the same tokens at many widths and in ragged batches; keep the smallest rule with equal bits.

    In a device's own memory rows of one text may have a rule where those of a batch have none.
    """
    session = open_session(1, WidthRule())
    resident = session.device.resident
    tokens = _tokens(BASE + max(LONG_WIDTHS), session.sizes.tokens)
    rules = [WidthRule(multiple) for multiple in (DEVICE_MULTIPLES if resident else MULTIPLES)]
    if resident:
        rules += [WidthRule(width, pinned=True) for width in PINNED_WIDTHS if width <= session.sizes.context // 2]
    alone: WidthRule | None = None
    found: WidthRule | None = None
    for rule in rules:
        session.width_rule = rule
        if not _holds(session, tokens):
            continue
        if not session.rows_together:
            found = rule
            break
        # Where rows run together only with one token each, no rule can widen these runs.
        widened = session.ragged or rule == WidthRule()
        if widened and _batch_bound(session, open_session(PROBED_ROWS, rule), tokens) == 0.0:
            found = rule
            break
        alone = alone or (rule if resident else None)
        if not session.ragged:
            break
    kept = found or alone
    session.width_rule = kept or WidthRule()
    bound = 0.0 if kept is not None else _bound(session, tokens)
    batch_bound = 0.0
    if session.rows_together and found is None:
        batch_bound = _batch_bound(session, open_session(PROBED_ROWS, session.width_rule), tokens)
    multiple, pinned = (None, False) if kept is None else (kept.multiple, kept.pinned)
    trees: float | None = None
    if kept is not None and session.may_run_trees:
        # Where the graph for trees cannot run, or has no room, chains are drafted and everything else still works.
        with contextlib.suppress(BackendError):
            trees = _tree_bound(session, tokens)
    costs = _costs(session, tokens)
    return Calibration(multiple, costs, pinned, found is not None, bound, trees, batch_bound)


def _tree_bound(session: ModelSession, tokens: list[int]) -> float:
    """The largest difference of a logit that trees make: between a node's row and the chain's over its path, and
    between rows behind a path that was kept of a tree and behind the same path as a chain."""
    worst = 0.0
    starts = [base for base in TREE_BASES if base + 2 * len(TREE) <= min(session.sizes.context, len(tokens))]
    for base in starts:
        root, nodes = tokens[base], tokens[base + 1 : base + 1 + len(TREE)]
        later = tokens[base + 1 + len(TREE) : base + 4 + len(TREE)]
        paths = [node_path(TREE, node) for node in range(len(TREE))]
        chains = {}
        for leaf in (2, len(TREE) - 1):
            session.rewind_to(0)
            session.run(tokens[:base], rows=1)
            path = paths[leaf]
            chains[leaf] = np.array(session.run([root, *[nodes[node] for node in path]], rows=len(path) + 1))
            behind = np.array(session.run(later, rows=len(later)))
        session.rewind_to(base)
        rows = np.array(session.run([root, *nodes], rows=len(TREE) + 1, parents=TREE))
        for leaf, chain in chains.items():
            places = [0, *[node + 1 for node in paths[leaf]]]
            worst = max(worst, float(np.abs(rows[places] - chain).max()))
        session.keep_path(base + 1, paths[-1])
        worst = max(worst, float(np.abs(np.array(session.run(later, rows=len(later))) - behind).max()))
    return worst


def node_path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from a child of the root to this one."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def _holds(session: ModelSession, tokens: list[int]) -> bool:
    """Whether a text has the same logits at every width under the session's rule."""
    reference = _chain(session, tokens, 16)
    chains = (_chain(session, tokens, width) for width in PROBED_WIDTHS)
    if not all(np.array_equal(chain, reference) for chain in chains):
        return False
    # Without a dummy row the attention sees lone ones. Their sums differ in 32 bits; of the 16 kept it shows seldom.
    if not session.pads_rows:
        lone, wide = (_chain(session, tokens, width, LONE_TOKENS) for width in (1, 16))
        if not np.array_equal(lone, wide):
            return False
    if session.sizes.context < max(LONG_WIDTHS) + BASE:
        return True
    long = [_long(session, tokens, width) for width in _long_widths(session)]
    return all(np.array_equal(rows, long[0]) for rows in long)


def _long_widths(session: ModelSession) -> tuple[int, ...]:
    return 16, *LONG_WIDTHS, 2 * session.sizes.head_dim + 1


def _bound(session: ModelSession, tokens: list[int]) -> float:
    """The largest difference of a logit between the widths that the probe runs."""
    runs = [[_chain(session, tokens, width) for width in PROBED_WIDTHS]]
    if session.sizes.context >= max(LONG_WIDTHS) + BASE:
        runs.append([_long(session, tokens, width) for width in _long_widths(session)])
    return max(float(np.abs(logits - same[0]).max()) for same in runs for logits in same)


def _chain(session: ModelSession, tokens: list[int], width: int, count: int = 16) -> NDArray[np.float32]:
    """Logits [count, vocabulary] of so many tokens after the base, run `width` at a time."""
    end = min(BASE + count, session.sizes.context)
    session.rewind_to(0)
    session.run(tokens[:BASE], rows=1)
    pieces = []
    for start in range(BASE, end, width):
        piece = tokens[start : min(start + width, end)]
        pieces.append(np.array(session.run(piece, rows=len(piece))))
    return np.concatenate(pieces)


def _long(session: ModelSession, tokens: list[int], width: int) -> NDArray[np.float32]:
    """Logits of the last position of 256 tokens, prefilled `width` at a time."""
    session.rewind_to(0)
    total = max(LONG_WIDTHS)
    for start in range(0, total, width):
        logits = session.run(tokens[start : min(start + width, total)], rows=1)
    return np.array(logits)


def _batch_bound(session: ModelSession, batch: ModelSession, tokens: list[int]) -> float:
    """The largest difference of a logit between rows of a batch and the same rows alone; 0: equal bits."""
    rounds: list[tuple[int, ...]] = [*RAGGED]
    if not session.pads_rows:
        rounds += [(1,) * PROBED_ROWS] * min(LONE_TOKENS, session.sizes.context - 2 * BASE)
    starts = [BASE - 7 * row for row in range(batch.cache.batch)]
    expected = []
    for row, start in enumerate(starts):
        session.rewind_to(0)
        session.run(tokens[:start], rows=1)
        wanted = sum(counts[row] for counts in rounds)
        expected.append(np.array(session.run(tokens[start : start + wanted], rows=wanted)))
    for row, start in enumerate(starts):
        idle: list[list[int]] = [[] for _ in starts]
        idle[row] = tokens[:start]
        batch.run_batch(idle, rows=1)
    worst, seen = 0.0, [0] * len(starts)
    for counts in rounds:
        new = [tokens[starts[row] + seen[row] :][:count] for row, count in enumerate(counts)]
        logits = batch.run_batch(new, rows=max(counts))
        for row, count in enumerate(counts):
            own, wanted_rows = np.asarray(logits[row])[-count:], expected[row][seen[row] : seen[row] + count]
            if count and not np.array_equal(own, wanted_rows):
                worst = float(np.maximum(worst, np.abs(own - wanted_rows).max()))  # which keeps what is not a number
            seen[row] += count
    return worst


def _costs(session: ModelSession, tokens: list[int]) -> dict[int, float]:
    """The fastest of a few runs at each width, after a context of 64 tokens; seconds."""
    context = min(64, session.sizes.context // 2)
    session.rewind_to(0)
    session.run(tokens[:context], rows=1)
    best: dict[int, float] = {}
    widths = [width for width in TIMED_WIDTHS if context + width <= session.sizes.context]
    for width in _repeat(widths, TIMING_ROUNDS):
        session.rewind_to(context)
        start = time.perf_counter()
        session.run(tokens[context : context + width], rows=width)
        elapsed = time.perf_counter() - start
        best[width] = min(elapsed, best.get(width, elapsed))
    session.rewind_to(0)
    # A wider run never costs less: what looks so is noise of the shorter one.
    for wider, width in zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True):
        best[width] = min(best[width], best[wider])
    return best


def _repeat(widths: list[int], times: int) -> Iterator[int]:
    for _ in range(times):
        yield from widths


def _tokens(count: int, vocabulary: int) -> list[int]:
    """Any ids do; these are spread over the vocabulary and the same everywhere."""
    return [(index * 7919 + 104729) % vocabulary for index in range(1, count + 1)]


def kept_path(kind: str, version: int, bundle: Bundle, threads: int, device: Device = CPU) -> Path:
    """Where what was measured of a bundle on this machine is kept: one file for each setting that it depends on."""
    key = [version, bundle.target_digest, onnxruntime().__version__, _processor(), threads, threads_are_shared()]
    if device.kind != "cpu":
        key += [device.cuda_graphs, repr(gpu(device.index))]
    elif device.resident:
        key.append("resident")
    graph = choose_graph(bundle)
    if graph.max_batch is not None:
        key.append(graph.file)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return cache_root() / kind / f"{digest[:32]}.json"


def write_kept(path: Path, content: Any) -> None:
    """Write a JSON file that appears whole. Raises CacheError if the cache cannot be written."""
    with cache_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)


def _processor() -> str:
    """What decides which kernels are chosen: the feature flags where the system lists them, else its name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))]
        if flags:
            return flags[0]
    return f"{platform.machine()} {platform.processor()}"


def _load(path: Path) -> Calibration | None:
    try:
        raw = json.loads(path.read_text())
        multiple, costs = raw["width_multiple"], {int(width): float(cost) for width, cost in raw["costs"].items()}
        pinned, batches = raw.get("pinned", False), raw.get("batches", True)
        trees = raw.get("tree_bound")
        bound = float(raw["bound"] if multiple is None else raw.get("bound", 0.0))
        of_batch = float(raw.get("batch_bound", 0.0) if batches else raw["batch_bound"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # absent or damaged: the probe is repeated
    choices = PINNED_WIDTHS if pinned else DEVICE_MULTIPLES
    known = multiple is None or (type(multiple) is int and multiple in choices)
    sound = known and 1 in costs and set(costs) <= set(TIMED_WIDTHS)
    sound = sound and (trees is None or (type(trees) is float and 0.0 <= trees < LONGEST))
    sound = sound and type(pinned) is bool and type(batches) is bool and 0.0 <= bound < LONGEST
    sound = sound and 0.0 <= of_batch < LONGEST
    if not sound or not all(SHORTEST <= cost <= LONGEST for cost in costs.values()):
        return None
    return Calibration(multiple, costs, pinned, batches, bound, trees, of_batch)


def _save(path: Path, found: Calibration) -> None:
    """Keep the result if the cache can be written; a read-only one costs a probe at each start."""
    with contextlib.suppress(CacheError, OSError):
        write_kept(path, asdict(found))
