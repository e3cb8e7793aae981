"""The options of one request, as `Engine.stream` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.models_cache.errors import UsageError
from specrun.runtime.options import GenerationOptions, SamplingMode, SamplingOptions

METHODS = ("none", "draft", "ngram")


@dataclass(frozen=True, slots=True)
class Request:
    """The options of one request, checked."""

    options: GenerationOptions
    method: str | None
    system: str | None
    raw: bool
    sample_index: int


def request_options(
    *,
    method: str | None = None,
    draft_length: int | None = None,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    stop: Sequence[str] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    seed: int | None = None,
    sampling: SamplingMode = "coupled",
    logprobs: int | None = None,
    ignore_eos: bool = False,
    system: str | None = None,
    raw: bool = False,
    sample_index: int = 0,
) -> Request:
    """Check the options of `Engine.stream` and `Engine.generate`; UsageError says which cannot be and why.

    method: none, draft or ngram; by default draft with a draft model and ngram without. draft_length: draft tokens a
    round; by default as many as pay, from the acceptance seen. max_tokens: by default what the context holds.
    The rest is documented at `SamplingOptions` and `GenerationOptions`.
    """
    if method is not None and method not in METHODS:
        raise UsageError(f"Unknown method '{method}': choose one of {', '.join(METHODS)}.")
    if isinstance(stop, str):
        stop = (stop,)
    if isinstance(sample_index, bool) or not isinstance(sample_index, int) or not 0 <= sample_index < 2**64:
        raise UsageError(f"sample_index must be a whole number from 0 to 2**64 - 1, not {sample_index!r}.")
    chosen = SamplingOptions(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        mode=sampling,
    )
    options = GenerationOptions(
        max_tokens=max_tokens,
        stop=tuple(stop),
        sampling=chosen if chosen.greedy else chosen.seeded(),
        logprobs=logprobs,
        min_tokens=min_tokens,
        draft_length=draft_length,
        ignore_eos=ignore_eos,
    )
    return Request(options, method, system, raw, sample_index)
