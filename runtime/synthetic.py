"""The cost model against the clock: rounds whose draft tokens are accepted with a chosen chance, on any pair of graphs.

    S = E[tokens] / (K phi + v(K + 1) + r),    E[tokens] = (1 - a^(K + 1)) / (1 - a)

is Leviathan et al. 2023, theorem 3.8, with three measured terms instead of 1, all in units of the time that the fastest
plain loop (width 1, not exact) takes for a token: K phi, drafting; v(K + 1), the target's run over K + 1 positions; r,
what a round does besides (accepting, committing, writing the text). They come from rounds of the same loop, over the
same text, in turn with those that are predicted, whose draft tokens are all wrong (a = 0): the prediction for any other
a is then the formula's alone.
"""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from specrun.models_cache.errors import UsageError
from specrun.models_cache.progress import Progress
from specrun.runtime.bench import plain_widths, time_stream
from specrun.runtime.bench_runs import BASELINE, Bench, BenchPrompt, Run, time_in_turn
from specrun.runtime.bench_summary import median_per_token
from specrun.runtime.engine import Engine
from specrun.runtime.proposal import Proposer
from specrun.runtime.proposers.synthetic import SyntheticProposer
from specrun.runtime.request import request_options
from specrun.runtime.stream import Stream

SLACK: Final = 16  # tokens of the known text beyond what the last round may need: a piece of text may come late


def expected_tokens(acceptance: float, draft_length: int) -> float:
    """Tokens that a round of K draft tokens commits on average, each accepted with this chance (1 + a + .. + a^K)."""
    return float(sum(acceptance**place for place in range(draft_length + 1)))


def tokens_deviation(acceptance: float, draft_length: int) -> float:
    """The standard deviation of the tokens of one round."""
    mean = expected_tokens(acceptance, draft_length) - 1
    square = sum((2 * place - 1) * acceptance**place for place in range(1, draft_length + 1))
    return float(max(0.0, square - mean * mean) ** 0.5)


def synthetic_label(method: str, draft_length: int, acceptance: float) -> str:
    """How runs are named: "draft:4@0.7"."""
    return f"{method}:{draft_length}@{acceptance:g}"


def _numbers(text: str) -> tuple[int, float]:
    """K and acceptance of a label's "4@0.7"."""
    k, _, acceptance = text.partition("@")
    return int(k), float(acceptance)


