"""What a request asks for: frozen values, checked once, so that no later code has to check them again."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import secrets
from typing import Final, Literal, cast

from specrun.models_cache.errors import UsageError

__all__ = ["GREEDY_BELOW", "GenerationOptions", "SamplingMode", "SamplingOptions"]

SamplingMode = Literal["coupled", "rejection"]

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy: dividing by them says nothing but 'take the largest logit'."""

_SEED_END: Final = 2**64


def _number(name: str, value: object, low: float, high: float, wanted: str) -> float:
    """The finite number `value` as a float in [low, high], or UsageError: '`name` must be `wanted`'."""
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number) and low <= number <= high:
            return number
    raise UsageError(f"{name} must be {wanted}, not {value!r}.")


def _integer(name: str, value: object, low: int, high: int | None, wanted: str) -> int:
    """The whole number `value` as an int in [low, high], or UsageError: '`name` must be `wanted`'."""
    refused = UsageError(f"{name} must be {wanted}, not {value!r}.")
    if isinstance(value, bool):
        raise refused
    try:
        number = operator.index(cast(int, value))
    except TypeError:
        raise refused from None
    if number < low or (high is not None and number > high):
        raise refused
    return number


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is chosen from the target's logits; the same for every method.

    temperature         >= 0; below 1e-5 the choice is greedy (the largest logit, lowest id on ties)
    top_k               keep the k largest logits; 0 keeps all
    top_p               in (0, 1]: keep the fewest tokens whose probabilities reach top_p; 1 keeps all
    min_p               in [0, 1]: keep tokens with at least min_p times the largest probability; 0 keeps all
    repetition_penalty  > 0; 1 is off (ids of prompt and output; CTRL, Keskar et al. 2019, section 4.1)
    presence_penalty    in [-2, 2]; 0 is off (ids of the output)
    frequency_penalty   in [-2, 2]; 0 is off (ids of the output, times their count)
    seed                in [0, 2**64); None lets `seeded` draw one
    mode                'coupled': same seed, same text, with or without speculation; 'rejection': the rule of the
                        papers, exact in distribution only

    Errors: UsageError for a value that cannot be.

    >>> SamplingOptions(temperature=1e-6).greedy
    True
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    mode: SamplingMode = "coupled"

    def __post_init__(self) -> None:
        keep = object.__setattr__
        keep(self, "temperature", _number("temperature", self.temperature, 0.0, math.inf, "0 (greedy) or more"))
        keep(self, "top_k", _integer("top_k", self.top_k, 0, None, "0 (off) or a positive whole number"))
        smallest = math.nextafter(0.0, 1.0)
        keep(self, "top_p", _number("top_p", self.top_p, smallest, 1.0, "above 0 and at most 1 (off)"))
        keep(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0, "between 0 (off) and 1"))
        keep(
            self,
            "repetition_penalty",
            _number("repetition_penalty", self.repetition_penalty, smallest, math.inf, "above 0 (1 is off)"),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            keep(self, name, _number(name, getattr(self, name), -2.0, 2.0, "between -2 and 2 (0 is off)"))
        if self.seed is not None:
            keep(self, "seed", _integer("seed", self.seed, 0, _SEED_END - 1, "a whole number from 0 to 2**64 - 1"))
        if self.mode not in ("coupled", "rejection"):
            raise UsageError(f"mode must be 'coupled' or 'rejection', not {self.mode!r}.")

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        """True if a penalty is on, so that the distribution depends on the tokens before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filtered(self) -> bool:
        """True if top-k, top-p or min-p leaves tokens out."""
        return self.top_k != 0 or self.top_p != 1.0 or self.min_p != 0.0

    def seeded(self) -> SamplingOptions:
        """These options with a seed: the given one, or one drawn from the operating system."""
        if self.seed is not None:
            return self
        return dataclasses.replace(self, seed=secrets.randbelow(2**32))


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What one request asks for.

    max_tokens    at most so many tokens; 0 runs no model; None leaves it to the context length
    stop          strings that end the text; they are not part of it
    sampling      how tokens are chosen
    logprobs      None: none; 0: the chosen token's; n: the n most probable ones' as well
    min_tokens    see below
    draft_length  draft tokens a round (K); 0 proposes nothing; None leaves it to the method
    ignore_eos    end-of-sequence ids are ordinary tokens
    certainties   tell of each token how decided the distribution was, for the scores of best-of-N

    min_tokens is one rule, with and without a draft: the token that ends the text is at the earliest number
    min_tokens + 1. Until min_tokens tokens are emitted the end-of-sequence ids have probability 0 (in the row that
    decides each token, drafted or not), and a stop string that one of these tokens completes does not stop, neither
    then nor later. max_tokens still cuts.

    Errors: UsageError for a value that cannot be, and for min_tokens above max_tokens.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    logprobs: int | None = None
    min_tokens: int = 0
    draft_length: int | None = None
    ignore_eos: bool = False
    certainties: bool = False

    def __post_init__(self) -> None:
        keep = object.__setattr__
        for name in ("max_tokens", "logprobs", "draft_length", "min_tokens"):
            value = getattr(self, name)
            if value is not None or name == "min_tokens":
                keep(self, name, _integer(name, value, 0, None, "0 or a positive whole number"))
        stop: object = self.stop
        if not isinstance(stop, (tuple, list)) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop must be a tuple of strings that are not empty, such as ('END',), not {stop!r}.")
        keep(self, "stop", tuple(stop))
        if not isinstance(self.sampling, SamplingOptions):
            raise UsageError(f"sampling must be a SamplingOptions, not {self.sampling!r}.")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos must be True or False, not {self.ignore_eos!r}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}): lower one or raise the other."
            )

    def may_end(self, number: int) -> bool:
        """Whether completion token `number` (counted from 1) may end the text by EOS or by completing a stop string."""
        return number > self.min_tokens
