"""Best of N against N separate runs: time, and the memory of keys and values.

python tests/bench/best_of.py --model smollm2-135m --prompt-tokens 768 --max-tokens 128 --n 1 4 16

For each N in turn, round after round of `--repeats`: N plain requests one after another, each reading the prompt anew
(`separate`) and, as `generate --n` does, with the prompt's keys and values kept (`kept`), both as the fastest loop
there is (width 1 without padding: the stricter baseline); best-of without drafting; best-of with it. The fastest run
of each counts. Samples
have the same lengths everywhere: end-of-text ids are ordinary tokens. The texts of both best-of runs are compared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrun.runtime import BestOfResult, Engine
from specrun.runtime.bench import plain_widths

SUBJECT = (
    "The harbour town of Aldmere lies where the river Tarn meets the sea. Twice a day the tide fills the old "
    "basin, and twice a day it leaves the boats on the mud. In 1887 the council built a lock, so that ships could "
    "load at any hour; the engineer, Ada Holm, kept a diary of the work. She wrote that the stone came from the "
    "quarry at Brent, that the gates were of oak, and that the whole cost was 41,000 pounds. The lock was used "
    "until 1963. Today the basin is a marina with 120 berths, a museum of the tides and a market on Saturdays. "
    "Visitors come by the coast railway, which has a station at the top of the town, or by the ferry from "
    "Sandwick, which takes forty minutes. "
)
TASK = "\n\nSummarise the text above in a few sentences, then list its numbers and what each of them counts."


@dataclass(frozen=True, slots=True)
class Run:
    """One way to get N samples."""

    n: int
    way: str
    seconds: float
    prefill_s: float
    decode_s: float
    tokens: int
    rounds: int
    mean_accepted_tokens: float
    acceptance: float
    kv_bytes: int
    kv_copied_bytes: int
    same: bool | None


def prompt_of(engine: Engine, tokens: int) -> str:
    """A text and a task of about so many tokens."""
    text, low, high = SUBJECT * (2 + tokens // 100), 1, len(SUBJECT) * (2 + tokens // 100)
    while low < high:
        middle = (low + high + 1) // 2
        if len(engine.encode(text[:middle] + TASK)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return text[:low] + TASK


def separate(engine: Engine, prompt: str, n: int, *, kept: bool, options: dict[str, Any]) -> Run:
    """N plain requests."""
    engine.reset()
    seconds = prefill = decode = 0.0
    tokens = rounds = kv = 0
    with plain_widths(engine):
        for index in range(n):
            if not kept:
                engine.reset()
            start = time.perf_counter()
            result = engine.generate(prompt, method="none", sample_index=index, **options)
            seconds += time.perf_counter() - start
            prefill += result.timings.prefill_s
            decode += result.timings.decode_s
            tokens += result.usage.completion_tokens
            rounds += result.speculation.rounds
            kv = result.memory.kv_target_bytes
    return Run(n, "kept" if kept else "separate", seconds, prefill, decode, tokens, rounds, 1.0, 0.0, kv, 0, None)


def together(
    engine: Engine, prompt: str, n: int, method: str, options: dict[str, Any], plain: BestOfResult | None
) -> tuple[Run, BestOfResult]:
    """One call of best-of."""
    engine.reset()
    start = time.perf_counter()
    result = engine.best_of(prompt, n=n, method=method, **options)
    seconds = time.perf_counter() - start
    counts, memory = result.speculation, result.memory
    run = Run(
        n,
        f"best-of {method}",
        seconds,
        result.timings.prefill_s,
        result.timings.decode_s,
        result.usage.completion_tokens,
        result.rounds,
        counts.mean_accepted_tokens,
        counts.acceptance_rate,
        memory.kv_prefix_bytes + memory.kv_rows_bytes,
        memory.kv_copied_bytes,
        None if plain is None else result.candidates == plain.candidates,
    )
    return run, result


def main() -> None:
    """Print a line for each N and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=768)
    parser.add_argument("--prompt", type=Path, help="a file to take the prompt from instead")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--methods", nargs="+", default=["none", "ngram"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory-tokens", type=int, default=512, help="for the figures of memory; 0: none")
    parser.add_argument("--output", type=Path, help="write every run as a JSON line")
    given = parser.parse_args()
    with Engine.load(given.model) as engine:
        prompt = given.prompt.read_text(encoding="utf-8") if given.prompt else prompt_of(engine, given.prompt_tokens)
        options = {
            "max_tokens": given.max_tokens,
            "temperature": given.temperature,
            "seed": 1,
            "ignore_eos": True,
        }
        print(f"{given.model}: a prompt of {len(engine.encode(prompt))} tokens, samples of {given.max_tokens}")
        engine.best_of(prompt, n=1, **(options | {"max_tokens": 2}))  # opens and probes the graph
        found: dict[tuple[int, str], list[Run]] = {}
        for _ in range(given.repeats):
            for n in given.n:
                plain: list[BestOfResult] = []

                def best_of(method: str, n: int = n, plain: list[BestOfResult] = plain) -> Callable[[], Run]:
                    def call() -> Run:
                        run, result = together(engine, prompt, n, method, options, plain[0] if plain else None)
                        plain.append(result)
                        return run

                    return call

                ways: list[Callable[[], Run]] = [
                    lambda n=n: separate(engine, prompt, n, kept=False, options=options),
                    lambda n=n: separate(engine, prompt, n, kept=True, options=options),
                    *[best_of(method) for method in given.methods],
                ]
                for way in ways:
                    run = way()
                    found.setdefault((n, run.way), []).append(run)
                    if given.output is not None:
                        with given.output.open("a", encoding="utf-8") as file:
                            file.write(json.dumps({"model": given.model, **asdict(run)}) + "\n")
        print(
            " N way               s   prefill  decode   tok/s  x separate  x kept  x plain  runs   MAT accepted  same"
        )
        best = {key: min(runs, key=lambda run: run.seconds) for key, runs in found.items()}
        for (n, name), run in best.items():
            against = [best.get((n, other)) for other in ("separate", "kept", "best-of none")]
            ratios = "  ".join(f"{one.seconds / run.seconds:8.2f}" if one else " " * 8 for one in against)
            same = "" if run.same is None else str(all(one.same for one in found[n, name]))
            print(
                f"{n:2} {name:14} {run.seconds:7.2f} {run.prefill_s:8.2f} {run.decode_s:8.2f} "
                f"{run.tokens / run.seconds:7.1f}  {ratios} {run.rounds:6} {run.mean_accepted_tokens:5.2f} "
                f"{run.acceptance:8.2f}  {same}"
            )
        if given.memory_tokens:
            print(
                f"keys and values with room for {given.memory_tokens} tokens a sample, MB (measured: buffers as bound)"
            )
            for n in given.n:
                long: dict[str, Any] = options | {"max_tokens": given.memory_tokens}
                kv = engine.best_of(prompt, n=n, budget_tokens=1, **long).memory
                prefix, rows, copies = kv.kv_prefix_bytes / 1e6, kv.kv_rows_bytes / 1e6, kv.kv_copied_bytes / 1e6
                print(
                    f"{n:2} prefix {prefix:8.1f} rows {rows:8.1f} together {prefix + rows:8.1f} "
                    f"copies {copies:8.1f} less {kv.kv_saved:.1%}"
                )


if __name__ == "__main__":
    main()
