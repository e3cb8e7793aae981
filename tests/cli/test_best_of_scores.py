"""`specrun best-of` with the scores that come from outside the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main

from ..tiny_rewards import chat_ids, handmade_reward, reward_table


def best_of(score: str, *arguments: str) -> Result:
    options = ["--model", "tiny", "--seed", "5", "--n", "4", "--max-tokens", "8", "--score", score]
    return CliRunner().invoke(main, ["best-of", *options, *arguments, "Hello"])


def candidates(score: str) -> list[dict[str, Any]]:
    result = best_of(score, "--json", "--all")
    assert result.exit_code == 0, result.stderr
    body: dict[str, Any] = json.loads(result.stdout)
    found: list[dict[str, Any]] = body["candidates"]
    assert body["index"] == found[0]["index"]
    assert [row["score"] for row in found] == sorted((row["score"] for row in found), reverse=True)
    return found


def test_a_command_chooses_the_longest(tiny: str) -> None:
    code = (
        "import json, sys; given = json.load(sys.stdin); assert given['prompt'] == 'Hello'; print(len(given['text']))"
    )
    for row in candidates(f'command:{sys.executable} -c "{code}"'):
        assert row["score"] == len(row["text"])


def test_a_reward_model_chooses(tiny: str) -> None:
    table = reward_table()
    handmade_reward(table, context=512)
    for row in candidates("reward:judge"):
        expected = float(table[chat_ids("Hello", row["text"])].astype("float64").sum())
        assert row["score"] == pytest.approx(expected, abs=1e-3)


def test_votes(tiny: str) -> None:
    assert all(row["score"] > 0 for row in candidates("vote"))


def test_what_a_reward_model_cannot_read_is_told(tiny: str) -> None:
    table = reward_table()
    whole = {row["index"]: len(chat_ids("Hello", row["text"])) for row in candidates("logprob")}
    context = sorted(whole.values())[1]
    long = sum(length > context for length in whole.values())
    assert long
    handmade_reward(table, context=context)
    result = best_of("reward:judge", "--json")
    assert f"{long} of 4 candidates are longer than the {context} tokens that judge reads" in result.stderr
    assert whole[json.loads(result.stdout)["index"]] <= context


@pytest.mark.parametrize(
    ("score", "code", "message"),
    [
        ("best", 2, "Error: There is no score 'best': choose from logprob, certainty, vote"),
        ("tests:none.py", 2, "Error: The tests none.py cannot be read"),
        ("reward:tiny", 1, "it is no reward model"),
        ("reward:judge", 1, "Error: there is no model 'judge'"),
        ("command:false", 1, "Error: The score's command 'false' fails with exit code 1"),
    ],
)
def test_one_sentence_for_what_cannot_be(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: str, code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = best_of(score)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
