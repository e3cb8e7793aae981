"""What best-of-N gave: the winner, all candidates with their scores, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from specrun.models_cache.errors import UsageError
from specrun.models_cache.manifest import SHARED_GRAPH
from specrun.runtime.best_of.candidates import Candidate, is_number
from specrun.runtime.result import SpeculationStats, Usage

EXACT_TO: Final = "plain decoding of the shared-prefix graph with the same seed; generate's graph rounds otherwise"
COPIES_EXACT_TO: Final = "plain decoding with the same seed, which is what generate gives"


@dataclass(frozen=True, slots=True)
class BestOfTimings:
    """Seconds. The prompt is read once; score_s is what scoring took after decoding."""

    load_s: float
    prefill_s: float
    decode_s: float
    score_s: float


@dataclass(frozen=True, slots=True)
class BestOfMemory:
    """Bytes of buffers as they were allocated.

    kv_prefix_bytes  keys and values of the prompt, once
    kv_rows_bytes    those of the rows, spare slots included
    kv_copied_bytes  what as many rows with as many slots would take with the prompt copied into each
    """

    weights_bytes: int
    kv_prefix_bytes: int
    kv_rows_bytes: int
    kv_copied_bytes: int

    @property
    def kv_saved(self) -> float:
        """The share of the copies' bytes that is not needed."""
        return 1.0 - (self.kv_prefix_bytes + self.kv_rows_bytes) / self.kv_copied_bytes if self.kv_copied_bytes else 0.0


@dataclass(frozen=True, slots=True)
class BestOfResult:
    """The candidates of one prompt in order, their scores, and the winner: the highest score, the first of equal ones.

    winner      None where no candidate may be chosen (all scores are -inf, or nothing was written)
    exactness   of the candidates' texts, against plain decoding of the same graph (`EXACT_TO`, or `COPIES_EXACT_TO`
                where the prompt is copied into every row): "bitwise", "rounding" or "distribution", as in `Result`
    usage       completion tokens of all candidates together
    rounds      runs of the rows together; `speculation` counts each row's
    pruned      candidates that were ended because they could not win; cut: those that a budget ended
    pass_at_k   by k, the unbiased chance that one of k candidates is right, where labels were given
    """

    winner: Candidate | None
    candidates: tuple[Candidate, ...]
    scores: tuple[float, ...]
    score: str
    model: str
    method: str
    exactness: str
    seed: int | None
    usage: Usage
    timings: BestOfTimings
    rounds: int
    speculation: SpeculationStats
    memory: BestOfMemory
    pruned: tuple[int, ...] = ()
    cut: tuple[int, ...] = ()
    pass_at_k: dict[int, float] | None = None

    @property
    def text(self) -> str:
        """The winner's text; empty without one."""
        return self.winner.text if self.winner is not None else ""

    def to_json(self, *, candidates: bool = False) -> dict[str, Any]:
        """The JSON of `best-of`; `candidates`: list all of them, best first."""
        winner, shared = self.winner, self.memory.kv_prefix_bytes > 0
        body: dict[str, Any] = {
            "text": self.text,
            "index": None if winner is None else winner.index,
            "score": None if winner is None else _number(self.scores[winner.index]),
            "score_name": self.score,
            "token_ids": [] if winner is None else list(winner.token_ids),
            "finish_reason": None if winner is None else winner.finish_reason,
            "n": len(self.candidates),
            "model": self.model,
            "method": self.method,
            "exactness": self.exactness,
            "exact_to": EXACT_TO if shared else COPIES_EXACT_TO,
            "graph": SHARED_GRAPH if shared else "target",
            "seed": self.seed,
            "usage": asdict(self.usage),
            "timings": asdict(self.timings),
            "rounds": self.rounds,
            "speculation": self.speculation.to_json(),
            "memory": asdict(self.memory) | {"kv_saved": self.memory.kv_saved},
            "pruned": list(self.pruned),
            "cut": list(self.cut),
        }
        if self.pass_at_k is not None:
            body["pass_at_k"] = {str(k): chance for k, chance in self.pass_at_k.items()}
        if candidates:
            body["candidates"] = [
                {
                    "index": candidate.index,
                    "score": _number(self.scores[candidate.index]),
                    "text": candidate.text,
                    "finish_reason": candidate.finish_reason,
                    "tokens": len(candidate.token_ids),
                }
                for candidate in self.ranked()
            ]
        return body

    def ranked(self) -> list[Candidate]:
        """The candidates, best first, the first of equal ones first."""
        return sorted(self.candidates, key=lambda candidate: -self.scores[candidate.index])


def choose(candidates: Sequence[Candidate], scores: Sequence[float]) -> Candidate | None:
    """The candidate of the highest score, the first of equal ones; None where none has a score above -inf."""
    best: Candidate | None = None
    for candidate in candidates:
        score = scores[candidate.index]
        if not is_number(score):
            raise UsageError(f"The score of candidate {candidate.index} is no number: mend the score.")
        if candidate.token_ids and score > (-math.inf if best is None else scores[best.index]):
            best = candidate
    return best


def merged(parts: Sequence[SpeculationStats]) -> SpeculationStats:
    """The sums of the counters."""
    total = SpeculationStats()
    for part in parts:
        for entry in fields(SpeculationStats):
            setattr(total, entry.name, getattr(total, entry.name) + getattr(part, entry.name))
    return total


def _number(value: float) -> float | None:
    """JSON has no infinities."""
    return value if math.isfinite(value) else None
