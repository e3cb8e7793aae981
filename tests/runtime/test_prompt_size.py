"""Prompts of many megabytes: refused at once, in little memory, and only where they could not fit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from specrun.models_cache.errors import ContextLengthError
from specrun.runtime import BatchEngine, BatchRequest, Result, prompt_size

from .checks import text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT

MEGABYTES = """
import resource, sys
from specrun.models_cache.errors import ContextLengthError
from specrun.runtime import Engine
engine = Engine.load(sys.argv[1], threads=1)
engine.generate("a", max_tokens=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = "1234567 " * 2_000_000
for prompt in (text, [{"role": "user", "content": text}], [{"role": "system", "content": text}]):
    for options in ({}, {"raw": True}) if isinstance(prompt, str) else ({},):
        try:
            engine.generate(prompt, max_tokens=1, **options)
        except ContextLengthError as error:
            print(error)
engine.generate("a", method="ngram", max_tokens=2, prediction=text)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_many_megabytes(models: TinyModels) -> None:
    """16 MB of digits would take 8 GB as tokens: they are refused, and a prediction of them is cut, in a fraction."""
    path = str(models.bundle("tgt").path)
    done = subprocess.run([sys.executable, "-c", MEGABYTES, path], capture_output=True, text=True, check=True)
    *said, grown = done.stdout.splitlines()
    assert (
        said
        == ["The prompt has 16000000 characters, more than the 512 tokens of the context can hold: shorten it."] * 4
    )
    assert int(grown) < 200


def test_a_long_prompt_in_a_batch(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_size, "AT_ONCE", 100)
    engine = models.engine("tgt-64")
    options: dict[str, Any] = {"raw": True, "max_tokens": 4}
    prompts = ("a", "x" * 2000, "b")
    requests = [BatchRequest(index, prompt, options) for index, prompt in enumerate(prompts)]
    found = {answer.index: answer.result for answer in BatchEngine(engine, batch_size=2).run(requests)}
    assert isinstance(found[1], ContextLengthError)
    assert isinstance(found[0], Result)
    assert isinstance(found[2], Result)


def test_what_may_fit_is_made_tokens(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of tokens is told wherever it can be; nothing that fits is refused."""
    monkeypatch.setattr(prompt_size, "AT_ONCE", 0)
    engine = models.engine("tgt-64")
    assert engine.generate(text_of(63), raw=True, max_tokens=1).usage.prompt_tokens == 63
    with pytest.raises(ContextLengthError, match="The prompt has 64 tokens and the context holds 64"):
        engine.generate(text_of(64), raw=True, max_tokens=1)
    assert engine.generate(PROMPT, raw=True, max_tokens=1).usage.completion_tokens == 1
