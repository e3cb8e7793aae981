"""`specrun tune`: the table, the record, and what it says before anything was measured."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from specrun.cli.main import main


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["tune", "--model", "tiny", "--threads", "1", *arguments])


def test_before_anything_was_measured(tiny: str) -> None:
    result = tune("--show")
    assert result.exit_code == 0, result.stderr
    assert "auto: ngram (nothing was measured yet: run `specrun tune`)" in result.stdout


def test_measured_then_shown(tiny: str, isolated_home: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"prompt": f"say {n}", "category": "c"}) for n in range(3)), encoding="utf-8"
    )
    result = tune("--prompts", str(prompts), "--per-category", "2", "--max-tokens", "12", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["threads"], answer["tuned"], answer["prompts"]) == ("tiny", 1, True, 2)
    assert set(answer["methods"]) == {"none", "ngram", "lookahead"}
    assert answer["auto"] == "ngram"
    assert len(list((isolated_home / "tuning").iterdir())) == 1
    shown = tune("--show", "--json")
    assert json.loads(shown.stdout)["methods"] == answer["methods"]
    table = tune("--show").stdout.splitlines()
    assert table[0].split()[:3] == ["positions", "1", "2"]
    rows = table[table.index("") + 2 : -2]
    assert {line.split()[0] for line in rows} == {"none", "ngram", "lookahead"}
    assert table[-1] == "auto: ngram"


def test_a_method_that_the_model_has_nothing_for(tiny: str) -> None:
    result = tune("--methods", "eagle+ngram", "--max-tokens", "8")
    assert result.exit_code == 2
    assert "needs a speculator, and tiny has none" in result.stderr
