"""How long work reports itself: one callback type."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Called with a label, how much is done and the total (None when unknown), in bytes unless the label says otherwise."""


def no_progress(label: str, done: int, total: int | None) -> None:
    """Report nothing."""
