"""A whole engine whose buffers and logits are in a device's own memory, as on a GPU; the device is the CPU.

What it writes must be what the engine on the host writes, of the same graphs.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import BackendError
from specrun.runtime import Engine, Result
from specrun.runtime.batch import BatchEngine, BatchRequest
from specrun.runtime.calibration import probe
from specrun.runtime.device import Device
from specrun.runtime.device_buffers import DeviceBuffers
from specrun.runtime.device_rows import DeviceLogits
from specrun.runtime.session import ModelSession, WidthRule, session_opener
from specrun.runtime.verify import verify

from .conftest import TinyModels
from .tiny_bundles import PROMPT

DEVICE = Device("cpu", resident=True)
PROMPTS = (PROMPT, "the bell and the bear", "One two one two one")


@pytest.mark.parametrize("model", ["heads-cuda", "heads-cuda-int4", "heads", "heads-int8"])
@pytest.mark.parametrize("method", ["none", "ngram", "lookahead", "medusa", "eagle", "draft", "eagle+ngram"])
def test_text_is_that_of_the_host(models: TinyModels, model: str, method: str) -> None:
    host, device = models.engine(model, device="cpu"), models.engine(model, device=DEVICE)
    options: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "seed": 5, "top_k": 12},
        {"temperature": 0.7, "seed": 2, "top_p": 0.8, "repetition_penalty": 1.2},
    )
    for prompt in PROMPTS[:2]:
        for how in options:
            wanted = host.generate(prompt, max_tokens=24, raw=True, method="none", **how)
            got = device.generate(prompt, max_tokens=24, raw=True, method=method, draft_length=3, **how)
            assert got.token_ids == wanted.token_ids
    assert device.calibration.exactness == host.calibration.exactness == "bitwise"


def test_logits_and_kv_have_the_bits_of_the_host(models: TinyModels) -> None:
    host, device = models.engine("tgt-cuda", device="cpu"), models.engine("tgt-cuda", device=DEVICE)
    tokens = host.encode(PROMPT, raw=True)
    assert np.array_equal(host.logits(tokens), device.logits(tokens))
    for ours, theirs in zip(host.copy_kv(tokens), device.copy_kv(tokens), strict=True):
        assert ours.dtype == np.float16
        assert np.array_equal(ours, theirs)


def test_greedy_rounds_move_no_logits(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.engine("tgt-cuda", device=DEVICE)
    expected = models.engine("tgt-cuda", device="cpu").generate(PROMPT, max_tokens=40, raw=True).token_ids

    def refuse(*given: Any, **named: Any) -> Any:
        raise AssertionError("rows of logits came to the host")

    monkeypatch.setattr(DeviceLogits, "__array__", refuse)
    got = engine.generate(PROMPT, max_tokens=40, raw=True, method="ngram", draft_length=4)
    assert got.token_ids == expected
    assert got.speculation.accepted > 0


@pytest.mark.parametrize("draft_length", [1, 4])
def test_the_rejection_rule_draws_what_it_draws_on_the_host(models: TinyModels, draft_length: int) -> None:
    how: dict[str, Any] = {"temperature": 0.8, "sampling": "rejection", "method": "ngram", "raw": True}
    texts = [
        [
            models.engine("tgt-cuda", device=place).generate(
                prompt, max_tokens=40, seed=seed, draft_length=draft_length, **how
            )
            for prompt in PROMPTS
            for seed in range(3)
        ]
        for place in ("cpu", DEVICE)
    ]
    assert [text.token_ids for text in texts[0]] == [text.token_ids for text in texts[1]]
    assert sum(text.speculation.proposed for text in texts[1]) > 0


def test_ends_and_bans_are_those_of_the_host(models: TinyModels) -> None:
    cases: tuple[dict[str, Any], ...] = ({"min_tokens": 30}, {"ignore_eos": True}, {"logprobs": 2}, {"stop": ["d"]})
    for how in cases:
        texts = [
            models.engine("table-cuda", device=place).generate(
                "a", max_tokens=48, raw=True, method="ngram", draft_length=4, **how
            )
            for place in ("cpu", DEVICE)
        ]
        assert texts[0].token_ids == texts[1].token_ids
        assert texts[0].finish_reason == texts[1].finish_reason
        assert [token.logprob for token in texts[0].tokens] == [token.logprob for token in texts[1].tokens]


def test_a_batch_gives_each_row_its_own_text(models: TinyModels) -> None:
    alone = models.engine("tgt-cuda", device="cpu")
    device = models.engine("tgt-cuda", device=DEVICE)
    prompts = [*PROMPTS, PROMPT[:12]]
    expected = [alone.generate(prompt, max_tokens=20, raw=True).token_ids for prompt in prompts]
    requests = [BatchRequest(i, prompt, {"max_tokens": 20, "raw": True}) for i, prompt in enumerate(prompts)]
    found: dict[int, tuple[int, ...]] = {}
    with closing(BatchEngine(device, batch_size=3).run(requests)) as answers:  # type: ignore[type-var]
        for answer in answers:
            found[answer.index] = answer.result.token_ids  # type: ignore[union-attr]
    assert [found[i] for i in range(len(prompts))] == expected


@pytest.mark.parametrize("model", ["heads-cuda", "heads"])
@pytest.mark.parametrize("method", ["draft", "medusa", "eagle", "eagle+ngram"])
def test_rows_of_a_batch_draft_there(models: TinyModels, model: str, method: str) -> None:
    """Features, logits and the slots of heads are the device's; the texts and what is drafted are the host's."""
    host, device = models.engine(model, device="cpu"), models.engine(model, device=DEVICE)
    prompts = [*PROMPTS, PROMPT[:12], PROMPT + "x", "zebra"]
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.9, "sampling": "rejection"},
    )
    for how in ways:
        options = {"max_tokens": 20, "raw": True, "ignore_eos": True, "draft_length": 3, "seed": 5, **how}
        drafted = []
        found: list[list[tuple[int, ...]]] = []
        for engine in (host, device):
            engine.reset()
            requests = [BatchRequest(i, prompt, {**options, "method": method}) for i, prompt in enumerate(prompts)]
            answers = sorted(BatchEngine(engine, batch_size=3).run(requests), key=lambda answer: answer.index)
            results = [answer.result for answer in answers]
            assert all(isinstance(result, Result) for result in results), results
            found.append([result.token_ids for result in results])  # type: ignore[union-attr]
            drafted.append(sum(result.speculation.proposed for result in results))  # type: ignore[union-attr]
        assert found[0] == found[1]
        assert drafted[0] == drafted[1] > 0
        if "sampling" not in how:
            alone = [host.generate(prompt, **{**options, "draft_length": None}, method="none") for prompt in prompts]
            assert found[1] == [result.token_ids for result in alone]


def test_rows_come_to_the_host_in_one_copy(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    session = session_opener(models.bundle("heads-cuda"), 1, DEVICE)(3, WidthRule(2))
    logits = session.run_batch([[5, 6], [7], [8, 9]], rows=2)
    copies: list[Any] = []
    read = DeviceBuffers.read

    def counted(self: DeviceBuffers, buffer: Any) -> Any:
        copies.append(buffer)
        return read(self, buffer)

    monkeypatch.setattr(DeviceBuffers, "read", counted)
    whole = [np.array(row) for row in logits]
    assert len({row.tobytes() for row in whole}) == 3
    assert np.array_equal(whole[2][1], logits[2][1:][0])
    assert len(copies) == 1
    assert session.batch_features is session.batch_features
    assert len(copies) == 2
    session.run_batch([[5], [7], [8]], rows=1)
    assert session.batch_features.shape[1] != 0
    assert len(copies) == 3


def test_best_of_copies_the_prompt_where_its_graph_cannot_run(models: TinyModels) -> None:
    for model, place in (("tgt-cuda", "cpu"), ("tgt", DEVICE)):
        engine = models.engine(model, device=place)
        found = engine.best_of(PROMPT, n=2, max_tokens=4, seed=3)
        assert found.memory.kv_prefix_bytes == 0 < found.memory.kv_rows_bytes == found.memory.kv_copied_bytes
        wanted = [engine.generate(PROMPT, max_tokens=4, seed=3, temperature=0.8, sample_index=n) for n in range(2)]
        assert [candidate.token_ids for candidate in found.candidates] == [result.token_ids for result in wanted]


def test_the_buffers_of_a_device_keep_their_capacity(models: TinyModels) -> None:
    cache = models.engine("tgt-cuda", device=DEVICE).target.cache
    with pytest.raises(ValueError, match="keep their capacity"):
        cache.fit(cache.capacity)


def test_a_conversation_is_saved_and_taken_up_again(models: TinyModels, tmp_path: Path) -> None:
    engine = models.engine("tgt-cuda", device=DEVICE)
    chat = engine.chat()
    assert list(chat.send("the bell", max_tokens=8))
    chat.save(tmp_path / "kept.npz")
    first = chat.send("again", max_tokens=8)
    assert list(first)
    engine.reset()
    again = engine.load_session(tmp_path / "kept.npz").send("again", max_tokens=8)
    assert list(again)
    assert again.result.token_ids == first.result.token_ids
    assert again.result.usage.cached_tokens > 0


def test_verify_holds_there(models: TinyModels) -> None:
    engine = models.engine("heads-cuda", device=DEVICE)
    cases = list(verify(engine, PROMPTS[:1], draft_lengths=(2,), max_tokens=12))
    assert {case.method for case in cases} >= {"ngram", "medusa", "eagle", "draft"}
    assert all(case.equal for case in cases)


def test_graphs_without_a_bias_run_chains_only(models: TinyModels) -> None:
    session = session_opener(models.bundle("tgt-cuda"), 1, DEVICE)(1, WidthRule())
    assert session.tree_room(5) == 0
    assert "attention_bias" not in {value.name for value in session._onnx_session.get_inputs()}


@pytest.mark.parametrize("method", ["lookahead", "eagle", "medusa"])
def test_trees_run_in_a_graph_of_their_own_and_change_no_text(
    models: TinyModels, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their rows are inexact, so what they decide must win by the measured margin, or is decided anew by a chain."""
    engine = models.engine("heads-cuda", device=DEVICE)
    bound = engine.calibration.tree_bound
    assert bound is not None
    assert engine.margin == max(1e-3, 8 * bound)
    trees: list[tuple[int, ...]] = []
    run = ModelSession.run_batch

    def counted(self: ModelSession, tokens: Any, *, rows: int, parents: Any = None) -> Any:
        if parents is not None:
            trees.append(tuple(parents))
        return run(self, tokens, rows=rows, parents=parents)

    monkeypatch.setattr(ModelSession, "run_batch", counted)
    for how in ({}, {"temperature": 0.9, "seed": 4}):
        for prompt in PROMPTS:
            wanted = engine.generate(prompt, max_tokens=40, raw=True, method="none", **how)
            got = engine.generate(prompt, max_tokens=40, raw=True, method=method, **how)
            assert got.token_ids == wanted.token_ids
    if method == "lookahead":
        assert len(trees) > 20
    filtered = {"temperature": 0.9, "seed": 4, "top_k": 9}  # for which no margin is known: chains only
    trees.clear()
    wanted = engine.generate(PROMPT, max_tokens=24, raw=True, method="none", **filtered)
    assert engine.generate(PROMPT, max_tokens=24, raw=True, method=method, **filtered).token_ids == wanted.token_ids
    assert not trees


