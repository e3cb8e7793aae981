"""The graph for rows behind one prefix computes what the ordinary graph does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from specrun.export.weights import Weights

from .graph_runner import GraphRunner, open_session
from .tiny_models import VARIANTS, token_ids

TEXT = token_ids(40)
PREFIX = 23
SLOTS = 32
GRAPHS = sorted(name for name in VARIANTS if name not in ("mistral", "qwen2-window"))


class SharedRunner:
    """Rows behind what a `GraphRunner` holds; `lengths` count slots, the first of which stands for the prefix."""

    def __init__(self, folder: Path, prefix: GraphRunner, batch: int) -> None:
        self.config = config = prefix.config
        self.session = open_session(folder / "target_shared.onnx")
        held = prefix.lengths[0]
        self.before = held - 1
        self.prefix = {
            f"prefix_{name}": np.ascontiguousarray(cache[:, :, :held]).swapaxes(0, 1)
            for name, cache in prefix.caches.items()
        }
        shape = (batch, config.kv_heads, SLOTS, config.head_dim)
        self.caches = {name: np.zeros(shape, np.float32) for name in prefix.caches}
        self.lengths = [1] * batch
        self.features = np.zeros(0, np.float32)

    def run(self, tokens: Sequence[Sequence[int]], total: int = SLOTS) -> np.ndarray:
        """Append tokens to each row; logits [batch, positions, vocabulary]."""
        config = self.config
        batch, width = len(tokens), max(map(len, tokens))
        pad = int(width == 1)
        ids = np.full((batch, width), 11, np.int64)
        for row, new in enumerate(tokens):
            ids[row, : len(new)] = new
        counts = np.array([max(len(new), min(2, width)) + pad if new else 0 for new in tokens], np.int32)
        past = np.array(self.lengths, np.int32)
        heads = (config.kv_heads, 1, batch * width * config.heads // config.kv_heads, config.head_dim)
        feeds = {
            "input_ids": ids,
            "query_lengths": counts,
            "pad_rows": np.zeros((batch, pad, (config.heads + 2 * config.kv_heads) * config.head_dim), np.float32),
            "total_lengths_minus_one": past + counts - 1,
            "max_total_length": np.array([total], np.int32),
            "position_ids": past[:, None].astype(np.int64) + self.before + np.arange(width + pad),
            "prefix_queries": np.array(heads, np.int64),
            "bias_pads": np.array([0, 0, 0, 0, 0, 0, pad, total - 1], np.int64),
            "logit_rows": np.tile(np.arange(width), (batch, 1)),
            **self.prefix,
            **{f"past_{name}": cache for name, cache in self.caches.items()},
        }
        names = [output.name for output in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, feeds), strict=True))
        for name, cache in self.caches.items():
            present = outputs[f"present_{name}"]
            for row, new in enumerate(tokens):
                start = self.lengths[row]
                cache[row, :, start : start + len(new)] = present[row, :, start : start + len(new)]
        for row, new in enumerate(tokens):
            self.lengths[row] += len(new)
        self.features = outputs["features"]
        logits: np.ndarray = outputs["logits"]
        return logits


@pytest.mark.parametrize("variant", GRAPHS)
def test_rows_compute_what_the_whole_text_does(
    variant: str, fp32_graphs: Callable[[str], tuple[Path, Weights]]
) -> None:
    """Three rows with texts of their own and runs of different widths, each against prefix and text in one row."""
    folder, weights = fp32_graphs(variant)
    prefix = GraphRunner(folder / "target.onnx", weights)
    prefix.run([TEXT[:PREFIX]])
    shared = SharedRunner(folder, prefix, 3)
    texts = [TEXT[PREFIX:], TEXT[:17], TEXT[5:22]]
    found: list[list[np.ndarray]] = [[], [], []]
    features: list[list[np.ndarray]] = [[], [], []]
    for counts in ((1, 1, 1), (3, 1, 2), (0, 4, 1), (1, 1, 1), (5, 2, 4)):
        starts = [length - 1 for length in shared.lengths]
        new = [text[start : start + count] for text, start, count in zip(texts, starts, counts, strict=True)]
        logits = shared.run(new)
        for row, count in enumerate(counts):
            found[row] += [*logits[row, :count]]
            features[row] += [*shared.features[row, :count]]
    for row, text in enumerate(texts):
        prefix.lengths[0] = PREFIX
        expected = prefix.run([text[: len(found[row])]])[0]
        np.testing.assert_allclose(found[row], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(features[row], prefix.features[0], rtol=1e-3, atol=1e-4)


def test_the_bits_do_not_depend_on_what_is_looked_over(
    fp32_graphs: Callable[[str], tuple[Path, Weights]],
) -> None:
    """A row has the same bits wherever the bound on the lengths lies, and beside any others."""
    folder, weights = fp32_graphs("llama")
    prefix = GraphRunner(folder / "target.onnx", weights)
    prefix.run([TEXT[:PREFIX]])
    expected = SharedRunner(folder, prefix, 1).run([TEXT[:5]])[0]
    for batch, total in ((1, 8), (2, 12), (4, SLOTS)):
        shared = SharedRunner(folder, prefix, batch)
        others = [TEXT[row : row + 5] for row in range(1, batch)]
        np.testing.assert_array_equal(shared.run([TEXT[:5], *others], total)[0], expected)


def test_a_window_has_no_such_graph(fp32_graphs: Callable[[str], tuple[Path, Weights]]) -> None:
    assert not (fp32_graphs("mistral")[0] / "target_shared.onnx").exists()
