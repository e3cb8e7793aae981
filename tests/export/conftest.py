from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specrun.export.weights import Weights, open_weights

from .graph_runner import write_graphs
from .tiny_models import save_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The saved model of a variant, made once."""
    root = tmp_path_factory.mktemp("tiny models")

    def make(variant: str) -> Path:
        folder = root / variant
        return folder if folder.exists() else save_tiny(variant, folder)

    return make


@pytest.fixture(scope="session")
def fp32_graphs(
    tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Weights]]:
    """(folder with both fp32 graphs, weights) of a variant, made once."""
    root = tmp_path_factory.mktemp("tiny graphs")

    def make(variant: str) -> tuple[Path, Weights]:
        weights = open_weights(tiny_folder(variant))
        folder = root / variant
        return (folder if folder.exists() else write_graphs(weights, folder)), weights

    return make
