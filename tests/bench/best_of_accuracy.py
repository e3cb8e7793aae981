"""Accuracy of best-of-N on questions with known answers: GSM8K by majority vote, HumanEval by unit tests.

python tests/bench/best_of_accuracy.py gsm8k gsm8k.jsonl --output samples.jsonl --model qwen --limit 100
python tests/bench/best_of_accuracy.py humaneval humaneval.jsonl --output code.jsonl --model qwen --limit 30
python tests/bench/best_of_accuracy.py gsm8k gsm8k.jsonl --output samples.jsonl --report

The first line of the output says how it was sampled, each further one holds a question with its N samples. Started
again with the same options it goes on where it stopped; what it was doing when it was killed is done anew. The report
comes at the end, from the N samples of the questions that there are: for each n the average over all subsets.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime import BatchEngine, BatchRequest, Engine
from specrun.runtime.best_of.answers import AnswerPattern, normalise
from specrun.runtime.best_of.candidates import Candidate, mean, mean_logprob
from specrun.runtime.best_of.code_tests import CodeTestsScore
from specrun.runtime.best_of.report import Labelled, Report, report
from specrun.runtime.best_of.sandbox import Limits

FORMAT = 1
MATHS = "{prompt}\n\nThink step by step, and end with a line 'Answer: ' and the number."
CODE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}```"


@dataclass(frozen=True, slots=True)
class Question:
    """One question: what the model is asked, and what tells whether a sample is right."""

    id: str
    prompt: str
    entry: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The samples of a question, and how many tokens its prompt has."""

    prompt_tokens: int
    candidates: tuple[Candidate, ...]
    seconds: float


Sampler = Callable[[str], Sampled]


def read_questions(task: str, path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a JSONL file: prompt and answer (gsm8k), or prompt, test, entry_point."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:limit]):
        entry = json.loads(line)
        if task == "gsm8k":
            questions.append(Question(f"gsm8k/{number}", MATHS.format(prompt=entry["prompt"]), entry))
        else:
            questions.append(Question(entry["task_id"], CODE.format(prompt=entry["prompt"].strip("\n") + "\n"), entry))
    return questions


def batch_sampler(engine: Engine, n: int, *, max_tokens: int, temperature: float, seed: int) -> Sampler:
    """Samples as rows of a batch: sample 0 .. n-1 of one seed."""

    def sample(prompt: str) -> Sampled:
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "logprobs": 0}
        started = time.perf_counter()
        requests = [BatchRequest(index, prompt, options | {"sample_index": index}) for index in range(n)]
        found: dict[int, Candidate] = {}
        prompt_tokens = 0
        for answer in BatchEngine(engine, batch_size=n).run(requests):
            if isinstance(answer.result, SpecrunError):
                raise answer.result
            result = answer.result
            prompt_tokens = result.usage.prompt_tokens
            logprobs = tuple(token.logprob for token in result.tokens if token.logprob is not None)
            found[answer.index] = Candidate(
                answer.index, result.text, result.token_ids, result.finish_reason, logprobs, ()
            )
        rows = tuple(found[index] for index in range(n))
        return Sampled(prompt_tokens, rows, time.perf_counter() - started)

    return sample


def best_of_sampler(engine: Engine, n: int, *, max_tokens: int, temperature: float, seed: int) -> Sampler:
    """Samples behind a prompt that is stored once, by `Engine.best_of`; they speculate."""

    def sample(prompt: str) -> Sampled:
        started = time.perf_counter()
        result = engine.best_of(
            prompt, n=n, certainties=True, max_tokens=max_tokens, temperature=temperature, seed=seed, method="auto"
        )
        return Sampled(result.usage.prompt_tokens, tuple(result.candidates), time.perf_counter() - started)

    return sample


SAMPLERS = {"batch": batch_sampler, "best-of": best_of_sampler}


