"""The command with the default model, as a process: what is promised to whoever parses its output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..conftest import Run
from .test_generate import KEYS, TOP_KEYS

pytestmark = pytest.mark.weights

PROMPTS = [
    "Say the same sentence three times.",
    "Write a Python function that adds two numbers.",
    "日本の首都はどこですか。",
    "List the days of the week, then list them again.",
]


@pytest.fixture
def answer(run: Run, smollm2: str) -> Any:
    def call(method: str, prompt: str, *arguments: str) -> dict[str, Any]:
        done = run("generate", "--model", smollm2, "--method", method, "--json", *arguments, prompt)
        assert done.returncode == 0, done.stderr
        value: dict[str, Any] = json.loads(done.stdout)
        return value

    return call


@pytest.mark.parametrize("prompt", PROMPTS)
def test_speculation_changes_nothing_and_the_contract_holds(answer: Any, prompt: str) -> None:
    plain, fast = (answer(method, prompt, "--max-tokens", "32") for method in ("none", "ngram"))
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["text"] == plain["text"]
    assert fast["exactness"] == "bitwise"
    for value, method in ((plain, "none"), (fast, "ngram")):
        assert set(value) == TOP_KEYS
        for key, inner in KEYS.items():
            assert set(value[key]) == inner
        counts, usage = value["speculation"], value["usage"]
        assert value["method"] == method
        assert counts["accepted"] <= counts["evaluated"] <= counts["proposed"]
        assert usage["completion_tokens"] == len(value["token_ids"])
        assert value["finish_reason"] in ("stop", "length")


def test_a_seed_decides_the_text(answer: Any) -> None:
    arguments = ("--max-tokens", "32", "--temperature", "0.8", "--top-p", "0.95", "--seed", "11")
    plain, fast = (answer(method, PROMPTS[0], *arguments) for method in ("none", "ngram"))
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["seed"] == 11


def test_exit_codes(run: Run, smollm2: str) -> None:
    for arguments, code in [
        (["generate", "--model", "no-such-model", "--json", "x"], 1),
        (["generate", "--model", smollm2, "--temperature", "-1", "x"], 2),
        (["generate", "--model", smollm2, "--max-tokens", "0", "--json", "x"], 0),
        (["models", "list", "--json"], 0),
    ]:
        done = run(*arguments)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr


def test_a_conversation(run: Run, smollm2: str) -> None:
    done = run("chat", "--model", smollm2, "--max-tokens", "24", "--json", input="My name is Ada.\nWhat is my name?\n")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert second["usage"]["cached_tokens"] > first["usage"]["prompt_tokens"]


def test_the_files_are_what_they_were(run: Run, smollm2: str) -> None:
    done = run("models", "verify", smollm2)
    assert (done.returncode, done.stdout) == (0, "smollm2-135m  ok\n")
