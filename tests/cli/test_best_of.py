from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main
from specrun.cli.scores import parse_score
from specrun.runtime import Engine
from specrun.runtime.best_of.answers import AnswerPattern
from specrun.runtime.best_of.labels import Marker
from specrun.runtime.best_of.report import report

from ..conftest import INTERRUPTIBLE

KEYS = {
    "text", "index", "score", "score_name", "token_ids", "finish_reason", "n", "model", "method", "exactness",
    "exact_to", "graph", "seed", "usage", "timings", "rounds", "speculation", "memory", "pruned", "cut",
}  # fmt: skip


def best_of(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["best-of", "--model", "tiny", "--seed", "5", *arguments], input=stdin)


def body(*arguments: str) -> dict[str, Any]:
    result = best_of("--json", *arguments)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_winner_goes_to_stdout(tiny: str) -> None:
    result = best_of("--n", "4", "--max-tokens", "12", "Hello")
    assert result.exit_code == 0, result.stderr
    with Engine.load(tiny) as engine:
        expected = engine.best_of("Hello", n=4, max_tokens=12, seed=5)
    assert result.stdout == expected.text + ("" if expected.text.endswith("\n") else "\n")
    assert expected.winner is not None
    assert result.stderr.startswith(f"sample {expected.winner.index} (logprob ")
    assert "instead of" in result.stderr
    assert "of 4; keys and values" in result.stderr


def test_all_samples_best_first(tiny: str) -> None:
    result = best_of("--n", "3", "--all", "--stats", "--max-tokens", "8", "Hello")
    heads = [line for line in result.stderr.splitlines() if line.startswith("--- sample")]
    scores = [float(head.split("logprob ")[1].split(",")[0]) for head in heads]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    assert "bit-equal to plain decoding of this graph, seed 5" in result.stderr


def test_one_sample_is_compared_with_nothing(tiny: str) -> None:
    result = best_of("--n", "1", "--max-tokens", "8", "Hello")
    assert "of 1; keys and values" in result.stderr
    assert "instead of" not in result.stderr


def test_the_json(tiny: str) -> None:
    found = body("--n", "4", "--max-tokens", "8", "Hello")
    assert set(found) == KEYS
    assert (found["n"], found["graph"], found["exactness"]) == (4, "target_shared", "bitwise")
    assert "generate's graph rounds otherwise" in found["exact_to"]
    memory = found["memory"]
    held = memory["kv_prefix_bytes"] + memory["kv_rows_bytes"]
    assert memory["kv_saved"] == pytest.approx(1 - held / memory["kv_copied_bytes"])
    listed = body("--n", "4", "--max-tokens", "8", "--all", "Hello")
    assert listed["text"] == found["text"]
    assert listed["candidates"][0]["text"] == found["text"]
    assert sorted(candidate["index"] for candidate in listed["candidates"]) == [0, 1, 2, 3]


def test_scores_budgets_and_pruning(tiny: str) -> None:
    found = body("--n", "3", "--score", "certainty", "--max-tokens", "8", "Hello")
    assert found["score_name"] == "certainty"
    cut = body("--n", "3", "--budget-tokens", "9", "--max-tokens", "50", "--all", "Hello")
    assert cut["usage"]["completion_tokens"] <= 9 + 3 * 17
    assert {candidate["finish_reason"] for candidate in cut["candidates"]} <= {"length", "stop"}
    assert body("--n", "3", "--prune", "--max-tokens", "8", "Hello")["text"]
    refused = best_of("--n", "3", "--prune", "--score", "certainty", "Hello")
    assert refused.exit_code == 2
    assert "leave prune out" in refused.stderr


