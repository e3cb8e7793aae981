from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main
from specrun.models_cache.errors import SpecrunError
from specrun.runtime import Engine
from specrun.runtime.chooser import Chooser

from ..conftest import INTERRUPTIBLE

BAD = [
    b"[1,2]",
    b"null",
    b'"x"',
    b"{",
    b'{"prompt": "a"',
    b"\x00\x00\x00",
    b"{}",
    b'{"prompt": ""}',
    b'{"prompt": 5}',
    b'{"prompt": ["a", "b"]}',
    b'{"prompt": "a", "messages": []}',
    b'{"messages": [{"content": "no role"}]}',
    b'{"prompt": "a", "temprature": 1}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": "hot"}',
    b'{"prompt": "a", "top_p": 0}',
    b'{"prompt": "a", "max_tokens": 1e400}',
    b'{"prompt": "a", "max_tokens": true}',
    b'{"prompt": "a", "seed": -1}',
    b'{"prompt": "a", "n": "3"}',
    b'{"prompt": "a\xff\xfe"}',
    b'{"prompt": "\\udc00"}',
    b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"prompt": "' + b"long " * 10_000 + b'"}',
    b'{"id": "x", "custom_id": [], "prompt": "a"}',
]


def batch(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    command = ["batch", *map(str, arguments), "--model", "tiny", "--max-tokens", "8"]
    return CliRunner().invoke(main, command, input=stdin)


def out_of_order(*arguments: Any) -> int:
    raise SpecrunError("This machine is out of order.")


def records(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", *({"id": str(n), "prompt": f"Hello {n}"} for n in range(5)))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.usefixtures("tiny")
class TestAnswers:
    def test_the_body_is_the_json_of_generate(self, source: Path, target: Path) -> None:
        result = batch(source, target)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == ""
        assert result.stderr.startswith("5 lines: 5 right, 0 failed, 40 tokens in ")
        found = records(target.read_bytes())
        with Engine.load("tiny") as engine:
            for number, record in enumerate(found):
                wanted = engine.generate(f"Hello {number}", max_tokens=8)
                body = record["response"]["body"]
                assert (record["id"], record["custom_id"]) == (f"line-{number + 1}", str(number))
                assert set(body) == set(wanted.to_json())
                assert body["text"] == wanted.text
                assert body["token_ids"] == list(wanted.token_ids)
                assert body["finish_reason"] == wanted.finish_reason
                assert body["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens

    def test_lines_may_differ_in_everything(self, tmp_path: Path, target: Path) -> None:
        messages = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
        source = write(
            tmp_path / "in.jsonl",
            {"prompt": "Hi", "max_tokens": 3, "temperature": 1, "seed": 5},
            {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages}},
            {"custom_id": "r", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Once upon"}},
            {"prompt": "Hi", "speculation_method": "none", "logprobs": 1},
            {"prompt": "Hi", "top_k": 5, "temperature": 0.7, "model": "tiny"},
        )
        assert batch(source, target, "--method", "ngram").exit_code == 0
        bodies = [record["response"]["body"] for record in records(target.read_bytes())]
        with Engine.load("tiny") as engine:
            wanted = [
                engine.generate("Hi", max_tokens=3, temperature=1, seed=5),
                engine.generate(messages, max_tokens=8),
                engine.generate("Once upon", max_tokens=8, raw=True),
                engine.generate("Hi", max_tokens=8, logprobs=1),
                engine.generate("Hi", max_tokens=8, top_k=5, temperature=0.7, seed=bodies[4]["seed"]),
            ]
        assert [body["text"] for body in bodies] == [result.text for result in wanted]
        assert [body["method"] for body in bodies] == ["ngram", "ngram", "ngram", "none", "ngram"]
        assert len(bodies[3]["tokens"]) == 8
        assert "logprob" in bodies[3]["tokens"][0]
        assert "tokens" not in bodies[0]

    def test_another_model_is_another_answer(self, tmp_path: Path, target: Path) -> None:
        source = write(tmp_path / "in.jsonl", {"prompt": "Hi", "model": "gpt-4o"})
        assert batch(source, target).exit_code == 1
        assert "this job runs 'tiny'" in records(target.read_bytes())[0]["error"]["message"]
        assert batch(source, tmp_path / "other.jsonl", "--ignore-model").exit_code == 0

    def test_an_over_long_prompt_fails_alone_with_both_numbers(self, tmp_path: Path, target: Path) -> None:
        source = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "x " * 300}, {"prompt": "b"})
        assert batch(source, target, "--context", "256").exit_code == 1
        first, long, last = records(target.read_bytes())
        assert first["error"] is None
        assert last["error"] is None
        assert long["error"]["code"] == "context_length_exceeded"
        with Engine.load("tiny") as engine:
            tokens = len(engine.encode("x " * 300))
        assert f"The prompt has {tokens} tokens and the context holds 256" in long["error"]["message"]

    def test_a_thousand_lines_of_which_fifty_are_bad(self, tmp_path: Path, target: Path) -> None:
        good = [json.dumps({"id": n, "prompt": f"p{n % 30}", "max_tokens": 2}).encode() for n in range(950)]
        lines = []
        for index in range(1000):
            lines.append(BAD[index // 20 % len(BAD)] if index % 20 == 7 else good.pop())
        source = tmp_path / "in.jsonl"
        source.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
        result = batch(source, target, "--json")
        assert result.exit_code == 1
        summary = json.loads(result.stdout)
        assert [summary[name] for name in ("lines", "done", "right", "failed")] == [1000, 1000, 950, 50]
        found = records(target.read_bytes())
        assert [record["id"] for record in found] == [f"line-{number}" for number in range(1, 1001)]
        bad = [number for number, record in enumerate(found) if record["error"] is not None]
        assert bad == [index for index in range(1000) if index % 20 == 7]
        assert all(record["error"]["message"].endswith((".", "!", "?")) for record in found if record["error"])
        assert all(record["response"]["body"]["text"] for record in found if not record["error"])

    @pytest.mark.parametrize("end", [b"\n", b"\r\n"])
    @pytest.mark.parametrize("last", [True, False])
    def test_line_ends_do_not_matter(self, tmp_path: Path, target: Path, end: bytes, last: bool) -> None:
        lines = [b'{"prompt": "a"}', '{"prompt": "b\u2028c"}'.encode(), b'{"prompt": "d"}']
        source = tmp_path / "in.jsonl"
        source.write_bytes(end.join(lines) + end * last)
        assert batch(source, target).exit_code == 0
        with Engine.load("tiny") as engine:
            wanted = [engine.generate(text, max_tokens=8).text for text in ("a", "b\u2028c", "d")]
        assert [record["response"]["body"]["text"] for record in records(target.read_bytes())] == wanted

    def test_a_blank_line_between_records(self, tmp_path: Path, target: Path) -> None:
        source = tmp_path / "in.jsonl"
        source.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
        assert batch(source, target).exit_code == 0
        assert [record["id"] for record in records(target.read_bytes())] == ["line-1", "line-3"]


@pytest.mark.usefixtures("tiny")
class TestStreams:
    def test_stdin_to_stdout(self, source: Path) -> None:
        result = batch("-", "-", stdin=source.read_bytes())
        assert result.exit_code == 0
        assert [record["custom_id"] for record in records(result.stdout_bytes)] == list("01234")
        assert result.stderr.endswith("; stdout\n")

    def test_stdin_to_a_file_is_a_job_of_its_bytes(self, source: Path, target: Path) -> None:
        assert batch("-", target, stdin=source.read_bytes()).exit_code == 0
        again = batch(source, target)
        assert again.exit_code == 0
        assert "all of them done before" in again.stderr

    def test_a_file_to_stdout(self, source: Path) -> None:
        assert len(records(batch(source, "-").stdout_bytes)) == 5

    def test_a_device_is_written_through(self, source: Path) -> None:
        assert batch(source, "/dev/null").exit_code == 0

    def test_a_full_device(self, source: Path) -> None:
        result = batch(source, "/dev/full")
        assert result.exit_code == 1
        assert result.stderr == "Error: /dev/full takes no more (No space left on device): mend that and start again.\n"


@pytest.mark.usefixtures("tiny")
def test_tables(tmp_path: Path) -> None:
    csv, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    source, target = tmp_path / "in.csv", tmp_path / "out.parquet"
    source.write_text("id,prompt,max_tokens\nx,Hello,3\ny,,\n")
    assert batch(source, target).exit_code == 1
    right, failed = parquet.read_table(target).to_pylist()
    with Engine.load("tiny") as engine:
        assert (right["custom_id"], right["text"]) == ("x", engine.generate("Hello", max_tokens=3).text)
    assert (failed["custom_id"], failed["error_code"]) == ("y", "no_prompt")
    again = batch(source, target)
    assert "all of them done before" in again.stderr
    back = tmp_path / "out.csv"
    assert batch(source, back).exit_code == 1
    parsing = csv.ParseOptions(newlines_in_values=True)
    assert csv.read_csv(back, parse_options=parsing).to_pylist()[0]["text"] == right["text"]
    (tmp_path / "none.csv").write_text("prompt\n")
    assert batch(tmp_path / "none.csv", tmp_path / "none.parquet").exit_code == 0
    assert parquet.read_table(tmp_path / "none.parquet").num_rows == 0


@pytest.mark.usefixtures("tiny")
class TestResuming:
    def test_progress_is_kept(self, source: Path, target: Path) -> None:
        assert batch(source, target).exit_code == 0
        whole = target.read_bytes()
        target.write_bytes(whole[: len(whole) // 2])
        result = batch(source, target)
        assert result.exit_code == 0
        assert result.stderr.startswith(
            "2 of 5 lines are done already: going on\n5 lines: 5 right, 0 failed, 2 of them"
        )
        assert [record["id"] for record in records(target.read_bytes())] == [f"line-{n}" for n in range(1, 6)]

    def test_failures_of_an_earlier_run_count(self, tmp_path: Path, target: Path) -> None:
        source = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": 1})
        assert batch(source, target).exit_code == 1
        again = batch(source, target)
        assert again.exit_code == 1
        assert again.stderr.startswith("2 lines: 1 right, 1 failed, all of them done before")

    def test_failed_lines_are_tried_again(self, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What failed by no fault of its own; what can only fail keeps its error, and exit code 1 says so."""
        source = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}, {"prompt": 1}, {"prompt": "c"})
        with monkeypatch.context() as patch:
            patch.setattr(Chooser, "first", out_of_order)
            assert batch(source, target).exit_code == 1
        assert [record["error"] is not None for record in records(target.read_bytes())] == [True] * 4
        again = batch(source, target, "--retry-failed")
        assert again.exit_code == 1
        assert again.stderr.startswith("3 lines that failed are tried again\n1 of 4 lines are done already: going on\n")
        found = records(target.read_bytes())
        assert [record["id"] for record in found] == [f"line-{number}" for number in range(1, 5)]
        assert [record["error"] is not None for record in found] == [False, False, True, False]
        assert "tried again" not in batch(source, target, "--retry-failed").stderr

    def test_another_job_is_refused(self, source: Path, target: Path) -> None:
        assert batch(source, target).exit_code == 0
        before = target.read_bytes()
        refused = batch(source, target, "--temperature", "1")
        assert refused.exit_code == 1
        assert refused.stderr == (
            f"Error: {target} was begun with other settings (temperature 0.0, now 1.0): "
            "name another output, or replace it with --no-resume.\n"
        )
        assert target.read_bytes() == before
        assert batch(source, target, "--temperature", "1", "--seed", "1", "--no-resume").exit_code == 0
        assert target.read_bytes() != before

    def test_ctrl_c(self, tmp_path: Path, target: Path) -> None:
        source = write(tmp_path / "in.jsonl", *({"prompt": f"Hello {n}"} for n in range(400)))
        code = f"{INTERRUPTIBLE}from specrun.cli.main import main; main()"
        options = ["--model", "tiny", "--max-tokens", "20", "--threads", "1"]
        command = [sys.executable, "-c", code, "batch", str(source), str(target), *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        while not (target.exists() and target.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=900)
        assert process.returncode == 130
        done = len(records(target.read_bytes()))
        assert 0 < done < 400
        assert "of 400 lines are done: the same command goes on from there." in said
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
        assert len(records(target.read_bytes())) == 400


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["nothing.jsonl", "out.jsonl"], "There is no file nothing.jsonl"),
            (["in.jsonl", "no/out.jsonl"], "in a folder that exists"),
            (["in.jsonl", "."], "in a folder that exists"),
            (["in.jsonl", "in.jsonl"], "is the input itself"),
            (["in.jsonl", "-", "--json"], "name an output file"),
            (["in.jsonl", "out.jsonl", "--temperature", "-1"], "temperature must be"),
            (["in.jsonl", "out.jsonl", "--batch-size", "0"], "batch-size"),
            (["in.jsonl", "out.jsonl", "--batch-size", "257"], "batch-size"),
            (["in.jsonl", "out.jsonl", "--workers", "2"], "add --engine ray"),
            (["in.jsonl", "out.jsonl", "--retry-failed", "--no-resume"], "give one of them"),
            (["in.jsonl", "-", "--retry-failed"], "name a file"),
        ],
    )
    @pytest.mark.usefixtures("tiny")
    def test_wrong_usage(self, source: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str) -> None:
        monkeypatch.chdir(source.parent)
        result = batch(*arguments)
        assert result.exit_code == 2
        assert says in result.stderr
        assert not [name for name in os.listdir() if name.startswith("out")]

    def test_an_unknown_model(self, source: Path, target: Path) -> None:
        result = batch(source, target)
        assert result.exit_code == 1
        assert "tiny" in result.stderr
        assert not target.exists()


@pytest.mark.usefixtures("tiny")
def test_a_method_that_drafts_for_one_request_at_a_time(source: Path, target: Path) -> None:
    """Alone in its batch every line is right; with more rows asked for, the job does not begin."""
    refused = batch(source, target, "--method", "lookahead", "--batch-size", 4)
    assert refused.exit_code == 2
    assert "'lookahead' drafts for one request at a time" in refused.stderr
    assert not target.exists()
    result = batch(source, target, "--method", "lookahead")
    assert result.exit_code == 0, result.stderr
    assert [record["response"]["body"]["method"] for record in records(target.read_bytes())] == ["lookahead"] * 5


@pytest.mark.usefixtures("tiny")
def test_a_build_without_ragged_runs_refuses_no_method(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model for the CPU has one row there, whatever was asked for; that tiny has no head is another matter."""
    monkeypatch.setattr("specrun.runtime.session.build_features", lambda: frozenset({"attention_bias", "position_ids"}))
    refused = batch(source, target, "--method", "eagle", "--batch-size", 4)
    assert refused.exit_code != 0
    assert "one request at a time" not in refused.stderr
    assert "eagle" in refused.stderr
    result = batch(source, target, "--method", "ngram", "--batch-size", 4)
    assert result.exit_code == 0, result.stderr
