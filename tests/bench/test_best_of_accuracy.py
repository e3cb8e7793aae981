"""The driver of the accuracy measurement: it resumes, rates and reports, whatever makes the samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.best_of import Candidate

from .best_of_accuracy import Sampled, best_of_sampler, collect, main, rate, read_lines, read_questions, reports

MATHS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
CODE = [
    {
        "task_id": "Code/0",
        "prompt": '\n\ndef twice(x: int) -> int:\n    """ Twice x. """\n',
        "entry_point": "twice",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 6\n",
    }
]
SETTINGS = {"format": 1, "n": 3}


def write(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def sampled(*texts: str) -> Sampled:
    rows = [Candidate(i, text, (1, 2), "stop", (-0.5, -0.1 * (i + 1)), ()) for i, text in enumerate(texts)]
    return Sampled(11, tuple(rows), 0.5)


def test_maths_is_right_by_its_last_number(tmp_path: Path) -> None:
    question = read_questions("gsm8k", write(tmp_path / "q", MATHS), 2)[1]
    assert question.id == "gsm8k/1"
    assert question.prompt.startswith("What is 1 + 1?\n")
    line = rate("gsm8k", question, sampled("1 + 1\nAnswer: $2.00", "I say 3", "none"))
    assert [(row["answer"], row["right"]) for row in line["samples"]] == [("2", True), ("3", False), (None, False)]
    assert [row["logprob"] for row in line["samples"]] == pytest.approx([-0.3, -0.35, -0.4])


@pytest.mark.skipif(sys.platform == "win32", reason="the sandbox needs fork")
def test_code_is_right_by_its_tests(tmp_path: Path) -> None:
    (question,) = read_questions("humaneval", write(tmp_path / "q", CODE))
    assert "```python\ndef twice" in question.prompt
    answers = ("```python\ndef twice(x):\n    return 2 * x\n```", "    return x * x\n", "No.")
    line = rate("humaneval", question, sampled(*answers))
    assert [row["right"] for row in line["samples"]] == [True, False, False]
    found = reports("humaneval", [line])
    assert set(found) == {"tests", "logprob"}
    assert found["tests"].rows[-1].accuracy == 1.0
    assert json.loads(json.dumps(line)) == line


def test_it_goes_on_where_it_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = read_questions("gsm8k", write(tmp_path / "q", MATHS))
    output = tmp_path / "out.jsonl"
    asked: list[str] = []

    def sample(prompt: str) -> Sampled:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(prompt)
        return sampled("2", "2", "5")

    with pytest.raises(KeyboardInterrupt):
        collect("gsm8k", questions, sample, output, SETTINGS)
    whole = output.read_bytes()
    with output.open("ab") as file:
        file.write(b'{"id": "gsm8k/2", "samp')  # killed while writing
    asked.clear()
    assert [line["id"] for line in read_lines(output, SETTINGS)] == ["gsm8k/0", "gsm8k/1"]
    assert output.read_bytes() == whole
    lines = collect("gsm8k", questions[:3], sample, output, SETTINGS)
    assert asked == [questions[2].prompt]
    assert [line["id"] for line in lines] == ["gsm8k/0", "gsm8k/1", "gsm8k/2"]
    assert capsys.readouterr().out.splitlines()[-1] == "gsm8k/2: 0/3 right, 0 s"
    rows = {row.n: row for row in reports("gsm8k", lines)["vote"].rows}
    assert (rows[1].accuracy, rows[3].accuracy) == (pytest.approx(2 / 9), pytest.approx(1 / 3))
    assert rows[3].flops == pytest.approx((11 + 3 * 2) / 13)
    with pytest.raises(UsageError, match="give another --output"):
        read_lines(output, SETTINGS | {"n": 4})


def test_the_whole_of_it_on_a_tiny_model(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = write(tmp_path / "q", MATHS)
    output, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    arguments = ["gsm8k", str(questions), "--output", str(output), "--model", tiny, "--n", "4", "--max-tokens", "8"]
    arguments += ["--sampler", "batch"]
    main([*arguments, "--limit", "2", "--threads", "1"])
    head, *lines = map(json.loads, output.read_text().splitlines())
    assert (head["temperature"], head["seed"], len(lines)) == (0.8, 0, 2)
    texts = [row["text"] for row in lines[0]["samples"]]
    assert len(set(texts)) > 1
    assert all(1 <= row["tokens"] <= 8 and row["logprob"] < 0 for line in lines for row in line["samples"])
    before = output.read_bytes()
    main([*arguments, "--limit", "2", "--report", "--json", str(report)])
    assert output.read_bytes() == before
    assert set(json.loads(report.read_text())["reports"]) == {"vote", "logprob"}
    assert "score: vote" in capsys.readouterr().out


def test_samples_of_best_of() -> None:
    """The contract with `Engine.best_of`."""
    asked: dict[str, Any] = {}

    class Stub:
        def best_of(self, prompt: str, **options: Any) -> Any:
            asked.update(options, prompt=prompt)
            return SimpleNamespace(candidates=sampled("a", "b").candidates, usage=SimpleNamespace(prompt_tokens=7))

    sample = best_of_sampler(Stub(), 2, max_tokens=5, temperature=0.8, seed=3)  # type: ignore[arg-type]
    found = sample("why?")
    assert (found.prompt_tokens, [row.text for row in found.candidates]) == (7, ["a", "b"])
    assert asked == {
        "prompt": "why?",
        "n": 2,
        "certainties": True,
        "max_tokens": 5,
        "temperature": 0.8,
        "seed": 3,
        "method": "auto",
    }
