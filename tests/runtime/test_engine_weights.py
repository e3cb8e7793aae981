"""The engine on real weights: SmolLM2-135M in 8 bits and in fp32, exported once a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrun.export.bundle import export_bundle
from specrun.runtime import Engine

from ..weights import smollm2_gguf
from .checks import read, same_output, text_of

pytestmark = pytest.mark.weights

PROMPTS = (
    "List the days of the week, then list them again in the same order.",
    "Write a Python function that adds two numbers.",
    "日本語で「こんにちは」と書いて、絵文字 🌍 をつけてください。",
    "Repeat exactly: one two three four five six seven one two three four five six seven",
)


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    """An engine over the bundle of a precision, drafted by the int8 bundle."""
    home = tmp_path_factory.mktemp("smollm2")
    source = str(smollm2_gguf())
    engines: dict[str, Engine] = {}

    def get(precision: str) -> Engine:
        if precision not in engines:
            for name in {precision, "int8"}:
                if not Path(home, name).exists():
                    export_bundle(source, name=name, precision=name, output=home / name)
            engines[precision] = Engine.load(home / precision, draft=home / "int8")
        engines[precision].reset()
        return engines[precision]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRUN_HOME", str(home / "cache"))
        yield get
        for engine in engines.values():
            engine.close()


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_methods_equal_plain(engine_of: Callable[[str], Engine], precision: str) -> None:
    """4 prompts, 32 tokens, all that needs no head, several K, greedy and sampled: equal to plain; the pieces join."""
    engine = engine_of(precision)
    assert engine.calibration.exactness == "bitwise"
    accepted = 0
    for sampling in ({}, {"temperature": 0.8, "seed": 1}):
        for prompt in PROMPTS:
            _, plain = read(engine.stream(prompt, method="none", max_tokens=32, **sampling))
            for method, draft_length in (
                ("ngram", 1),
                ("ngram", 3),
                ("ngram", 8),
                ("ngram", None),
                ("lookahead", 2),
                ("lookahead", None),
                ("draft", 2),
                ("draft", 5),
            ):
                _, result = read(
                    engine.stream(prompt, method=method, draft_length=draft_length, max_tokens=32, **sampling)
                )
                same_output(result, plain)
                accepted += result.speculation.accepted
            assert plain.text == engine.tokenizer.decode(plain.token_ids)
    assert accepted > 200


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("head", ["eagle", "medusa"])
def test_shipped_heads_equal_plain(engine_of: Callable[[str], Engine], precision: str, head: str) -> None:
    """Heads alone and in turn with n-grams, chains and trees, greedy and sampled: equal to plain, and they guess."""
    engine = engine_of(precision)
    accepted = 0
    for sampling in ({}, {"temperature": 0.8, "seed": 1}):
        for prompt in PROMPTS:
            _, plain = read(engine.stream(prompt, method="none", max_tokens=32, **sampling))
            for method, draft_length in (
                (head, 1),
                (head, 4),
                (head, None),
                (f"{head}+ngram", 4),
                (f"{head}+ngram", None),
            ):
                _, result = read(
                    engine.stream(prompt, method=method, draft_length=draft_length, max_tokens=32, **sampling)
                )
                same_output(result, plain)
                accepted += result.speculation.accepted
    assert accepted > 150


def test_chat_reuse_equals_a_fresh_run(engine_of: Callable[[str], Engine]) -> None:
    engine = engine_of("int8")
    chat = engine.chat("You are brief.")
    results = []
    for text in ("Name three colours.", "And three fruits?", "Which of them are red?"):
        _, result = read(chat.send(text, method="ngram", max_tokens=24))
        results.append(result)
    assert all(result.usage.cached_tokens > 30 for result in results[1:])
    messages = list(chat.messages)
    for turn, result in enumerate(results):
        engine.reset()
        fresh = engine.generate(messages[: 2 + 2 * turn], method="none", max_tokens=24)
        assert fresh.usage.cached_tokens == 0
        assert fresh.token_ids == result.token_ids


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_prompt_lengths_around_the_attentions_blocks(engine_of: Callable[[str], Engine], precision: str) -> None:
    """A prefill of 129 tokens leaves the attention a lone row in its second block: equal bits all the same."""
    engine = engine_of(precision)
    tokens = engine.encode(text_of(260), raw=True)
    expected = engine.logits(tokens)
    for cached in (1, 3, 130, 131, 132, 256):
        engine.reset()
        engine.logits(tokens[:cached])
        assert (engine.logits(tokens) == expected).all(), cached
