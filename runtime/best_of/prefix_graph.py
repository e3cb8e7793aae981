"""The graph of best-of-N of one engine: opened once, and probed for the widths at which its rows are bit-equal."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError, CacheError, UsageError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.manifest import SHARED_GRAPH
from specrun.runtime.backend import build_features, create_session
from specrun.runtime.best_of.prefix_session import SINK, Prefix, PrefixSession
from specrun.runtime.calibration import MULTIPLES, kept_path, write_kept
from specrun.runtime.device import CPU, Device, made_for
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.width_rule import WidthRule

VERSION: Final = 1
PROBED_PREFIX: Final = 640  # long enough for products that more threads would cut in pieces
PROBED_WIDTHS: Final = (1, 2, 3, 5, 8)
PROBED_TOKENS: Final = 8
RAGGED: Final = ((3, 1, 2), (1, 4, 1), (4, 3, 5))  # new tokens of three rows, run after run
MANY_ROWS: Final = 16


def keeps_prefix(bundle: Bundle, device: Device) -> bool:
    """Whether rows of this model can share one stored prefix.

    Not on a GPU, whose attention gives no softmax weights to merge by, and not behind a sliding window, which ends at
    another place of the prefix for each position.
    """
    return not device.resident and made_for(bundle.manifest) == "cpu" and bundle.manifest.kv.window is None


class PrefixGraph:
    """Opens sessions behind a prefix (`keeps_prefix`). Raises UsageError for a model without that graph."""

    def __init__(self, bundle: Bundle, threads: int, device: Device = CPU) -> None:
        spec = bundle.manifest.graphs.get(SHARED_GRAPH)
        name = bundle.manifest.name
        if spec is None:
            raise UsageError(
                f"{name} was made before best-of was there and lacks its graph: export it again (or pull it) with "
                "--force."
            )
        if not build_features().issuperset(spec.requires):
            raise BackendError("best-of needs ONNX Runtime 1.32 or newer: update it.")
        self._bundle, self._threads = bundle, threads
        self._session: Any = create_session(bundle.path / spec.file, threads=threads, device=device)
        self._rule: WidthRule | None = None

    def session(self, prefix: Prefix, rows: int, tokens: int, *, now: int | None = None) -> PrefixSession:
        """Rows with room for `tokens` of their own each; `now`: of so many at first."""
        return self._open(prefix, rows, tokens, now, self.rule)

    @property
    def rule(self) -> WidthRule:
        """The widths at which rows have the same bits however they run: kept, or found by a probe."""
        if self._rule is None:
            path = kept_path("calibration-shared", VERSION, self._bundle, self._threads)
            try:
                multiple = json.loads(path.read_text())["width_multiple"]
                known = multiple is None or (type(multiple) is int and multiple in MULTIPLES)
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                known = False  # absent or damaged: the probe is repeated
            if not known:
                multiple = self._probe()
                with contextlib.suppress(CacheError, OSError):
                    write_kept(path, {"width_multiple": multiple})
            self._rule = WidthRule(multiple=1, exact=False) if multiple is None else WidthRule(multiple=multiple)
        return self._rule

    def close(self) -> None:
        """Free the session."""
        self._session = None

    def _open(self, prefix: Prefix, rows: int, tokens: int, now: int | None, rule: WidthRule) -> PrefixSession:
        sizes = self._bundle.manifest.sizes
        cache = KVCache(
            layers=sizes.layers, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim, capacity=0, limit=1, batch=rows
        )
        session = PrefixSession(self._bundle, self._session, prefix, cache, rule=rule, threads=self._threads)
        cache.limit = SINK + tokens + session.spare
        cache.reserve(min(cache.limit, SINK + (tokens if now is None else now) + session.spare))
        return session

    def _probe(self) -> int | None:
        """The smallest multiple at which a row has the same bits at every width and beside any others; None: no such.

        The prefix is noise: of bits only their equality is asked.
        """
        sizes = self._bundle.manifest.sizes
        length = min(PROBED_PREFIX, sizes.context // 2)
        noise = np.random.default_rng(0)
        shape = (sizes.kv_heads, 1, length, sizes.head_dim)
        buffers = [noise.standard_normal(shape, np.float32) for _ in range(2 * sizes.layers)]
        prefix = Prefix(length, buffers)
        tokens = [(index * 7919 + 104729) % sizes.tokens for index in range(1, PROBED_TOKENS + 1)]
        for multiple in MULTIPLES:
            if self._holds(prefix, tokens, WidthRule(multiple=multiple)):
                return multiple
        return None

    def _holds(self, prefix: Prefix, tokens: list[int], rule: WidthRule) -> bool:
        alone = self._open(prefix, 1, PROBED_TOKENS, None, rule)
        whole: NDArray[np.float32] | None = None
        for width in reversed(PROBED_WIDTHS):
            found = _chain(alone, tokens, [[width]] * -(-PROBED_TOKENS // width), row=0)
            if whole is not None and not np.array_equal(found, whole):
                return False
            whole = found
        ragged = self._open(prefix, len(RAGGED[0]), PROBED_TOKENS, None, rule)
        many = self._open(prefix, MANY_ROWS, PROBED_TOKENS, None, rule)
        runs: list[tuple[PrefixSession, Sequence[Sequence[int]], int]]
        runs = [(ragged, RAGGED, row) for row in range(ragged.cache.batch)]
        runs.append((many, [[1] * MANY_ROWS] * 3, MANY_ROWS - 1))
        runs.append((many, [[3] * MANY_ROWS], 1))
        for session, counts, row in runs:
            found = _chain(session, tokens, counts, row=row)
            if whole is None or not np.array_equal(found, whole[: len(found)]):
                return False
        return True


def _chain(
    session: PrefixSession, tokens: list[int], counts: Sequence[Sequence[int]], *, row: int
) -> NDArray[np.float32]:
    """Logits of a row's tokens, run after run; the other rows take as many of theirs, each beginning elsewhere."""
    batch = session.cache.batch
    session.cache.lengths[:] = [SINK] * batch
    pieces, seen = [], [0] * batch
    for new in counts:
        takes = [min(count, len(tokens) - seen[other]) for other, count in enumerate(new)]
        texts = [
            [tokens[(seen[other] + place + (other - row)) % len(tokens)] for place in range(count)]
            for other, count in enumerate(takes)
        ]
        widest = max(takes)
        if takes[row]:
            pieces.append(session.run_batch(texts, rows=widest)[row, widest - takes[row] :].copy())
        seen = [before + count for before, count in zip(seen, takes, strict=True)]
    return np.concatenate(pieces)
