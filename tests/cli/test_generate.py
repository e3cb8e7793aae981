from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from specrun.cli import opening
from specrun.cli.main import main
from specrun.cli.output import end_text, write_text
from specrun.models_cache.layout import Bundle, find_bundle
from specrun.runtime import Engine

from ..conftest import INTERRUPTIBLE

KEYS: dict[str, set[str]] = {
    "usage": {"prompt_tokens", "completion_tokens", "cached_tokens"},
    "timings": {"load_s", "prefill_s", "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s"},
    "speculation": {
        "rounds",
        "proposed",
        "evaluated",
        "accepted",
        "corrections",
        "bonuses",
        "discarded",
        "mean_accepted_tokens",
        "acceptance_rate",
        "accepted_histogram",
        "draft_s",
        "verify_s",
    },
    "memory": {"weights_bytes", "kv_target_bytes", "kv_draft_bytes"},
}
TOP_KEYS = {"text", "token_ids", "finish_reason", "model", "method", "exactness", "seed", *KEYS}


def generate(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["generate", "--model", "tiny", "--max-tokens", "30", *arguments], input=stdin)


def body(*arguments: str) -> dict[str, Any]:
    result = generate("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def expected(prompt: str = "Hello", **options: Any) -> str:
    with Engine.load("tiny") as engine:
        return engine.generate(prompt, **{"max_tokens": 30, **options}).text


@pytest.mark.usefixtures("tiny")
class TestText:
    def test_stdout_is_the_text_and_nothing_else(self) -> None:
        result = generate("Hello")
        assert result.exit_code == 0
        assert result.stdout == expected() + "\n"
        assert result.stderr == ""

    @pytest.mark.parametrize(("text", "ending"), [("a", "\n"), ("a\n", ""), ("", "")])
    def test_a_text_ends_with_one_newline(self, capsys: pytest.CaptureFixture[str], text: str, ending: str) -> None:
        end_text(text)
        assert capsys.readouterr().out == ending

    @pytest.mark.parametrize("method", ["none", "ngram", "lookahead"])
    @pytest.mark.parametrize("extra", [(), ("--temperature", "1", "--seed", "7")])
    def test_methods_agree(self, method: str, extra: tuple[str, ...]) -> None:
        assert generate("Hello", "--method", method, *extra).stdout == generate("Hello", *extra).stdout

    @pytest.mark.parametrize("text", ["Hello", "Hello\n", "Hello\r\n"])
    def test_stdin(self, text: str) -> None:
        assert generate("-", stdin=text).stdout == expected() + "\n"
        assert generate(stdin=text).stdout == expected() + "\n"

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "prompt with ünïcode.txt"
        path.write_bytes("\ufeffHello\n".encode())
        assert generate("--file", str(path)).stdout == expected() + "\n"

    def test_raw_and_system(self) -> None:
        assert generate("--raw", "Hello").stdout == expected(raw=True) + "\n"
        assert generate("--system", "Be terse.", "Hello").stdout == expected(system="Be terse.") + "\n"
        assert generate("--raw", "--system", "x", "Hello").exit_code == 2

    def test_escape_sequences_of_the_text_stay(self) -> None:
        @click.command()
        def show() -> None:
            write_text("\x1b[1mbold\x1b[0m")

        assert CliRunner().invoke(show).stdout == "\x1b[1mbold\x1b[0m"

    def test_stop(self) -> None:
        text = expected()
        stop = text[8:10]
        result = body("--stop", stop, "--stop", "not there", "Hello")
        assert result["text"] == text[: text.index(stop)]
        assert result["finish_reason"] == "stop"

    def test_stats_go_to_stderr(self) -> None:
        result = generate("--stats", "--temperature", "1", "--seed", "3", "Hello")
        assert len(result.stderr.splitlines()) == 1
        for part in (
            "30 tokens (ended at --max-tokens), ",
            "tokens/s",
            "MAT",
            "acceptance",
            "method ngram",
            "bit-equal",
            "MB",
            "seed 3",
        ):
            assert part in result.stderr
        assert (
            "exact in distribution" in generate("--stats", "--temperature", "1", "--sampling", "rejection", "x").stderr
        )

    def test_no_tokens(self) -> None:
        assert generate("--max-tokens", "0", "Hello").stdout == ""
        assert body("--max-tokens", "0", "Hello")["token_ids"] == []

    def test_colour_needs_a_terminal(self) -> None:
        assert generate("--color", "Hello").stdout == expected() + "\n"

    def test_ngrams_are_kept(self, tmp_path: Path) -> None:
        path = tmp_path / "table.npz"
        first = body("--ngrams", str(path), "Hello")
        second = body("--ngrams", str(path), "Hello")
        assert second["text"] == first["text"]
        assert second["speculation"]["accepted"] > first["speculation"]["accepted"]

    def test_ngrams_in_no_folder(self, tmp_path: Path) -> None:
        result = generate("--json", "--ngrams", str(tmp_path / "no such folder" / "table"), "Hello")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "no such folder: make it first" in result.stderr

    def test_an_answer_is_not_lost_where_ngrams_cannot_be_kept(self, tmp_path: Path) -> None:
        result = generate("--json", "--ngrams", str(tmp_path / ("x" * 250)), "Hello")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["text"] == expected()
        assert "choose another folder" in result.stderr

    def test_a_damaged_ngrams_file(self, tmp_path: Path) -> None:
        path = tmp_path / "table.npz"
        path.write_bytes(b"PK no")
        result = generate("--ngrams", str(path), "Hello")
        assert result.exit_code == 1
        assert "name another file" in result.stderr


@pytest.mark.usefixtures("tiny")
class TestJson:
    def test_keys(self) -> None:
        value = body("Hello")
        assert set(value) == TOP_KEYS
        for key, inner in KEYS.items():
            assert set(value[key]) == inner
        assert value["text"] == expected()
        assert value["model"] == "tiny"
        assert value["finish_reason"] == "length"
        assert value["usage"]["completion_tokens"] == len(value["token_ids"]) == 30
        counts = value["speculation"]
        assert counts["accepted"] <= counts["evaluated"] <= counts["proposed"]
        assert (
            len(value["token_ids"])
            == 1 + counts["accepted"] + counts["corrections"] + counts["bonuses"] - counts["discarded"]
        )

    def test_tokens(self) -> None:
        value = body("--tokens", "Hello")
        assert set(value) == TOP_KEYS | {"tokens"}
        assert [token["id"] for token in value["tokens"]] == value["token_ids"]
        assert value["tokens"][0]["source"] == "prefill"
        assert all(set(token) == {"id", "text", "source"} for token in value["tokens"])

    def test_logprobs(self) -> None:
        value = body("--logprobs", "2", "Hello")
        for token in value["tokens"]:
            assert token["logprob"] <= 0
            assert len(token["top_logprobs"]) == 2

    def test_samples(self) -> None:
        value = body("--n", "3", "--temperature", "1", "--seed", "5", "Hello")
        texts = [sample["text"] for sample in value["samples"]]
        assert len(set(texts)) == 3
        assert texts == [expected(temperature=1.0, seed=5, sample_index=index) for index in range(3)]

    def test_samples_without_a_seed_share_one(self) -> None:
        seeds = {sample["seed"] for sample in body("--n", "2", "--temperature", "1", "Hello")["samples"]}
        assert len(seeds) == 1

    def test_stats_say_what_loses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        arguments = ("--stats", "--method", "lookahead", "--lookahead", "2,3,2", "Hello")
        for ratio, loses in ((0.81, True), (0.97, False), (1.4, False), (None, False)):
            monkeypatch.setattr("specrun.runtime.worth.speed_ratio", lambda *_, ratio=ratio: ratio)
            line = generate(*arguments).stderr.splitlines()[-1]
            assert "method lookahead" in line
            assert ("slower here than plain decoding (about 0.81 times its speed)" in line) == loses

    def test_samples_as_text(self) -> None:
        texts = [expected(temperature=1.0, seed=5, sample_index=index) + "\n" for index in range(2)]
        result = generate("--n", "2", "--temperature", "1", "--seed", "5", "Hello")
        assert result.stdout == "".join(texts)
        assert result.stderr == "--- sample 1 of 2 ---\n--- sample 2 of 2 ---\n"


@pytest.mark.usefixtures("tiny")
class TestRefusals:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--temperature", "-1", "x"),
            ("--top-p", "0", "x"),
            ("--method", "magic", "x"),
            ("--method", "draft", "x"),
            ("--lookahead", "3,3,3", "x"),
            ("--method", "lookahead", "--lookahead", "3,3", "x"),
            ("--method", "lookahead", "--lookahead", "a,b,c", "x"),
            ("--max-tokens", "-1", "x"),
            ("--logprobs", "2", "x"),
            ("--tokens", "x"),
            ("--n", "2", "x"),
            ("--n", "0", "x"),
            ("--min-tokens", "40", "x"),
            ("--threads", "0", "x"),
            ("--file", "/no/such/file"),
            ("--raw", ""),
        ],
    )
    def test_wrong_usage(self, arguments: tuple[str, ...]) -> None:
        result = generate(*arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Error: " in result.stderr

    def test_prompt_and_file(self, tmp_path: Path) -> None:
        (tmp_path / "p").write_text("x")
        assert generate("--file", str(tmp_path / "p"), "x").exit_code == 2

    def test_bytes_that_are_no_text(self) -> None:
        result = generate("-", stdin=b"ab\xff")
        assert result.exit_code == 2
        assert "at byte 2" in result.stderr

    @pytest.mark.parametrize(("arguments", "stdin"), [(("-",), ""), ((), "\n"), (("",), None), ((" ",), None)])
    def test_an_empty_prompt(self, arguments: tuple[str, ...], stdin: str | None) -> None:
        result = generate(*arguments, stdin=stdin)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("Error: The prompt is empty")
        assert len(result.stderr.splitlines()) == 1

    def test_an_unknown_model(self) -> None:
        result = CliRunner().invoke(main, ["generate", "--model", "no-such-model", "--json", "x"])
        assert result.exit_code == 1
        assert result.stdout == ""
        assert "no-such-model" in result.stderr

    def test_options_are_checked_before_the_model_is_looked_for(self) -> None:
        arguments = ["generate", "--model", "no-such-model", "--temperature", "-1", "x"]
        assert CliRunner().invoke(main, arguments).exit_code == 2

    def test_a_prompt_that_does_not_fit(self) -> None:
        result = generate("--context", "32", "--raw", "x" * 100)
        assert result.exit_code == 1
        assert "100 tokens" in result.stderr
        assert "32" in result.stderr

    def test_a_device_that_is_not_there(self) -> None:
        assert generate("--device", "quantum", "x").exit_code == 2
        alone = generate("--draft-device", "cpu", "x")
        assert alone.exit_code == 2
        assert "Only a draft model has a device of its own" in alone.stderr


class TestDefaultModel:
    @pytest.fixture
    def pulled(self, monkeypatch: pytest.MonkeyPatch, tiny: str) -> list[str]:
        names: list[str] = []

        def export_bundle(name: str, **options: Any) -> Bundle:
            names.append(name)
            options["progress"]("downloading it", 1, 2)
            return find_bundle(tiny)

        monkeypatch.setattr("specrun.export.bundle.export_bundle", export_bundle)
        return names

    def test_it_is_pulled_where_nobody_can_be_asked(self, pulled: list[str]) -> None:
        result = CliRunner().invoke(main, ["generate", "--max-tokens", "5", "Hello"])
        assert result.exit_code == 0
        assert pulled == ["smollm2-135m"]
        assert result.stdout == expected(max_tokens=5) + "\n"
        assert result.stderr == "smollm2-135m is not here yet: pulling it (98 MB)\ndownloading it\n"

    @pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 0), ("n\n", 1)])
    def test_on_a_terminal_it_is_offered(
        self, pulled: list[str], monkeypatch: pytest.MonkeyPatch, answer: str, code: int
    ) -> None:
        monkeypatch.setattr(opening, "is_terminal", lambda stream: True)
        result = CliRunner().invoke(main, ["generate", "--max-tokens", "5", "Hello"], input=answer)
        assert result.exit_code == code
        assert len(pulled) == (code == 0)
        assert "smollm2-135m is not here yet: pull it now? (98 MB)" in result.stderr

    def test_yes_does_not_ask(self, pulled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(opening, "is_terminal", lambda stream: True)
        assert CliRunner().invoke(main, ["generate", "--yes", "--max-tokens", "5", "Hello"]).exit_code == 0
        assert pulled == ["smollm2-135m"]

    def test_no_other_model_is_pulled(self, pulled: list[str]) -> None:
        assert CliRunner().invoke(main, ["generate", "--yes", "--model", "org/other", "Hello"]).exit_code == 1
        assert pulled == []


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_what_there_is(tiny: str, as_json: bool) -> None:
    arguments = ["generate", "--model", tiny, "--max-tokens", "15000", "--stats", "--raw", "Hello there"]
    code = "from specrun.cli.main import main; main()"
    if as_json:  # nothing on stdout tells when it runs, so the text's start is watched for from inside
        arguments.insert(1, "--json")
        code = (
            "import specrun.runtime.stream as s, sys\nafter = s.Stream.__next__\n"
            "def tell(self):\n    piece = after(self)\n    print('.', file=sys.stderr, flush=True)\n    return piece\n"
            "s.Stream.__next__ = tell\n" + code
        )
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = (process.stderr if as_json else process.stdout).read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"tokens/s" in err
    if as_json:
        value = json.loads(out)
        assert value["finish_reason"] == "cancelled"
        assert 0 < len(value["token_ids"]) < 15000
    else:
        assert (first + out).endswith(b"\n")
