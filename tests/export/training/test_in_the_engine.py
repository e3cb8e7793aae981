"""What was trained guesses in the engine what it guesses in torch on the same text, token by token.

It is trained on that very text: how much is guessed right must not depend on how fast a machine writes training text.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from specrun.export.target_ends import read_target_ends
from specrun.export.training import train as train_module
from specrun.export.training import trainer
from specrun.export.training.batches import Batch
from specrun.export.training.self_text import Dialogue
from specrun.export.training.text_store import TextStore
from specrun.export.training.train import target_parts, train_speculator
from specrun.models_cache.layout import Bundle, load_bundle
from specrun.runtime import Engine
from specrun.runtime.session import WidthRule, session_opener
from specrun.runtime.tokenizer import Tokenizer

from .naive import Recorded

PROMPT, MAX_TOKENS = "Write a story", 250
AHEAD = {"medusa": 2, "eagle": 2, "draft": 1}  # the place that the first guess is of, from the newest that is run


@pytest.mark.parametrize("method", AHEAD)
def test_rounds_of_one_draft_token(
    tiny_fp32: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    shutil.copytree(tiny_fp32.path, tmp_path / "tiny")
    bundle = load_bundle(tmp_path / "tiny")
    asked = {"max_tokens": MAX_TOKENS, "raw": True}
    with Engine(bundle, threads=1) as engine:
        plain = engine.generate(PROMPT, method="none", **asked)
    prompt = Tokenizer.from_bundle(bundle).encode(PROMPT)
    assert len(prompt) == plain.usage.prompt_tokens
    text = prompt + list(plain.token_ids)
    features = features_of(bundle, text)

    store = TextStore(tmp_path / "work" / "text")
    answer = np.arange(len(text)) >= len(prompt)
    dialogue = Dialogue(np.asarray(text, np.int32), answer, features.astype(np.float16))
    for copies in (2, 11):  # the first shard is held out
        store.add([dialogue] * copies)
    options = functools.partial(trainer.TrainingOptions, rows=2, length=128)
    monkeypatch.setattr(train_module, "TrainingOptions", options)
    monkeypatch.setattr(train_module, "LEARNING_RATES", {method: 4e-3})
    for name, value in (("MEASURES", 1), ("HELD_OUT_BATCHES", 1), ("WARMUP_STEPS", 4)):
        monkeypatch.setattr(trainer, name, value)
    trained_on = {"tokens": store.tokens(), "passes": 8, "work": tmp_path / "work"}
    speculator = train_speculator(bundle, method, threads=1, **trained_on).speculator
    assert len(store.names()) == 2  # no text was written

    with Engine(bundle, threads=1) as engine:
        found = engine.generate(PROMPT, method=method, draft_length=1, **asked)
    assert found.token_ids == plain.token_ids

    cpu = torch.device("cpu")
    vocabulary = np.asarray(speculator.vocabulary, np.int64)
    parts = target_parts(bundle, read_target_ends(bundle), vocabulary, cpu, torch.float32)
    trained = train_module._method(method, bundle, parts, cpu)
    model: torch.nn.Module = trained.model
    with torch.no_grad():
        for index, norm in enumerate(getattr(model, "tap_norms", [])):
            norm.weight.copy_(torch.from_numpy(speculator.tensor("tap_norms")[index]))
        for name, tensor in trained.model.tensors().items():
            tensor.copy_(torch.from_numpy(speculator.tensor(name)))
    read = torch.from_numpy(features)[None, :, train_module._columns(bundle, trained.read)]
    tokens = torch.tensor(text)[None]
    zeros = torch.zeros_like(tokens)
    recorded = Recorded(monkeypatch)
    trained.losses(Batch(tokens, read, torch.arange(len(text) - 1)[None], zeros, zeros == 0))
    guesses = vocabulary[recorded.logits[0].argmax(-1)]

    place, accepted, rounds = len(prompt) + 1, 0, 0
    while place < len(text):
        right = place + 1 < len(text) and guesses[place - AHEAD[method]] == text[place]
        place += 1 + right
        accepted, rounds = accepted + right, rounds + 1
    assert accepted > len(plain.token_ids) // 4
    # Heads compute in 8 bits, so a guess now and then is another one.
    assert found.speculation.accepted == pytest.approx(accepted, abs=5)
    assert found.speculation.rounds == pytest.approx(rounds, abs=5)


def features_of(bundle: Bundle, text: list[int]) -> np.ndarray:
    session = session_opener(bundle, 1)(1, WidthRule())
    parts = []
    for start in range(0, len(text), 100):
        session.run(text[start : start + 100], rows=1)
        parts.append(session.features.copy())
    return np.concatenate(parts)
