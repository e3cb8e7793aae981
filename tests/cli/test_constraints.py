"""`specrun generate` with --json-schema, --regex, --grammar and --prediction."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}


def generate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["generate", "--model", "tiny", "--max-tokens", "60", *arguments, "Hello"])


@pytest.mark.usefixtures("tiny")
class TestConstraints:
    def test_regex(self) -> None:
        for method in ("none", "ngram"):
            done = generate("--regex", "(yes|no), [a-f]{3}", "--method", method)
            assert done.exit_code == 0, done.stderr
            assert re.fullmatch("(yes|no), [a-f]{3}", done.stdout.rstrip("\n"))

    @pytest.mark.parametrize("place", ["text", "file"])
    def test_json_schema(self, place: str, tmp_path: Path) -> None:
        closed = json.dumps({**SCHEMA, "additionalProperties": False})
        path = tmp_path / "person schema.json"
        path.write_text(closed, encoding="utf-8")
        done = generate("--json-schema", closed if place == "text" else str(path))
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        assert list(found) == ["n"]
        assert found["n"] <= 9

    def test_grammar(self, tmp_path: Path) -> None:
        path = tmp_path / "list.lark"
        path.write_text('start: "<" /[a-c]{2}/ ">"', encoding="utf-8")
        done = generate("--grammar", str(path))
        assert re.fullmatch("<[abc]{2}>", done.stdout.rstrip("\n"))

    def test_prediction(self, tmp_path: Path) -> None:
        """A right prediction is drafted from; a wrong one changes nothing."""
        plain = generate("--method", "none").stdout
        path = tmp_path / "predicted.txt"
        for text in (plain, "something else"):
            path.write_text(text, encoding="utf-8", newline="")
            done = generate("--prediction", str(path), "--draft-length", "4", "--json")
            body = json.loads(done.stdout)
            assert body["text"] == plain.removesuffix("\n")
            assert (body["speculation"]["accepted"] > 5) == (text == plain)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--regex", "[a-z"), "unclosed character class"),
            (("--json-schema", "{"), "is not JSON"),
            (("--json-schema", '{"type": "nope"}'), "Invalid type: nope"),
            (("--json-schema", "no such file.json"), "cannot be read"),
            (("--grammar", "no such file.lark"), "does not exist"),
            (("--regex", "a", "--json-schema", "{}"), "exclude each other"),
        ],
    )
    def test_refusals(self, arguments: tuple[str, ...], message: str) -> None:
        done = generate(*arguments)
        assert done.exit_code == 2
        assert message in done.stderr
        assert done.stdout == ""
        assert "Traceback" not in done.stderr

    def test_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        path = tmp_path / "schema.json"
        path.write_bytes(b"\xff\xfe\x00")
        done = generate("--json-schema", str(path))
        assert done.exit_code == 2
        assert "UTF-8" in done.stderr
