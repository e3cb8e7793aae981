"""Measures the methods of a bundle on this machine, so that `auto` knows from the first token what pays."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specrun.models_cache.errors import UsageError
from specrun.models_cache.progress import Progress, no_progress
from specrun.runtime.engine import Engine, Prompt
from specrun.runtime.heads import HEAD_METHODS
from specrun.runtime.result import Result
from specrun.runtime.tuning import UNTUNED, MethodFigures, Tuning, save_tuning

PROMPTS = (
    "Explain in two paragraphs why the sky is blue and why sunsets are red.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Write a Python class for a bank account with deposit, withdraw and transfer, with a docstring for each method.",
    "A baker sells 24 loaves in the morning and half as many in the afternoon, at 3 dollars each. What does she earn?",
    "Translate into German: The weather is nice today, and the children are playing in the garden behind the house.",
    "Summarize the following text: The town council met on Monday to discuss the new bridge. The bridge, which will "
    "cost four million dollars, is to replace the old bridge of 1932. Several citizens asked whether the old bridge "
    "could be repaired instead. The engineer answered that repairing the old bridge would cost more than the new "
    "bridge. The council will vote on the new bridge in June.",
    "List ten animals that live in the sea, and say one thing about each of them.",
    "What are the advantages and disadvantages of working from home? Give three of each.",
)
"""A little of each kind of request; none comes from a benchmark."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """A request that ran: its result, and its seconds a token of decoding."""

    result: Result
    seconds_per_token: float


def candidates(engine: Engine) -> list[str]:
    """The methods that `tune` measures: plain decoding, n-grams, and each head or draft with them."""
    return [
        method for method in engine.methods if method in ("none", "ngram", "lookahead") or method.endswith("+ngram")
    ]


def tune(
    engine: Engine,
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    methods: Sequence[str] | None = None,
    max_tokens: int = 96,
    progress: Progress | None = None,
) -> Tuning:
    """Measure `methods` (by default `candidates`) on the prompts, in turn, keep what was found, and begin from it.

    The probe of widths is run anew. Every prompt is answered twice by each method: in the first pass the estimates
    learn and in the second, in reverse order, the clock counts, each request from what is known by then. Raises
    UsageError where nothing is measured.
    """
    report = progress or no_progress
    methods = [*dict.fromkeys(["none", *(methods or candidates(engine))])]
    if not prompts:
        raise UsageError("There is no prompt to tune with: give a file with at least one.")
    for method in methods:
        engine.require_method(method)
    report("Probing widths", 0, None)
    engine.recalibrate()
    engine.begin_from(UNTUNED)
    timed: dict[str, list[_Timed]] = {method: [] for method in methods}
    total = 2 * len(prompts) * len(methods)
    done = 0
    for counts in (False, True):
        for prompt in prompts[:: -1 if counts else 1]:
            for method in methods[:: -1 if counts else 1]:
                report("Timing", done, total)
                engine.reset(texts_only=True)
                run = _run(engine, prompt, method, max_tokens)
                if counts:
                    timed[method].append(run)
                done += 1
    plain = _seconds(timed["none"])
    figures = {method: _figures(engine, method, runs, plain) for method, runs in timed.items()}
    tuning = replace(engine.learnt(), methods=figures, prompts=len(prompts))
    save_tuning(engine.bundle, engine.threads, tuning, engine.device)
    engine.begin_from(tuning)
    return tuning


def _run(engine: Engine, prompt: Prompt, method: str, max_tokens: int) -> _Timed:
    result = engine.generate(prompt, method=method, max_tokens=max_tokens, ignore_eos=True)
    return _Timed(result, result.timings.decode_s / max(1, result.usage.completion_tokens - 1))


def _seconds(runs: Sequence[_Timed]) -> float:
    return statistics.mean(run.seconds_per_token for run in runs)


def _figures(engine: Engine, method: str, runs: Sequence[_Timed], plain: float) -> MethodFigures:
    stats = [run.result.speculation for run in runs]
    rounds = max(1, sum(each.rounds for each in stats))
    evaluated = sum(each.evaluated for each in stats)
    seconds = _seconds(runs)
    base = method.partition("+")[0]
    return MethodFigures(
        tokens=sum(run.result.usage.completion_tokens for run in runs),
        seconds_per_token=seconds,
        ratio=plain / seconds,
        mean_accepted_tokens=sum(each.mean_accepted_tokens * each.rounds for each in stats) / rounds,
        acceptance_rate=sum(each.accepted for each in stats) / evaluated if evaluated else 0.0,
        draft_ms=1e3 * sum(each.draft_s for each in stats) / rounds,
        verify_ms=1e3 * sum(each.verify_s for each in stats) / rounds,
        acceptance=engine.drafting.heads.first_chances(base) if base in HEAD_METHODS else (),
    )
