"""Real weights for tests that are marked `weights`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def smollm2_gguf() -> Path:
    """The SmolLM2-135M file: SPECRUN_TEST_SMOLLM2, or fetched like `specrun models pull` does."""
    given = os.environ.get("SPECRUN_TEST_SMOLLM2")
    if given:
        return Path(given)
    from specrun.models_cache.sources import fetch_source

    return fetch_source("smollm2-135m").path


def qwen_gguf() -> Path:
    """A Qwen2.5-Coder GGUF file: SPECRUN_TEST_QWEN, else the test is skipped."""
    given = os.environ.get("SPECRUN_TEST_QWEN")
    if not given:
        pytest.skip("SPECRUN_TEST_QWEN does not name a GGUF file")
    return Path(given)
