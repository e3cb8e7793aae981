from __future__ import annotations

import pytest

from specrun.cli import output


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not make a command mention that it waits: tests compare stderr."""
    monkeypatch.setattr(output, "_PATIENCE_S", 60.0)
