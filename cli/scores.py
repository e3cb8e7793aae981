"""What `--score` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrun.runtime.best_of import Score


def parse_score(text: str, *, seconds: float | None = None, threads: int | None = None) -> Score:
    """The score that a `--score` names. Raises UsageError for one that is not known."""
    from specrun.models_cache.errors import UsageError
    from specrun.runtime.best_of.likelihood import CertaintyScore, LogprobScore

    known: dict[str, type[Score]] = {"logprob": LogprobScore, "certainty": CertaintyScore}
    if text not in known:
        raise UsageError(f"There is no score {text!r}: choose from {', '.join(known)}.")
    return known[text]()
