"""Reward models in the cache, seen from the commands."""

from __future__ import annotations

import json
from pathlib import Path

from ..conftest import Run
from ..tiny_rewards import handmade_reward, reward_table


def test_a_reward_model_beside_the_others(run: Run, tiny: str, isolated_home: Path) -> None:
    """list, path, verify and rm cope with it; commands that generate say in one sentence what it is."""
    judge = handmade_reward(reward_table())
    listed = run("models", "list")
    assert listed.stdout.splitlines()[0] == "judge  handmade  reward model  0 MB"
    rows = json.loads(run("models", "list", "--json").stdout)["models"]
    assert [(row["name"], row.get("kind"), row["problem"]) for row in rows] == [
        ("judge", "reward", None),
        ("tiny", None, None),
    ]
    assert rows[0]["label"] == "LABEL_0"
    assert run("models", "path", "judge").stdout == f"{judge.path}\n"
    assert run("models", "verify").stdout.splitlines() == ["judge  ok", "tiny  ok"]
    assert run("models", "verify", "judge").stdout == "judge  ok\n"
    for arguments in (
        ["generate", "--model", "judge", "hello"],
        ["generate", "--draft", "judge", "--model", tiny, "x"],
    ):
        refused = run(*arguments)
        assert refused.returncode == 1
        assert refused.stdout == ""
        assert refused.stderr.count("\n") == 1
        assert "judge: it is a reward model, which rates texts and writes none: name a language" in refused.stderr
    (judge.path / "model.onnx").write_bytes(b"x" * (judge.path / "model.onnx").stat().st_size)
    damaged = run("models", "verify", "judge", "--json")
    assert damaged.returncode == 1
    assert json.loads(damaged.stdout)["models"][0]["problems"][0]["file"] == "model.onnx"
    assert run("models", "rm", "judge", "--yes").returncode == 0
    assert not judge.path.exists()
