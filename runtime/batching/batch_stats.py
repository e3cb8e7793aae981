"""What a batch has done so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from specrun.runtime.result import Result


@dataclass(slots=True)
class BatchStats:
    """Counters of a batch.

    done, failed        requests that were answered, and those of them whose answer is an error
    prompt_tokens       of answered requests; cached_tokens of them came from rows before, prefill_tokens were run
    completion_tokens   of answered requests
    rounds, row_rounds  runs after the prefill, and the same counted for each row in them
    proposed, evaluated, accepted   draft tokens of answered requests, as in `SpeculationStats`
    prefill_s, draft_s, run_s, rest_s   seconds of reading prompts, of looking up n-grams and what speculators draft for
                        all rows together, of the rounds' runs, and of what rounds do besides
    widths              rounds by (rows, width)
    """

    batch_size: int
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    row_rounds: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    run_s: float = 0.0
    rest_s: float = 0.0
    widths: Counter[tuple[int, int]] = field(default_factory=Counter)

    @property
    def decode_s(self) -> float:
        """Seconds of the rounds."""
        return self.draft_s + self.run_s + self.rest_s

    @property
    def acceptance_rate(self) -> float:
        """accepted / evaluated; 0 if nothing was evaluated."""
        return self.accepted / self.evaluated if self.evaluated else 0.0

    def count_round(self, *, rows: int, width: int, run_s: float, rest_s: float, draft_s: float = 0.0) -> None:
        """Count one round of so many rows."""
        self.rounds += 1
        self.row_rounds += rows
        self.draft_s += draft_s
        self.run_s += run_s
        self.rest_s += rest_s
        self.widths[rows, width] += 1

    def count_result(self, result: Result) -> None:
        """Count an answer."""
        self.done += 1
        self.prompt_tokens += result.usage.prompt_tokens
        self.cached_tokens += result.usage.cached_tokens
        self.completion_tokens += result.usage.completion_tokens
        self.proposed += result.speculation.proposed
        self.evaluated += result.speculation.evaluated
        self.accepted += result.speculation.accepted

    def count_alone(self, result: Result) -> None:
        """Count an answer that was run by itself."""
        self.count_result(result)
        self.prefill_tokens += result.usage.prompt_tokens - result.usage.cached_tokens
        self.rounds += result.speculation.rounds
        self.row_rounds += result.speculation.rounds
        self.prefill_s += result.timings.prefill_s
        self.run_s += result.speculation.verify_s
        self.draft_s += result.speculation.draft_s
        self.rest_s += result.timings.decode_s - result.speculation.verify_s - result.speculation.draft_s

    def to_json(self) -> dict[str, Any]:
        """An object with every counter but `widths`."""
        names = [name for name in self.__dataclass_fields__ if name != "widths"]
        return {name: getattr(self, name) for name in names} | {"acceptance_rate": self.acceptance_rate}
