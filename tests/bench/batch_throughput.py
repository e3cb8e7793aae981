"""Throughput of a batch of requests by batch size, with and without speculation, against one at a time.

python tests/bench/batch_throughput.py --prompts spec_bench.jsonl --limit 24 --max-tokens 64

Every batch size runs with each method in turn, round after round of `--repeats`; the fastest whole job of each counts.
The unit is batch size 1, plain: once as the fastest loop there is (width 1 without padding: the stricter baseline) and
once exact. Each answer is compared with the text that plain decoding gives alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from specrun.runtime import BatchEngine, BatchRequest, Engine, Result
from specrun.runtime.bench import plain_widths

BASELINE = (1, "baseline")


@dataclass(frozen=True, slots=True)
class Job:
    """One run of all prompts; seconds of the whole job, of reading prompts, and of the rounds."""

    size: int
    method: str
    seconds: float
    prefill_s: float
    decode_s: float
    rest_s: float
    tokens: int
    decoded: int
    rounds: int
    mean_rows: float
    acceptance: float
    different: int

    @property
    def rate(self) -> float:
        """Tokens a second, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens a second of the rounds alone."""
        return self.decoded / self.decode_s


def read_prompts(path: Path) -> list[str]:
    """First turns of a JSONL file with `prompt`, `turns` or `question`."""
    prompts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        prompts.append(entry.get("prompt") or entry.get("question") or entry["turns"][0])
    return prompts


def run_job(
    engine: Engine, prompts: Sequence[str], lengths: Sequence[int], size: int, method: str, texts: Sequence[Result]
) -> Job:
    """Run all prompts once; `texts` are the solo results to compare with, none at first."""
    engine.reset()
    batch = BatchEngine(engine, batch_size=size)
    baseline = method == BASELINE[1]
    requests = [
        BatchRequest(index, prompt, {"method": "none" if baseline else method, "max_tokens": length})
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    start = time.perf_counter()
    with plain_widths(engine) if baseline else nullcontext():
        answers = {answer.index: answer.result for answer in batch.run(requests)}
    seconds = time.perf_counter() - start
    different = 0
    for index, answer in answers.items():
        if not isinstance(answer, Result):
            raise answer
        if texts:
            solo = texts[index]
            same = (answer.token_ids, answer.text, answer.finish_reason)
            different += same != (solo.token_ids, solo.text, solo.finish_reason)
    stats = batch.stats
    return Job(
        size,
        method,
        seconds,
        stats.prefill_s,
        stats.decode_s,
        stats.draft_s + stats.rest_s,
        stats.completion_tokens,
        stats.completion_tokens - len(prompts),
        stats.rounds,
        stats.row_rounds / max(1, stats.rounds),
        stats.acceptance_rate,
        different,
    )


def main() -> None:
    """Print a line for each batch size and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, nargs="+", help="JSONL files")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=24, help="prompts, spread over the files")
    parser.add_argument("--longest", type=int, default=512, help="leave out prompts of more tokens")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[64], help="answers take these lengths in turn")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--methods", nargs="+", default=["none", "auto"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, help="write every job as a JSON line")
    given = parser.parse_args()
    with Engine.load(given.model) as engine:
        prompts = [prompt for path in given.prompts for prompt in read_prompts(path)]
        prompts = [prompt for prompt in prompts if len(engine.encode(prompt)) <= given.longest]
        count = min(given.limit, len(prompts))
        prompts = [prompts[index * len(prompts) // count] for index in range(count)]
        lengths = [given.max_tokens[index % len(given.max_tokens)] for index in range(count)]
        texts = []
        for prompt, length in zip(prompts, lengths, strict=True):
            engine.reset()
            texts.append(engine.generate(prompt, method="none", max_tokens=length))
        tokens = sum(result.usage.prompt_tokens for result in texts)
        print(
            f"{given.model}: {count} prompts of {tokens} tokens; batch size by default {BatchEngine(engine).batch_size}"
        )
        jobs: dict[tuple[int, str], list[Job]] = {}
        kinds = [BASELINE, *[(size, method) for size in given.sizes for method in given.methods]]
        for _ in range(given.repeats):
            for size, method in kinds:
                job = run_job(engine, prompts, lengths, size, method, [] if method == BASELINE[1] else texts)
                jobs.setdefault((size, method), []).append(job)
                if given.output is not None:
                    with given.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps({"model": given.model, **asdict(job)}) + "\n")
        best = {kind: min(found, key=lambda job: job.seconds) for kind, found in jobs.items()}
        base, exact = best[BASELINE], best.get((1, "none"))
        print("rows method     tok/s  x base x exact | decode tok/s  x base x exact | rounds rows  accepted  different")
        for (size, method), job in best.items():
            ratios = [job.rate / base.rate, job.rate / exact.rate if exact else 0.0]
            decode = [job.decode_rate / base.decode_rate, job.decode_rate / exact.decode_rate if exact else 0.0]
            print(
                f"{size:4} {method:9} {job.rate:6.1f} {ratios[0]:7.2f} {ratios[1]:7.2f} | {job.decode_rate:12.1f} "
                f"{decode[0]:7.2f} {decode[1]:7.2f} | {job.rounds:6} {job.mean_rows:4.1f} {job.acceptance:9.2f} "
                f"{sum(one.different for one in jobs[size, method]):10}"
            )


if __name__ == "__main__":
    main()