def run_synthetic(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    acceptances: Sequence[float],
    draft_lengths: Sequence[int] = (1, 2, 4, 8),
    methods: Sequence[str] | None = None,
    max_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    output: Path | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Time rounds of every K and acceptance in turn with the baseline and exact plain decoding, "none".

    methods: whose drafting is paid for, each by itself; by default the engine's draft model, else "none": at no cost.
    Texts go on after their end, and runs to the end of the round that reaches `max_tokens`, so that the tokens a round
    are not bent by the last one; a draft model reads the prompt before the first. The rest as `run_bench`.
    """
    methods = list(methods or [default_method(engine)])
    for method in methods:
        if "+" in method or ":" in method or method == "lookahead":
            raise UsageError(
                f"'{method}' is no single way of drafting whose cost could be paid: give one, such as draft."
            )
        engine.require_method(method)
    labels = [BASELINE, "none"]
    for method in methods:
        for k in dict.fromkeys(draft_lengths):
            labels += [synthetic_label(method, k, a) for a in dict.fromkeys((0.0, *acceptances))]
    timer = _Timer(engine, max_tokens, max_tokens + max(draft_lengths) + SLACK, seed)
    settings = {"max_tokens": max_tokens, "longest": timer.longest, "seed": seed, "synthetic": True}
    return time_in_turn(engine, prompts, labels, repeats, timer, settings=settings, output=output, progress=progress)


class _Timer:
    """Times labels; knows of each prompt what plain decoding writes, `longest` tokens of it."""

    def __init__(self, engine: Engine, max_tokens: int, longest: int, seed: int) -> None:
        self.longest = longest
        self._engine = engine
        self._max_tokens = max_tokens
        self._seed = seed
        self._texts: dict[str, tuple[int, ...]] = {}

    def __call__(self, prompt: BenchPrompt, label: str, repeat: int, tokens: int | None) -> Run:
        engine, text = self._engine, self._text(prompt)
        engine.reset()
        method, _, numbers = label.partition(":")
        k, acceptance = _numbers(numbers) if numbers else (None, 0.0)
        request = request_options(
            method="none" if method == BASELINE else method,
            draft_length=k,
            max_tokens=self.longest,
            ignore_eos=True,
        )
        proposers: list[SyntheticProposer] = []

        def wrap(inner: Proposer | None) -> Proposer:
            rng = np.random.default_rng([self._seed, repeat, zlib.crc32(f"{prompt.id} {label}".encode())])
            size = engine.bundle.manifest.sizes.tokens
            proposers.append(
                SyntheticProposer(inner, text, acceptance=acceptance, draft_length=k or 0, tokens=size, rng=rng)
            )
            return proposers[0]

        enough = self._max_tokens if tokens is None else min(tokens, self._max_tokens)
        try:
            with plain_widths(engine) if method == BASELINE else nullcontext():
                stream = Stream(engine, prompt.prompt, request, wrap=wrap if numbers else None)
                run = time_stream(engine, stream, prompt, label, repeat, whole_rounds=enough)
        finally:
            engine.reset()  # the draft's cache holds its own guesses in place of the text
        if method == "draft" and proposers[0].drafted < proposers[0].proposed:
            raise UsageError(
                f"Prompt {prompt.id} does not fit the draft's context: take it out, or lower --max-tokens."
            )
        return run

    def _text(self, prompt: BenchPrompt) -> tuple[int, ...]:
        if prompt.digest not in self._texts:
            needed, most = len(self._engine.encode(prompt.prompt)) + self.longest, self._engine.context
            if needed > most:
                raise UsageError(
                    f"Prompt {prompt.id} needs {needed} positions and the context has {most}: take it out, or lower "
                    "--max-tokens."
                )
            result = self._engine.generate(prompt.prompt, method="none", max_tokens=self.longest, ignore_eos=True)
            self._texts[prompt.digest] = result.token_ids
        return self._texts[prompt.digest]


def default_method(engine: Engine) -> str:
    """Whose drafting is paid for where nothing is said: what `draft` named, else the bundle's draft, else nobody's."""
    if engine.drafting.given is not None:
        return engine.drafting.given
    return "draft" if "draft" in engine.methods else "none"


@dataclass(frozen=True, slots=True)
class SyntheticCell:
    """One acceptance and K, measured and predicted.

    acceptance_rate: the realised acceptance. expected_tokens: tokens a round by the formula; mean_accepted_tokens: as
    they came, with the standard deviation `tokens_error` that chance allows it. draft, verify, rest: the cost of a
    round, K phi, v(K + 1) and r, in units of the baseline's time a token. speedup: against the baseline by the clock,
    speedup_exact: against exact plain decoding. predicted: by the formula with the chosen acceptance;
    predicted_realised: with the realised tokens a round; theorem: without v and r, as if a run cost the same at any
    width. equal: whether every text is plain decoding's.
    """

    model: str
    method: str
    acceptance: float
    draft_length: int
    rounds: int
    acceptance_rate: float
    expected_tokens: float
    mean_accepted_tokens: float
    tokens_error: float
    draft: float
    verify: float
    rest: float
    speedup: float
    speedup_exact: float
    predicted: float
    predicted_realised: float
    theorem: float
    equal: bool

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.speedup - 1.0

    @property
    def error_realised(self) -> float:
        """The same for the prediction from the realised tokens a round."""
        return self.predicted_realised / self.speedup - 1.0


def summarise_synthetic(runs: Iterable[Run]) -> list[SyntheticCell]:
    """A cell for each method, K and acceptance of one model's runs; acceptance 0, from which the costs come, first.

    Times are medians over the repeats of a prompt, each prompt weighing by its rounds.
    """
    by_label: dict[str, dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        by_label.setdefault(run.method, {}).setdefault(run.prompt, []).append(run)
    return [_cell(label, by_label) for label in by_label if "@" in label]


def _cell(label: str, by_label: dict[str, dict[tuple[str, str], list[Run]]]) -> SyntheticCell:
    method, _, rest = label.partition(":")
    k, acceptance = _numbers(rest)
    own = by_label[label]
    costs = by_label[synthetic_label(method, k, 0.0)]
    ids = [identity for identity in own if identity in costs and identity in by_label[BASELINE]]
    base = statistics.mean(median_per_token(by_label[BASELINE][identity]) for identity in ids)
    exact = statistics.mean(median_per_token(by_label["none"][identity]) for identity in ids)
    runs = [run for identity in ids for run in own[identity]]
    rounds = [sum(run.rounds for run in own[identity]) for identity in ids]
    accepted, evaluated = sum(run.accepted for run in runs), sum(run.evaluated for run in runs)
    tokens = sum(run.tokens - 1 for run in runs) / sum(rounds)
    round_s = sum(
        count * statistics.median(run.seconds_per_round for run in own[identity])
        for count, identity in zip(rounds, ids, strict=True)
    ) / sum(rounds)
    draft, verify, other = (_part(costs, ids, part) / base for part in ("draft", "verify", "rest"))
    expected = expected_tokens(acceptance, k)
    plain = {identity: {run.ids_digest for run in by_label["none"][identity]} for identity in ids}
    return SyntheticCell(
        model=runs[0].model,
        method=method,
        acceptance=acceptance,
        draft_length=k,
        rounds=sum(rounds),
        acceptance_rate=accepted / evaluated if evaluated else 0.0,
        expected_tokens=expected,
        mean_accepted_tokens=tokens,
        tokens_error=tokens_deviation(acceptance, k) / sum(rounds) ** 0.5,
        draft=draft,
        verify=verify,
        rest=other,
        speedup=tokens * base / round_s,
        speedup_exact=tokens * exact / round_s,
        predicted=expected / (draft + verify + other),
        predicted_realised=tokens / (draft + verify + other),
        theorem=expected / (draft + 1.0),
        equal=all({run.ids_digest for run in own[identity]} | plain[identity] == plain[identity] for identity in ids),
    )


def _part(costs: dict[tuple[str, str], list[Run]], ids: Sequence[tuple[str, str]], part: str) -> float:
    """Seconds a round of one part: the median over repeats, averaged over prompts."""

    def seconds(run: Run) -> float:
        rest = run.decode_s - run.draft_s - run.verify_s
        return {"draft": run.draft_s, "verify": run.verify_s, "rest": rest}[part] / max(1, run.rounds)

    return statistics.mean(statistics.median(map(seconds, costs[identity])) for identity in ids)