def test_prompts_from_elsewhere(tiny: str, tmp_path: Path) -> None:
    expected = best_of("--n", "2", "--max-tokens", "6", "Hello").stdout
    (tmp_path / "prompt.txt").write_text("Hello\n")
    assert best_of("--n", "2", "--max-tokens", "6", "--file", str(tmp_path / "prompt.txt")).stdout == expected
    assert best_of("--n", "2", "--max-tokens", "6", "-", stdin="Hello\n").stdout == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--score", "worst", "Hello"), "There is no score 'worst'"),
        (("--temperature", "0", "Hello"), "Without sampling all 16 samples are the same"),
        (("--n", "0", "Hello"), "n must be a whole number"),
        (("--budget-s", "0", "Hello"), "budget_s must be above 0"),
        (("", "--n", "2"), "as in `specrun best-of"),
    ],
)
def test_what_cannot_be(tiny: str, arguments: tuple[str, ...], says: str) -> None:
    result = best_of(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_shows_what_there_is(tiny: str) -> None:
    script = f"{INTERRUPTIBLE}from specrun.cli.main import main; main()"
    command = ["best-of", "--model", "tiny", "--n", "2", "--max-tokens", "12000", "--json", "--seed", "1", "Hello"]
    command += ["--raw", "--regex", "[a-z ]*"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    calibration = Path(os.environ["SPECRUN_HOME"]) / "calibration-shared"
    while process.poll() is None and not calibration.exists():
        pass
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert json.loads(stdout)["n"] in (0, 2)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_does_not_wait_for_a_score(tiny: str, tmp_path: Path) -> None:
    sign, rate = tmp_path / "sign", tmp_path / "rate.py"
    rate.write_text(f"import time\nopen({str(sign)!r}, 'w').close()\ntime.sleep(100)\n")
    script = f"{INTERRUPTIBLE}from specrun.cli.main import main; main()"
    command = ["best-of", "--model", "tiny", "--n", "2", "--max-tokens", "4", "Hello"]
    command += ["--score", f"command:{shlex.quote(sys.executable)} {shlex.quote(str(rate))}"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    while process.poll() is None and not sign.exists():
        time.sleep(0.01)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=250)
    assert (process.returncode, stdout) == (130, ""), stderr
    assert "Traceback" not in stderr
    assert time.monotonic() - started < 50


def test_lines_of_a_job_that_want_several(tiny: str, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "Hello"},
        {"prompt": "Hello", "n": 3, "seed": 4, "logprobs": True},
        {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "best_of": 4, "seed": 4, "temperature": 1.0},
        {"prompt": "Hello", "best_of": 2, "method": None},
        {"prompt": "Hello"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["batch", str(source), str(target), "--model", "tiny", "--max-tokens", "8"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.stderr
    first, three, best, one, last = (json.loads(line)["response"]["body"] for line in target.read_text().splitlines())
    assert "choices" not in first
    assert first["token_ids"] == last["token_ids"]
    with Engine.load(tiny) as engine:
        expected = engine.best_of("Hello", n=3, seed=4, max_tokens=8)
        ranked = engine.best_of("Hello", n=4, seed=4, temperature=1.0, max_tokens=8).ranked()
    assert [choice["text"] for choice in three["choices"]] == [candidate.text for candidate in expected.candidates]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert [len(choice["token_logprobs"]) for choice in three["choices"]] == [
        len(candidate.token_ids) for candidate in expected.candidates
    ]
    assert [choice["message"]["content"] for choice in best["choices"]] == [candidate.text for candidate in ranked[:2]]
    assert len(one["choices"]) == 1
    assert one["n"] == 2
    assert three["usage"]["completion_tokens"] == expected.usage.completion_tokens


def test_the_right_answer_gives_pass_at_k(tiny: str) -> None:
    pattern = r"vote:(\w)"
    listed = body("--n", "8", "--max-tokens", "12", "--score", pattern, "--all", "Hello")
    answers = AnswerPattern(r"(\w)").find([candidate["text"] for candidate in listed["candidates"]])
    answer = next(found for found in answers if found is not None)
    share = answers.count(answer) / 8
    assert share > 0
    found = body("--n", "8", "--max-tokens", "12", "--score", pattern, "--answer", f" {answer} ", "Hello")
    assert found["pass_at_k"]["1"] == pytest.approx(share)
    assert found["pass_at_k"]["8"] == 1.0
    told = best_of("--n", "8", "--max-tokens", "12", "--score", pattern, "--answer", answer, "Hello").stderr
    assert f"pass@1 {share:.1%}" in told


@pytest.mark.parametrize("score", ["logprob", r"vote:(\w)"])
def test_a_file_of_questions_and_answers(tiny: str, tmp_path: Path, score: str) -> None:
    prompts, lines, marker = ["Hello", "Good night", "Yes"], [], Marker(parse_score(score))
    labelled = []
    with Engine.load(tiny) as engine:
        for prompt in prompts:
            result = engine.best_of(prompt, n=6, max_tokens=10, seed=5, score=parse_score(score))
            answers = Marker(parse_score(r"vote:(\w)" if "vote" in score else "vote"))
            found = answers.labelled(result, "?").answers
            answer = next((one for one in found if one is not None), "7")
            lines.append(json.dumps({"prompt": prompt, "answer": answer, "level": 3}))
            labelled.append(marker.labelled(result, answer))
    path = tmp_path / "questions.jsonl"
    path.write_text("\n\n".join(lines), encoding="utf-8")
    given = ("--n", "6", "--max-tokens", "10", "--score", score, "--labels", str(path))
    told = best_of(*given)
    assert told.exit_code == 0, told.stderr
    assert told.stdout == report(labelled).table() + "\n"
    assert "question 1 of 3" in told.stderr
    told = json.loads(best_of(*given, "--json").stdout)
    settings = {"model": "tiny", "score": score.partition(":")[0], "seed": 5, "max_tokens": 10, "temperature": 0.8}
    assert told == json.loads(json.dumps(settings | report(labelled).to_json()))
    if "vote" in score:
        assert any(any(one.right) for one in labelled)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no question"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "", "answer": "1"}', "line 2: prompt must be text"),
        ('{"prompt": "a"}', "line 1: answer must be text or a number"),
        ('{"prompt": "a", "answer": true}', "line 1: answer must be text or a number"),
        ('{"prompt": "a", "answer": " "}', "line 1: answer must be text or a number"),
        ("[1]", "line 1: "),
        ('{"prompt": "a", "answer": "1"', "line 1: it is not valid JSON"),
    ],
)
def test_a_wrong_file_of_questions(tiny: str, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(text, encoding="utf-8")
    result = best_of("--labels", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_a_question_that_cannot_be_asked_leaves_the_report_of_the_others(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    lines = [{"prompt": "Hello", "answer": 4}, {"prompt": "word " * 5_000, "answer": 4}, {"prompt": "No", "answer": 1}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = best_of("--n", "2", "--max-tokens", "4", "--labels", str(path))
    assert result.exit_code == 1
    assert result.stdout.startswith("1 questions, 2 samples each")
    assert "question 2: " in result.stderr
    assert best_of("--labels", str(path), "Hello").exit_code == 2


@pytest.mark.parametrize(
    ("score", "answer", "says"),
    [
        ("vote", " ", "The answer is empty"),
        ("logprob", "5 apples", "'5 apples' is no number"),
        ("vote", "Paris", "'paris' is no number"),
    ],
)
def test_answers_that_no_text_can_give(tiny: str, tmp_path: Path, score: str, answer: str, says: str) -> None:
    result = best_of("--n", "2", "--score", score, "--answer", answer, "Hello")
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_unit_tests_are_their_own_answer(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text("def test_it():\n    assert f() == 1\n", encoding="utf-8")
    result = best_of("--n", "2", "--score", f"tests:{path}", "--answer", "4", "Hello")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Unit tests tell what is right themselves" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_interrupt_while_scoring_leaves_the_report(tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "Hello", "answer": 4}\n' * 3, encoding="utf-8")
    slow, count = tmp_path / "slow.py", tmp_path / "count"
    slow.write_text(
        "import pathlib, sys, time\nsys.stdin.read()\n"
        f"count = pathlib.Path({str(count)!r})\n"
        "calls = 1 + (int(count.read_text()) if count.exists() else 0)\ncount.write_text(str(calls))\n"
        "time.sleep(100 if calls > 4 else 0)\nprint(1)\n"
    )
    score = f"command:{shlex.quote(sys.executable)} {shlex.quote(str(slow))}"
    arguments = ["best-of", "--model", "tiny", "--n", "2", "--max-tokens", "4", "--score", score, "--labels", str(path)]
    script = f"{INTERRUPTIBLE}from specrun.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    # One command for each sample, so the fifth is the first of the third question.
    while process.poll() is None and not (count.exists() and count.read_text() == "5"):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert process.returncode == 130, err
    assert out.startswith("2 questions, 2 samples each")
    assert "interrupted: 2 of 3 questions are done" in err
    assert "Traceback" not in err
