"""The options of one request, as `Engine.stream`, `Engine.generate` and `ChatSession.send` take them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict, Unpack

from specrun.models_cache.errors import UsageError
from specrun.runtime.grammar import Constraint, constraint_of
from specrun.runtime.lookahead import LookaheadShape
from specrun.runtime.options import GenerationOptions, SamplingMode, SamplingOptions

METHODS: Final = (
    "auto",
    "none",
    "draft",
    "ngram",
    "lookahead",
    "medusa",
    "eagle",
    "draft+ngram",
    "medusa+ngram",
    "eagle+ngram",
)
"""What a request may name; "ngram+eagle" and so on mean the same as "eagle+ngram"."""


class RequestOptions(TypedDict, total=False):
    """What a request may ask for; everything has a default.

    method               one of `METHODS`; by default that of the draft model or speculator given, else "auto": what is
                         fastest here, by `specrun tune` where it ran
    draft_length         draft tokens a round (K); by default as many as pay, by the acceptance seen
    lookahead            (W, N, G) of method "lookahead": columns of its window, length of its n-grams, guesses a token;
                         (3, 3, 3) by default
    max_tokens           at most so many tokens; by default what the context holds
    min_tokens           not to end before so many tokens (0)
    stop                 a string, or several, before which the text ends
    temperature          0 (the default) takes the most probable token; top_k (0), top_p (1) and min_p (0) filter
    repetition_penalty   1 is off; presence_penalty and frequency_penalty: 0 is off
    seed                 same seed, same text; by default drawn anew, and told by the result
    sampling             "coupled" (default): the same text with every method; "rejection": the papers' rule, the same
                         in distribution only
    logprobs             None: none; 0: of each token; n: of the n most probable ones too
    ignore_eos           end-of-text ids are ordinary tokens (False)
    system               a system message; raw: the prompt is not put into the chat template (False)
    sample_index         which of several samples of one seed this is (0)
    json_schema          the text fits this JSON schema (a dict, or JSON text); or regex: this regular expression; or
                         grammar: this grammar, in llguidance's Lark. The text ends where these say
    prediction           text that is likely to come, such as a file before a small change: n-grams copy from it first
    """

    method: str | None
    draft_length: int | None
    lookahead: Sequence[int] | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    sampling: SamplingMode
    logprobs: int | None
    ignore_eos: bool
    system: str | None
    raw: bool
    sample_index: int
    json_schema: Mapping[str, Any] | bool | str | None
    regex: str | None
    grammar: str | None
    prediction: str | None


@dataclass(frozen=True, slots=True)
class Request:
    """The options of one request, checked."""

    options: GenerationOptions
    method: str | None
    system: str | None
    raw: bool
    sample_index: int
    lookahead: LookaheadShape
    constraint: Constraint | None = None
    prediction: str | None = None


_SAMPLING_NAMES: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
_GENERATION_NAMES: Final = ("max_tokens", "min_tokens", "logprobs", "draft_length", "ignore_eos")


def request_options(**options: Unpack[RequestOptions]) -> Request:
    """Check a request's options; UsageError says which cannot be, or is not known, and how to mend it."""
    given: dict[str, Any] = {**options}
    unknown = sorted(set(given) - set(RequestOptions.__annotations__))
    if unknown:
        near = difflib.get_close_matches(unknown[0], RequestOptions.__annotations__, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"known ones are {', '.join(RequestOptions.__annotations__)}."
        raise UsageError(f"There is no option '{unknown[0]}': {hint}")
    method, sample_index = given.get("method"), given.get("sample_index", 0)
    if isinstance(method, str):
        method = canonical_method(method)
    if method is not None and method not in METHODS:
        raise UsageError(f"Unknown method '{method}': choose one of {', '.join(METHODS)}.")
    if isinstance(sample_index, bool) or not isinstance(sample_index, int) or not 0 <= sample_index < 2**64:
        raise UsageError(f"sample_index must be a whole number from 0 to 2**64 - 1, not {sample_index!r}.")
    shape = given.get("lookahead")
    if shape is not None and method != "lookahead":
        raise UsageError("lookahead sets up the method of that name: choose method 'lookahead' too.")
    stop = given.get("stop", ())
    sampling = SamplingOptions(
        mode=given.get("sampling", "coupled"), **{name: given[name] for name in _SAMPLING_NAMES if name in given}
    )
    generation = GenerationOptions(
        stop=tuple(stop) if isinstance(stop, Sequence) and not isinstance(stop, str) else (stop,),
        sampling=sampling if sampling.greedy else sampling.seeded(),
        **{name: given[name] for name in _GENERATION_NAMES if name in given},
    )
    constraint = constraint_of(given)
    if constraint is not None and generation.ignore_eos:
        raise UsageError(
            f"ignore_eos and {constraint.kind} exclude each other: the text must end where it is complete."
        )
    prediction = given.get("prediction")
    if prediction is not None and not isinstance(prediction, str):
        raise UsageError(f"prediction must be text, not {prediction!r:.60}.")
    if prediction and method not in (None, "auto", "none") and "ngram" not in method:
        raise UsageError(f"A prediction is used by n-grams: choose a method with them, not '{method}'.")
    return Request(
        generation,
        method,
        given.get("system"),
        bool(given.get("raw", False)),
        sample_index,
        LookaheadShape() if shape is None else LookaheadShape.of(shape),
        constraint,
        prediction,
    )


def canonical_method(method: str) -> str:
    """The method as `METHODS` spells it: n-grams come second."""
    first, plus, second = method.partition("+")
    return f"{second}+{first}" if plus and first == "ngram" and second != "ngram" else method
