"""Runs that a session makes as several: those wider than its pinned width, and those of rows one after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.device_rows import Logits

if TYPE_CHECKING:
    from specrun.runtime.session import ModelSession

Tokens = Sequence[Sequence[int]]


def in_pieces(session: ModelSession, tokens: Tokens, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """As `ModelSession.run_batch`, in runs of the pinned width: (logits, features), both on the host."""
    width = session.width_rule.multiple
    found: list[list[NDArray[np.float32]]] = [[] for _ in tokens]
    features: list[NDArray[np.float32]] = []
    for start in range(0, max(map(len, tokens)), width):
        pieces = [new[start : start + width] for new in tokens]
        logits = session.run_batch(pieces, rows=min(width, max(map(len, pieces))))
        for row, piece in enumerate(pieces):
            found[row].extend(np.array(logits[row])[len(logits[row]) - len(piece) :])
        features.append(session.batch_features.copy())
    joined = np.zeros((len(tokens), rows, session.sizes.vocabulary), np.float32)
    for row, every in enumerate(found):
        last = every[-rows:]
        if last:
            joined[row, rows - len(last) :] = last
    return joined, np.concatenate(features, axis=1)


def row_by_row(session: ModelSession, tokens: Tokens, rows: int) -> tuple[list[Logits], NDArray[np.float32]]:
    """As `ModelSession.run_batch`, one row after another: (logits of each row, features on the host).

    Each has a session over the buffers as they are (`ModelSession.single_rows`). An idle row has another's logits.
    """
    lengths, longest = session.cache.lengths, max(map(len, tokens))
    session.reserve(max(lengths) + longest + session.spare)
    found: dict[int, Logits] = {}
    parts: dict[int, NDArray[np.float32]] = {}
    for row, new in enumerate(tokens):
        if not new:
            continue
        if row not in session.single_rows:
            session.single_rows[row] = session.over(session.cache.part(row, 1))
        single = session.single_rows[row]
        single.cache.lengths[0] = lengths[row]
        before = single.onnx_seconds
        found[row] = single.run_batch([new], rows=rows)[0]
        session.onnx_seconds += single.onnx_seconds - before
        lengths[row] = single.cache.lengths[0]
        parts[row] = single.features
    any_row = next(iter(found))
    features = np.zeros((len(tokens), longest, parts[any_row].shape[-1]), np.float32)
    for row, part in parts.items():
        features[row, : len(part)] = part
    return [found.get(row, found[any_row]) for row in range(len(tokens))], features
