"""Sessions at every width: ragged batches, width rules, and the dummy row of the attention."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.runtime.calibration import Calibration
from specrun.runtime.session import WidthRule, session_opener

from .checks import check_counters, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

# Ragged batches


@pytest.mark.parametrize("name", ["tgt", "tgt-int8", "tgt-int4", "tgt-source"])
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_ragged_rows_equal_solo_rows(models: TinyModels, name: str, multiple: int) -> None:
    """text-generation-inference#1411: rows of different lengths and widths have the bits they have alone."""
    open_session = session_opener(models.bundle(name), 1)
    rule = WidthRule(multiple=multiple)
    solo, batch = open_session(1, rule), open_session(3, rule)
    rng = np.random.default_rng(7)
    texts = [rng.integers(3, 270, 300).tolist() for _ in range(3)]
    expected = []
    for text in texts:
        solo.rewind_to(0)
        expected.append(solo.run(text[:120], rows=120).copy())
    seen = [0, 0, 0]
    for _ in range(60):
        counts = [int(n) for n in rng.integers(0, 9, 3)]
        if not any(counts):
            continue
        new = [text[at : at + count] for text, at, count in zip(texts, seen, counts, strict=True)]
        before = [value.numpy().copy() for value in batch.cache.values]
        logits = batch.run_batch(new, rows=max(counts))
        for row, count in enumerate(counts):
            wanted = expected[row][seen[row] : seen[row] + count]
            assert (logits[row, max(counts) - count : max(counts)] == wanted).all()
            if not count and batch.cache.capacity == before[0].shape[2]:  # an idle row is untouched
                for value, old in zip(batch.cache.values, before, strict=True):
                    assert (value.numpy()[row, :, : seen[row]] == old[row, :, : seen[row]]).all()
            seen[row] += count
            if rng.random() < 0.15:
                seen[row] = int(rng.integers(0, seen[row] + 1))
                batch.cache.rewind_to(seen[row], row=row)
            if seen[row] > 110:
                seen[row] = 60
                batch.cache.rewind_to(60, row=row)
        assert batch.cache.lengths == seen


@pytest.mark.parametrize("name", ["tgt", "tgt-int8"])
def test_wide_ragged_rows_equal_solo_rows(models: TinyModels, name: str) -> None:
    """Prompts of several rows in one run, one of them long, one a lone token."""
    open_session = session_opener(models.bundle(name), 1)
    solo, batch = open_session(1, WidthRule()), open_session(3, WidthRule())
    tokens = np.random.default_rng(9).integers(3, 270, 256).tolist()
    solo.rewind_to(0)
    expected = solo.run(tokens[:200], rows=200).copy()
    for counts in ((33, 40, 1), (65, 17, 64), (2, 97, 33), (1, 1, 129)):
        for row in range(3):
            batch.cache.rewind_to(0, row=row)
        logits = batch.run_batch([tokens[:count] for count in counts], rows=max(counts))
        for row, count in enumerate(counts):
            assert (logits[row, max(counts) - count :] == expected[:count]).all(), (counts, row)


# Width rules


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_padded_widths_are_exact(models: TinyModels, multiple: int) -> None:
    """A rule of 2 or 4 pads positions and rows; text and logits stay, and the padding is no draft token."""
    engine = models.engine("tgt", "mix")
    plain = engine.generate(PROMPT, method="none", max_tokens=60, raw=True, ignore_eos=True)
    calibration, rules = engine.calibration, (engine.target.width_rule, engine.drafting.draft.width_rule)
    try:
        engine.calibration = Calibration(multiple, calibration.costs)
        engine.target.width_rule = engine.drafting.draft.width_rule = engine.calibration.rule
        for method, draft_length in (("none", None), ("draft", 1), ("draft", 2), ("draft", 5), ("ngram", 3)):
            engine.reset()
            result = engine.generate(
                PROMPT, method=method, draft_length=draft_length, max_tokens=60, raw=True, ignore_eos=True
            )
            assert result.token_ids == plain.token_ids
            assert result.exactness == "bitwise"
            assert result.speculation.proposed <= (draft_length or 0) * result.speculation.rounds
            check_counters(result)
        session = engine.target
        for width in (1, 2, 3, 5):
            positions, pad, rows = session._padded(width, width)
            assert positions % multiple == rows % multiple == 0
            assert positions - width < multiple
            assert pad == (positions == 1)  # the attention never sees a lone row
    finally:
        engine.calibration = calibration
        engine.target.width_rule, engine.drafting.draft.width_rule = rules


def test_the_variant_for_older_runtimes(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without query_seqlens takes the batch-1 variant: the same text, and batches are refused."""
    from specrun.models_cache.errors import BackendError
    from specrun.runtime import Engine
    from specrun.runtime import session as session_module

    engine = models.engine("tgt", "mix")
    texts = [PROMPT, "a", text_of(270)]
    expected = [engine.generate(text, method="none", max_tokens=40, raw=True).token_ids for text in texts]
    monkeypatch.setattr(session_module, "build_features", frozenset)
    with Engine.load("tgt", draft="mix", threads=1) as old:
        assert not old.target.ragged
        assert old.recalibrate().width_multiple is not None
        for text, wanted in zip(texts, expected, strict=True):
            for method in ("none", "draft", "ngram"):
                assert old.generate(text, method=method, draft_length=4, max_tokens=40, raw=True).token_ids == wanted
        with pytest.raises(BackendError, match="one row at a time"):
            session_opener(old.bundle, 1)(2, WidthRule())


@pytest.mark.parametrize("name", ["tgt", "tgt-int8", "tgt-int4", "tgt-source"])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_width_is_exact(models: TinyModels, name: str, threads: int) -> None:
    """Runs of 1 .. 256 tokens: each row has the bits that it has in runs of 16.

    The attention works in blocks of 2 x head_dim rows, here 32: 33, 65, 97, ... would leave a lone one.
    """
    session = session_opener(models.bundle(name), threads)(1, WidthRule())
    tokens = np.random.default_rng(5).integers(3, 270, 256).tolist()

    def rows(width: int) -> np.ndarray:
        session.rewind_to(0)
        return np.concatenate(
            [
                session.run(tokens[start : start + width], rows=min(width, 256 - start)).copy()
                for start in range(0, 256, width)
            ]
        )

    expected = rows(16)
    for width in (*range(1, 36), 63, 64, 65, 66, 69, 96, 97, 127, 128, 129, 161, 193, 225, 255, 256):
        assert (rows(width) == expected).all(), width
