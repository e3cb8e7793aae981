"""What os.fork leaves of an engine: its threads stay in the parent, so the child can neither run nor free a session.

The child's engine refuses to work (`require_own_process`), and its sessions are never freed there: ONNX Runtime would
wait for threads that do not exist. For the same reason a child that has ONNX Runtime loaded must end by os._exit, as
those of multiprocessing do, or start with 'spawn'.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any, Final

from specrun.models_cache.errors import SpecrunError

_SESSIONS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_KEPT: Final[list[Any]] = []  # in a child, the sessions of its parent


def keep_over_forks(session: Any) -> None:
    """Never free this session in a child of this process."""
    _watch_forks()
    _SESSIONS.add(session)


def require_own_process(process: int) -> None:
    """Raise SpecrunError unless `process` is this one."""
    if os.getpid() != process:
        raise SpecrunError(
            "The engine belongs to the process that this one was forked from: load the model here, or start processes "
            "with multiprocessing's 'spawn'."
        )


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _KEPT.extend(_SESSIONS))
