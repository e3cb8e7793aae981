"""Proves on this machine that speculation changes no text: every method, K and batch against plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.models_cache.progress import Progress, no_progress
from specrun.runtime.batch import BatchEngine, BatchRequest
from specrun.runtime.batching.batch_row import solo_reason
from specrun.runtime.coupled_noise import CoupledNoise
from specrun.runtime.engine import Engine, Prompt
from specrun.runtime.kv_cache import shared_prefix
from specrun.runtime.request import METHODS, canonical_method
from specrun.runtime.session import ModelSession

DRAFT_LENGTHS: Final = (1, 2, 3, 4, 5, 8, 16)
BATCH_SIZES: Final = (1, 3)  # fewer rows than prompts: they join and leave at different rounds
SAMPLINGS: Final[dict[str, dict[str, Any]]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.95, "seed": 20240229},
}
PROMPTS: Final = (
    "List the days of the week, then list them again in the same order.",
    "Translate to French, then repeat the English: The cat sat on the mat. The dog sat on the log.",
    "Write a Python function that adds two numbers, and one that subtracts them.",
    "Natalia sold clips to 48 friends in April and half as many in May. How many did she sell in all?",
)


@dataclass(frozen=True, slots=True)
class VerifyCase:
    """One method, draft length, batch size and kind of sampling over all prompts.

    draft_length: None for the adaptive one. tokens: how many were compared. difference: where and by how much the
    first unequal text differs, None if all are equal. batch: prompts that ran together; 1: each was alone. rounding:
    whether differences are no more than the probe's bound allows: where exactness is "rounding", two tokens nearer to
    each other than twice the bound may change places.
    """

    method: str
    draft_length: int | None
    sampling: str
    prompts: int
    tokens: int
    equal: bool
    difference: str | None
    batch: int = 1
    rounding: bool = False

    @property
    def holds(self) -> bool:
        """Whether this is what the engine promises."""
        return self.equal or self.rounding


def verify(
    engine: Engine,
    prompts: Sequence[Prompt] | None = None,
    *,
    methods: Sequence[str] | None = None,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    lookahead: Sequence[int] | None = None,
    max_tokens: int = 64,
    progress: Progress | None = None,
) -> Iterator[VerifyCase]:
    """Yield a case for every method x draft length (and the adaptive one) x batch x {greedy, coupled}, one by one.

    A draft length is that of a chain; heads that run alone with the adaptive one propose token trees, and so does
    lookahead with all, of that depth. In a batch plain decoding is a method of its own; lookahead runs alone only, and
    so does what ONNX Runtime is too old to run in rows. The width probe is run anew first. prompts: a built-in set by
    default. methods: all that the engine can run by default. lookahead: as in `RequestOptions`.
    """
    report = progress or no_progress
    prompts = PROMPTS if prompts is None else prompts
    methods = [canonical_method(method) for method in methods or engine.methods if method not in ("none", "auto")]
    unknown = sorted(set(methods) - set(METHODS))
    if unknown:
        raise UsageError(f"Unknown method '{unknown[0]}': choose from {', '.join(METHODS)}.")
    for method in methods:
        engine.require_method(method)
    if not prompts:
        raise UsageError("There is no prompt to verify with: give a file with at least one.")
    report("probing widths", 0, None)
    engine.recalibrate()
    for sampling, options in SAMPLINGS.items():
        engine.reset()
        expected = []
        for index, prompt in enumerate(prompts):
            report(f"plain decoding, {sampling}", index, len(prompts))
            expected.append(_tokens(engine, prompt, method="none", max_tokens=max_tokens, **options))
        for batch in batch_sizes:
            for method, draft_length in _cases(methods, draft_lengths, batch, engine.target):
                shape: dict[str, Any] = {"lookahead": lookahead} if method == "lookahead" else {}
                how = {**options, **shape, "max_tokens": max_tokens, "method": method, "draft_length": draft_length}
                report(f"{method}, K = {draft_length or 'adaptive'}, batch {batch}, {sampling}", 0, None)
                compared, difference, near = _compare(engine, prompts, expected, batch, how)
                counts = len(prompts), compared
                yield VerifyCase(method, draft_length, sampling, *counts, difference is None, difference, batch, near)


def _cases(
    methods: Sequence[str], draft_lengths: Sequence[int], batch: int, target: ModelSession
) -> list[tuple[str, int | None]]:
    """The methods and draft lengths that a batch of this size can have."""
    if batch > 1 and not target.rows_together:
        return []
    if batch > 1:
        methods = [method for method in methods if solo_reason(method, ragged=target.ragged) is None]
    cases: list[tuple[str, int | None]] = [(method, k) for method in methods for k in (*draft_lengths, None)]
    return cases if batch == 1 else [("none", None), *cases]


def _compare(
    engine: Engine, prompts: Sequence[Prompt], expected: Sequence[tuple[int, ...]], batch: int, options: dict[str, Any]
) -> tuple[int, str | None, bool]:
    """(tokens compared, the first difference, whether all are within the bound of rounding)."""
    compared, near = 0, None
    for index, got in _texts(engine, prompts, batch, options):
        wanted = expected[index]
        compared += len(wanted)
        if got != wanted:
            text = f"prompt {index + 1}: {describe_difference(engine, prompts[index], wanted, got)}"
            if not _near(engine, prompts[index], wanted, got, batch, options):
                return compared, text, False
            near = near or text
    return compared, near, near is not None


def _texts(
    engine: Engine, prompts: Sequence[Prompt], batch: int, options: dict[str, Any]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The token ids of each prompt, by its number."""
    if batch == 1:
        for index, prompt in enumerate(prompts):
            yield index, _tokens(engine, prompt, **options)
        return
    requests = [BatchRequest(index, prompt, options) for index, prompt in enumerate(prompts)]
    answers = [*BatchEngine(engine, batch_size=batch).run(requests)]
    for answer in sorted(answers, key=lambda answer: answer.index):
        if isinstance(answer.result, SpecrunError):
            raise answer.result
        yield answer.index, answer.result.token_ids