def rate(task: str, question: Question, sampled: Sampled) -> dict[str, Any]:
    """The line of a question: its samples with what they answer and whether that is right."""
    candidates = sampled.candidates
    rows: list[dict[str, Any]] = [
        {
            "index": candidate.index,
            "text": candidate.text,
            "finish_reason": candidate.finish_reason,
            "tokens": len(candidate.token_ids),
            "logprob": _finite(mean_logprob(candidate)),
            "certainty": _finite(mean(candidate.certainties)),
        }
        for candidate in candidates
    ]
    if task == "gsm8k":
        wanted = normalise(str(question.entry["answer"]))
        for row, answer in zip(rows, AnswerPattern().find([c.text for c in candidates]), strict=True):
            row |= {"answer": answer, "right": answer == wanted}
    else:
        entry = question.entry
        tests = CodeTestsScore(
            entry["test"], entry_point=entry["entry_point"], preamble=entry["prompt"], limits=Limits(seconds=20.0)
        )
        shares = tests.scores(entry["prompt"], candidates)
        for row, share, outcome in zip(rows, shares, tests.outcomes, strict=True):
            row |= {"tests": share, "right": share == 1.0, "reason": outcome.reason, "walled": outcome.walled}
    return {
        "id": question.id,
        "prompt_tokens": sampled.prompt_tokens,
        "seconds": sampled.seconds,
        "samples": rows,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_lines(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The questions that the output holds already; a line that was cut off at the end is removed from the file.

    Raises UsageError where it was sampled in another way.
    """
    if not path.exists() or not path.stat().st_size:
        path.write_text(json.dumps(dict(settings)) + "\n", encoding="utf-8")
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    lines = [json.loads(line) for line in data[:whole].splitlines()]
    if not lines or lines[0] != dict(settings):
        raise UsageError(f"{path} was sampled with {lines[0] if lines else 'nothing'}: give another --output.")
    return lines[1:]


def collect(
    task: str, questions: Sequence[Question], sample: Sampler, path: Path, settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Sample and rate the questions that the output lacks, and append each as soon as it is done."""
    lines = read_lines(path, settings)
    known = {line["id"] for line in lines}
    for question in questions:
        if question.id in known:
            continue
        line = rate(task, question, sample(question.prompt))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        lines.append(line)
        right = sum(row["right"] for row in line["samples"])
        print(f"{line['id']}: {right}/{len(line['samples'])} right, {line['seconds']:.0f} s", flush=True)
    wanted = {question.id for question in questions}
    return [line for line in lines if line["id"] in wanted]


def reports(task: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Report]:
    """The report of each score that the lines have: the task's own, the log-probability, self-certainty."""
    found = {"vote" if task == "gsm8k" else "tests": report([_labelled(task, line, None) for line in lines])}
    for name in ("logprob", "certainty"):
        if all(row[name] is not None or not row["tokens"] for line in lines for row in line["samples"]):
            found[name] = report([_labelled(task, line, name) for line in lines])
    return found


def _labelled(task: str, line: Mapping[str, Any], score: str | None) -> Labelled:
    rows = line["samples"]
    right = tuple(row["right"] for row in rows)
    tokens = tuple(row["tokens"] for row in rows)
    logprobs = tuple(-math.inf if row["logprob"] is None else row["logprob"] for row in rows)
    if score is None and task == "gsm8k":
        return Labelled(right, None, tuple(row["answer"] for row in rows), logprobs, line["prompt_tokens"], tokens)
    name = score or "tests"
    scores = tuple(-math.inf if row[name] is None else row[name] for row in rows)
    return Labelled(right, scores, prompt_tokens=line["prompt_tokens"], tokens=tokens)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample, rate, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["gsm8k", "humaneval"])
    parser.add_argument("questions", type=Path, help="JSONL file")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file that is gone on with")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, help="questions")
    parser.add_argument("--n", type=int, default=16, help="samples a question")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sampler", choices=list(SAMPLERS), default="best-of")
    parser.add_argument("--report", action="store_true", help="only report on what the output holds")
    parser.add_argument("--json", type=Path, help="write the reports there too")
    given = parser.parse_args(arguments)
    settings = {
        "format": FORMAT,
        "task": given.task,
        "model": given.model,
        "n": given.n,
        "max_tokens": given.max_tokens,
        "temperature": given.temperature,
        "seed": given.seed,
        "sampler": given.sampler,
    }
    questions = read_questions(given.task, given.questions, given.limit)
    if given.report:
        known = {question.id for question in questions}
        lines = [line for line in read_lines(given.output, settings) if line["id"] in known]
    else:
        with Engine.load(given.model, threads=given.threads) as engine:
            sample = SAMPLERS[given.sampler](
                engine, given.n, max_tokens=given.max_tokens, temperature=given.temperature, seed=given.seed
            )
            lines = collect(given.task, questions, sample, given.output, settings)
    found = reports(given.task, lines)
    for name, one in found.items():
        print(f"\nscore: {name}\n{one.table()}")
    if given.json is not None:
        body = {"settings": settings, "reports": {name: one.to_json() for name, one in found.items()}}
        given.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
