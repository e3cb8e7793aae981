"""One result type for plain and speculative runs, and the few counters with the identities that tests hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Source = Literal["prefill", "draft", "correction", "bonus"]
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token: where it came from, and its log-probability in nats if asked for.

    certainty: for best-of-N, KL(uniform || p) in nats of the distribution that it was drawn from.
    """

    id: int
    source: Source
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    certainty: float | None = None


@dataclass(slots=True)
class SpeculationStats:
    """Counters of one request.

    rounds       target runs after the prefill
    proposed     draft tokens that the target checked in its run: all nodes of a tree
    evaluated    places where draft tokens were decided, up to the first rejected one or the end of the text
    accepted     draft tokens that stand; corrections and bonuses: tokens from the target's own distribution
    discarded    emitted tokens that a stop string took back

    accepted <= evaluated <= proposed; completion tokens = 1 + accepted + corrections + bonuses - discarded.
    A round without draft tokens ends in a bonus. One whose last choice was left open (`side_branches`), or whose last
    draft token ends the text, has neither correction nor bonus.
    """

    rounds: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    corrections: int = 0
    bonuses: int = 0
    discarded: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    histogram: Counter[int] = field(default_factory=Counter)

    def count_round(
        self, *, proposed: int, accepted: int, kind: Source | None, draft_s: float, verify_s: float
    ) -> None:
        """Count one round; `kind` of the token after the accepted ones, None if there is none."""
        self.rounds += 1
        self.proposed += proposed
        self.evaluated += accepted + (kind == "correction")
        self.accepted += accepted
        self.corrections += kind == "correction"
        self.bonuses += kind == "bonus"
        self.histogram[accepted] += 1
        self.draft_s += draft_s
        self.verify_s += verify_s

    @property
    def decided(self) -> int:
        """Tokens emitted, the prefill's included, before a stop string took any back."""
        return 1 + self.accepted + self.corrections + self.bonuses

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a target run (MAT), correction or bonus included; plain decoding has 1."""
        return (self.accepted + self.corrections + self.bonuses) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / evaluated; 0 if nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    def to_json(self) -> dict[str, Any]:
        """The object `speculation` of the JSON; `accepted_histogram[n]` counts rounds that accepted n draft tokens."""
        top = max(self.histogram, default=-1)
        return {
            "rounds": self.rounds,
            "proposed": self.proposed,
            "evaluated": self.evaluated,
            "accepted": self.accepted,
            "corrections": self.corrections,
            "bonuses": self.bonuses,
            "discarded": self.discarded,
            "mean_accepted_tokens": self.mean_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "accepted_histogram": [self.histogram[count] for count in range(top + 1)],
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
        }


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; `cached_tokens` of the prompt came from the KV of an earlier request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. The decode time begins after the prefill's token."""

    load_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of weights (target and draft) and of the KV buffers."""

    weights_bytes: int
    kv_target_bytes: int
    kv_draft_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What one request gave. `token_ids` are those whose text was delivered, and an end-of-text id if one came.

    exactness, against plain decoding: "bitwise" the same; "rounding" the same but for rounding, where the probe found
    no exact widths on this machine; "distribution" under the rejection rule, where the text depends on the method.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    model: str
    method: str
    exactness: str
    seed: int | None
    usage: Usage
    timings: Timings
    speculation: SpeculationStats
    memory: Memory
    tokens: tuple[Token, ...]

    def to_json(self, texts: Sequence[str] | None = None) -> dict[str, Any]:
        """The stable JSON of `generate`; with `texts`, one for each token, `tokens` is listed too."""
        decoded = self.usage.completion_tokens - 1
        prefilled = self.usage.prompt_tokens - self.usage.cached_tokens
        timings = asdict(self.timings) | {
            "prefill_tokens_per_s": _rate(prefilled, self.timings.prefill_s),
            "decode_tokens_per_s": _rate(decoded, self.timings.decode_s),
        }
        body: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "model": self.model,
            "method": self.method,
            "exactness": self.exactness,
            "seed": self.seed,
            "usage": asdict(self.usage),
            "timings": timings,
            "speculation": self.speculation.to_json(),
            "memory": asdict(self.memory),
        }
        if texts is not None:
            body["tokens"] = [_token_json(token, text) for token, text in zip(self.tokens, texts, strict=True)]
        return body


def _token_json(token: Token, text: str) -> dict[str, Any]:
    body: dict[str, Any] = {"id": token.id, "text": text, "source": token.source}
    if token.logprob is not None:
        body["logprob"] = token.logprob
        if token.top_logprobs:
            body["top_logprobs"] = [{"id": id_, "logprob": value} for id_, value in token.top_logprobs]
    return body


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0
