from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specrun.export.reference import reference_logits
from specrun.export.weights import open_weights

from .tiny_models import VARIANTS, save_tiny, token_ids, transformers_logits

TEXT = token_ids()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = save_tiny(variant, tmp_path / variant)
    expected = transformers_logits(folder, TEXT)
    found = reference_logits(open_weights(folder), TEXT)
    assert found.dtype == np.float32
    assert np.abs(expected).max() > 0.5  # the comparison would mean little for flat logits
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_are_read_exactly(dtype: str, tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / dtype, dtype=dtype)
    np.testing.assert_allclose(
        reference_logits(open_weights(folder), TEXT), transformers_logits(folder, TEXT), rtol=1e-4, atol=1e-4
    )


def test_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    weights = open_weights(save_tiny("llama", tmp_path / "llama"))
    whole = reference_logits(weights, TEXT)
    np.testing.assert_allclose(reference_logits(weights, TEXT, rows=[3, 23]), whole[[3, 23]], rtol=1e-5, atol=1e-5)


def test_the_window_matters(tmp_path: Path) -> None:
    # A changed token beyond the windows of both layers must not reach the last logits; one inside must.
    weights = open_weights(save_tiny("mistral", tmp_path / "mistral"))
    last = reference_logits(weights, TEXT, rows=[-1])
    far, near = list(TEXT), list(TEXT)
    far[0] = near[-8] = 5
    np.testing.assert_array_equal(reference_logits(weights, far, rows=[-1]), last)
    assert np.abs(reference_logits(weights, near, rows=[-1]) - last).max() > 1e-3


@pytest.mark.parametrize("tokens", [[], [160], [-1]])
def test_bad_token_ids_are_refused(tokens: list[int], tmp_path: Path) -> None:
    weights = open_weights(save_tiny("llama-tied", tmp_path / "llama"))
    with pytest.raises(ValueError, match="ids below 160"):
        reference_logits(weights, tokens)
