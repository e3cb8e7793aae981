"""Says whether a draft goes with a target, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specrun.models_cache.layout import find_bundle
from specrun.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PairCheck:
    """`fits`: the pair works. `reasons`: what forbids it, or, if nothing does, what makes it less useful."""

    fits: bool
    reasons: tuple[str, ...]
    facts: dict[str, Any] = field(default_factory=dict)


def check_pair(target: str | Path, draft: str | Path) -> PairCheck:
    """Compare two bundles, given by name or path: tokenizers, end-of-text ids, contexts, weights.

    Raises ModelNotFoundError and the errors of damaged bundles.
    """
    first, second = find_bundle(target), find_bundle(draft)
    ours, theirs = first.manifest, second.manifest
    reasons: list[str] = []
    hints: list[str] = []
    difference = Tokenizer.from_bundle(first).first_difference(Tokenizer.from_bundle(second))
    if difference is not None:
        token_id, a, b = difference
        reasons.append(
            f"the tokenizers differ: id {token_id} is {a!r} in {ours.name} and {b!r} in {theirs.name}; "
            "a draft must come from the same model family"
        )
    if theirs.sizes.context < ours.sizes.context:
        hints.append(
            f"{theirs.name} holds {theirs.sizes.context} positions and {ours.name} {ours.sizes.context}: "
            "beyond that decoding goes on without a draft"
        )
    if set(theirs.special_ids.eos) != set(ours.special_ids.eos):
        hints.append("their end-of-text ids differ: the target's count")
    weights, draft_weights = first.weights_bytes, second.weights_bytes
    if draft_weights * 2 > weights:
        hints.append(
            f"the draft's weights are {draft_weights / weights:.0%} of the target's: a draft pays when a step costs "
            "much less than a target's"
        )
    facts = {
        "target": ours.name,
        "draft": theirs.name,
        "tokens": [ours.sizes.tokens, theirs.sizes.tokens],
        "vocabulary": [ours.sizes.vocabulary, theirs.sizes.vocabulary],
        "context": [ours.sizes.context, theirs.sizes.context],
        "weights_bytes": [weights, draft_weights],
    }
    return PairCheck(not reasons, tuple(reasons or hints), facts)