def _near(
    engine: Engine, prompt: Prompt, wanted: Sequence[int], got: Sequence[int], batch: int, options: dict[str, Any]
) -> bool:
    """Whether the two tokens at which texts part are nearer to each other than rounding may turn.

    Under coupled sampling what counts is the logit over the temperature with the token's noise, as that is what the
    largest is taken of.
    """
    bound, at = engine.calibration.bound_of(batch), shared_prefix(wanted, got)
    if bound == 0.0 or at >= min(len(wanted), len(got)):
        return False
    pair = np.array(sorted((wanted[at], got[at])))
    before = [*engine.encode(prompt), *wanted[:at]]
    scores = engine.logits(before)[pair].astype(np.float64)
    temperature = float(options.get("temperature", 0.0))
    if temperature > 0.0:
        bound /= temperature
        noise = CoupledNoise(int(options["seed"]), 0, 0).of(pair, len(before))
        scores = scores / temperature - np.log(-np.log1p(noise * -(2.0**-53)))
    return bool(abs(scores[0] - scores[1]) <= 2.0 * bound)


def describe_difference(engine: Engine, prompt: Prompt, wanted: Sequence[int], got: Sequence[int]) -> str:
    """Where two texts part, and the gap of the two tokens' logits in plain decoding."""
    at = shared_prefix(wanted, got)
    pair = [ids[at] if at < len(ids) else None for ids in (wanted, got)]
    names = [f"{token} {engine.tokenizer.token_text(token)!r}" if token is not None else "the end" for token in pair]
    text = f"token {at + 1} is {names[0]} in plain decoding and {names[1]} here"
    if None not in pair:
        logits = engine.logits([*engine.encode(prompt), *wanted[:at]])
        gap = float(np.subtract(*logits[np.array(pair)]))
        text += f" (their logits differ by {gap:.3g})"
    return text


def _tokens(engine: Engine, prompt: Prompt, **options: Any) -> tuple[int, ...]:
    return engine.generate(prompt, **options).token_ids
