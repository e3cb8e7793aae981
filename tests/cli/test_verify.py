from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main
from specrun.runtime import verify as verify_module
from specrun.runtime.verify import VerifyCase

pytestmark = pytest.mark.usefixtures("tiny")


def verify(*arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["verify", "--model", "tiny", "--max-tokens", "20", "--draft-lengths", "1,4", *arguments]
    )


def test_the_table() -> None:
    result = verify()
    assert result.exit_code == 0, result.stderr
    header, *rows = [line.split() for line in result.stdout.splitlines()]
    assert header == ["method", "K", "batch", "sampling", "prompts", "tokens", "equal"]
    cases = []
    for sampling in ("greedy", "coupled"):
        cases += [[*case, "1", sampling] for case in itertools.product(("ngram", "lookahead"), ("1", "4", "adaptive"))]
        cases += [["none", "-", "3", sampling], *(["ngram", k, "3", sampling] for k in ("1", "4", "adaptive"))]
    assert [row[:4] for row in rows] == cases
    assert all(row[4] == "4" and row[6] == "yes" for row in rows)
    assert {row[5] for row in rows if row[3] == "greedy"} == {"80"}
    assert len({row[5] for row in rows if row[3] == "coupled"}) == 1
    assert "all 20 cases equal plain decoding (bitwise)" in result.stderr


def test_json_and_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["one", "two"]}, {"prompt": "three"}, {"messages": [{"role": "user", "content": "four"}]}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    value = json.loads(verify("--prompts", str(path), "--json").stdout)
    assert value["ok"] is True
    assert {case["prompts"] for case in value["cases"]} == {3}
    assert {case["draft_length"] for case in value["cases"]} == {1, 4, None}
    value = json.loads(verify("--prompts", str(path), "--limit", "2", "--json").stdout)
    assert {case["prompts"] for case in value["cases"]} == {2}


@pytest.mark.parametrize("as_json", [False, True])
def test_the_first_difference_ends_it(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    def cases(*arguments: Any, **options: Any) -> Any:
        yield VerifyCase("ngram", 1, "greedy", 4, 80, True, None)
        yield VerifyCase("ngram", 2, "greedy", 4, 30, False, "prompt 2: token 7 is 5 'a' in plain decoding")
        raise AssertionError("not reached")

    monkeypatch.setattr(verify_module, "verify", cases)
    result = verify(*(["--json"] if as_json else []))
    assert result.exit_code == 1
    assert "prompt 2: token 7" in result.stderr
    if as_json:
        value = json.loads(result.stdout)
        assert value["ok"] is False
        assert len(value["cases"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("--methods", "magic"),
        ("--methods", "draft"),
        ("--methods", "medusa,ngram"),
        ("--methods", "ngram+eagle"),
        ("--methods", ","),
        ("--draft-lengths", "0"),
        ("--draft-lengths", "x"),
        ("--limit", "0"),
        ("--lookahead", "3,3"),
        ("--lookahead", "7,5,7"),
        ("--lookahead", "0,3,3"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    result = verify(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")


@pytest.mark.parametrize(
    "methods",
    [
        "magic",
        "ngram+eagle+draft",
        "none,ngram:0",
        "ngram:x",
        "ngram:1:2",
        "none:4",
        ",",
        "lookahead:5/4",
        "lookahead:7/5/7",
        "ngram:3/3/3",
    ],
)
@pytest.mark.parametrize("command", ["verify", "bench"])
def test_methods_are_checked_before_the_model_is_looked_for(command: str, methods: str) -> None:
    result = CliRunner().invoke(main, [command, "--model", "no-such-model", "--methods", methods])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no-such-model" not in result.stderr


def test_a_file_that_holds_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n[1, 2]\n')
    result = verify("--prompts", str(path))
    assert result.exit_code == 2
    assert "line 2" in result.stderr


def test_check() -> None:
    result = CliRunner().invoke(main, ["check", "tiny", "tiny"])
    assert (result.exit_code, result.stdout) == (0, "tiny fits tiny\n")
    value = json.loads(CliRunner().invoke(main, ["check", "tiny", "tiny", "--json"]).stdout)
    assert value["fits"] is True
    assert set(value) == {"fits", "reasons", "facts"}


def test_check_of_a_draft_with_another_tokenizer(tiny_source: Path, tmp_path: Path) -> None:
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_source, other)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"Ġw290"', '"Ġv290"'), encoding="utf-8")
    assert CliRunner().invoke(main, ["export", str(other)]).exit_code == 0
    result = CliRunner().invoke(main, ["check", "tiny", "other"])
    assert (result.exit_code, result.stdout) == (1, "other does not fit tiny\n")
    assert "id 290" in result.stderr
    result = CliRunner().invoke(main, ["generate", "-m", "tiny", "--draft", "other", "x"])
    assert (result.exit_code, result.stdout) == (1, "")