def test_a_choice_that_wins_by_too_little_is_made_anew(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees that are off by up to the margin's half: with the margin the text stays, without it it would not."""
    engine = models.engine("heads-cuda", device=DEVICE)
    wanted = engine.generate(PROMPT, max_tokens=60, raw=True, method="none").token_ids
    run = ModelSession.run_batch
    noise = np.random.default_rng(3)

    def rough(self: ModelSession, tokens: Any, *, rows: int, parents: Any = None) -> Any:
        logits = run(self, tokens, rows=rows, parents=parents)
        if parents is None:
            return logits
        return [np.array(row) + noise.uniform(-0.2, 0.2, (rows, 288)).astype(np.float32) for row in logits]

    monkeypatch.setattr(ModelSession, "run_batch", rough)

    def text(bound: float) -> tuple[int, ...]:
        monkeypatch.setattr(engine.target, "tree_bound", bound)
        engine.reset()
        return engine.generate(PROMPT, max_tokens=60, raw=True, method="lookahead").token_ids

    assert text(0.05) == wanted  # a margin of 0.4
    assert any(text(0.0) != wanted for _ in range(5))


class Pinned(ModelSession):
    """A session whose bits depend on the width of a run, as on a device that takes other kernels for each."""

    solo_only = False

    def run_batch(self, tokens: Any, *, rows: int, parents: Any = None) -> Any:
        found = [np.array(row) for row in super().run_batch(tokens, rows=rows, parents=parents)]
        if self._last is not None and not self._nested(tokens):
            width = self._last.positions * (self.cache.batch if self.solo_only else 1)
            found = [row + np.float32(width * 1e-3) for row in found]
        return found

    def _nested(self, tokens: Any) -> bool:
        return self.width_rule.pinned and max(map(len, tokens)) > self.width_rule.multiple


def opener(models: TinyModels, kind: type[Pinned]) -> Any:
    bundle = models.bundle("tgt-cuda")
    onnx_session = session_opener(bundle, 1, DEVICE)(1, WidthRule())._onnx_session

    def opened(batch: int, rule: WidthRule) -> ModelSession:
        return kind(bundle, onnx_session, width_rule=rule, batch=batch, device=DEVICE)

    return opened


def test_where_every_width_has_bits_of_its_own_one_width_is_pinned(models: TinyModels) -> None:
    found = probe(opener(models, Pinned))
    assert (found.width_multiple, found.pinned, found.batches, found.bound) == (8, True, True, 0.0)
    assert found.rule == WidthRule(8, pinned=True)
    assert (found.exactness, found.batch_exactness) == ("bitwise", "bitwise")


def test_a_rule_for_one_text_is_no_rule_for_a_batch(models: TinyModels) -> None:
    class Solo(Pinned):
        solo_only = True

    found = probe(opener(models, Solo))
    assert (found.width_multiple, found.pinned, found.batches) == (8, True, False)
    assert found.bound_of(1) == found.bound == 0.0
    assert found.bound_of(3) == pytest.approx(0.016, rel=0.01)  # rows of three are 24 positions wide, not 8
    assert (found.exactness, found.batch_exactness) == ("bitwise", "rounding")


def test_where_no_rule_holds_the_difference_is_measured(models: TinyModels) -> None:
    class Restless(Pinned):
        runs = 0

        def run_batch(self, tokens: Any, *, rows: int, parents: Any = None) -> Any:
            Restless.runs += 1
            return [row + np.float32(Restless.runs % 7 * 1e-2) for row in super().run_batch(tokens, rows=rows)]

    found = probe(opener(models, Restless))
    assert found.exactness == "rounding"
    assert 0.01 < found.bound < 1.0


@pytest.mark.parametrize("width", [8, 16])
def test_a_pinned_width_splits_what_is_longer(models: TinyModels, width: int) -> None:
    open_session = session_opener(models.bundle("tgt-cuda"), 1, DEVICE)
    tokens = [(7 * index) % 280 for index in range(61)]
    wanted = np.array(open_session(1, WidthRule(2)).run(tokens, rows=3))
    pinned = open_session(1, WidthRule(width, pinned=True))
    assert np.array_equal(np.array(pinned.run(tokens, rows=3)), wanted)
    assert {frame.positions for frame in pinned._frames.values()} == {width}
    pinned.rewind_to(40)
    assert np.array_equal(np.array(pinned.run(tokens[40:], rows=20))[-3:], wanted)
    batch = open_session(2, WidthRule(width, pinned=True))
    logits = batch.run_batch([tokens, tokens[:5]], rows=3)
    assert np.array_equal(logits[0], wanted)


def test_logits_that_are_no_numbers_are_refused(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = models.engine("tgt-cuda", device=DEVICE)
    tokens = engine.encode(PROMPT, raw=True)
    engine.logits(tokens)
    rows = engine.target.run([5], rows=1)
    assert isinstance(rows, DeviceLogits)
    rows._buffer.owner.update_inplace(np.full(rows._buffer.shape, np.nan, np.float32))
    from specrun.runtime.proposal import EMPTY

    with pytest.raises(BackendError, match="not numbers"):
        rows.greedy(EMPTY, 280)


def test_a_row_is_taken_by_its_index(models: TinyModels) -> None:
    engine = models.engine("tgt-cuda", device=DEVICE)
    engine.reset()
    rows = engine.target.run(engine.encode(PROMPT, raw=True)[:9], rows=4)
    whole = np.array(rows)
    assert rows.shape == whole.shape == (4, 288)
    assert len(rows) == 4
    assert np.array_equal(rows[2], whole[2])
    assert np.array_equal(np.array(rows[1:3]), whole[1:3])
    assert np.array_equal(rows[-1], whole[-1])


def test_the_best_of_rows_hold_all_that_tie(models: TinyModels) -> None:
    engine = models.engine("tgt-cuda", device=DEVICE)
    engine.reset()
    rows = engine.target.run(engine.encode(PROMPT, raw=True)[:9], rows=3)
    assert isinstance(rows, DeviceLogits)
    whole = np.array(rows)[:, :280].copy()
    whole[1, 10:200] = whole[1].max() + 1  # more than come with the k best
    whole[2, 5:40] = whole[2].max() + 1  # fewer
    spare = rows._buffer.shape[1] - len(whole)  # rows that fill a width
    rows._buffer.owner.update_inplace(np.pad(whole, ((0, spare), (0, 8)))[None])
    rows._copied = None
    best = rows.best(4, 280)
    for row, found in zip(whole, best, strict=True):
        border = np.sort(row)[-4]
        assert np.array_equal(found[row >= border], row[row >= border])
        assert np.isneginf(found[found != row]).all()
    assert (best[1] == whole[1]).all()
    assert np.isfinite(best[0]).sum() == np.isfinite(best[2]).sum() == 4 + 64


def test_a_decision_on_the_device_is_the_same_decision(models: TinyModels) -> None:
    """The whole of it: what counts as accepted, as a correction, as a bonus."""
    texts = []
    for place in ("cpu", DEVICE):
        engine: Engine = models.engine("table-cuda", device=place)
        result = engine.generate("a", max_tokens=40, raw=True, method="ngram", draft_length=3)
        texts.append((result.token_ids, [token.source for token in result.tokens], result.speculation.accepted))
    assert texts[0] == texts[1]
