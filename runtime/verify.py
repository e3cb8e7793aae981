"""Proves on this machine that speculation does not change the text: every method and K against plain decoding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from specrun.models_cache.errors import UsageError
from specrun.models_cache.progress import Progress, no_progress
from specrun.runtime.engine import Engine, Prompt
from specrun.runtime.kv_cache import shared_prefix
from specrun.runtime.request import METHODS, canonical_method
from specrun.runtime.sampling import coupled_noise

DRAFT_LENGTHS: Final = (1, 2, 3, 4, 5, 8, 16)
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
    """One method, draft length and kind of sampling over all prompts.

    draft_length: None for the adaptive one. tokens: how many were compared. difference: where and by how much the
    first unequal text differs, None if all are equal. rounding: whether that is no more than the probe's bound allows:
    where exactness is "rounding", two tokens nearer to each other than twice the bound may change places.
    """

    method: str
    draft_length: int | None
    sampling: str
    prompts: int
    tokens: int
    equal: bool
    difference: str | None
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
    lookahead: Sequence[int] | None = None,
    max_tokens: int = 64,
    progress: Progress | None = None,
) -> Iterator[VerifyCase]:
    """Yield a case for every method x draft length (and the adaptive one) x {greedy, coupled}, as they are done.

    A draft length is that of a chain; heads with the adaptive one propose token trees, and so does lookahead with all,
    of that depth. The width probe is run anew first. prompts: a built-in set by default. methods: all that the engine
    can run by default. lookahead: as in `RequestOptions`.
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
        for method in methods:
            shape: dict[str, Any] = {"lookahead": lookahead} if method == "lookahead" else {}
            for draft_length in (*draft_lengths, None):
                how = {**options, **shape, "max_tokens": max_tokens}
                yield _case(engine, prompts, expected, method, draft_length, sampling, how, report)


def _case(
    engine: Engine,
    prompts: Sequence[Prompt],
    expected: Sequence[tuple[int, ...]],
    method: str,
    draft_length: int | None,
    sampling: str,
    options: dict[str, Any],
    report: Progress,
) -> VerifyCase:
    compared = 0
    for index, (prompt, wanted) in enumerate(zip(prompts, expected, strict=True)):
        report(f"{method}, K = {draft_length or 'adaptive'}, {sampling}", index, len(prompts))
        got = _tokens(engine, prompt, method=method, draft_length=draft_length, **options)
        compared += len(wanted)
        if got != wanted:
            text = f"prompt {index + 1}: {describe_difference(engine, prompt, wanted, got)}"
            near = _near(engine, prompt, wanted, got, options)
            return VerifyCase(method, draft_length, sampling, len(prompts), compared, False, text, near)
    return VerifyCase(method, draft_length, sampling, len(prompts), compared, True, None)


def _near(engine: Engine, prompt: Prompt, wanted: Sequence[int], got: Sequence[int], options: dict[str, Any]) -> bool:
    """Whether the two tokens at which texts part are nearer to each other than rounding may turn.

    Under coupled sampling what counts is the logit over the temperature with the token's noise, as that is what the
    largest is taken of.
    """
    bound, at = engine.calibration.bound, shared_prefix(wanted, got)
    if bound == 0.0 or at >= min(len(wanted), len(got)):
        return False
    pair = np.array(sorted((wanted[at], got[at])))
    before = [*engine.encode(prompt), *wanted[:at]]
    scores = engine.logits(before)[pair].astype(np.float64)
    temperature = float(options.get("temperature", 0.0))
    if temperature > 0.0:
        bound /= temperature
        noise = coupled_noise(pair, int(options["seed"]), 0, len(before))
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
