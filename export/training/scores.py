"""How often the candidates of each depth and rank are the target's own best token."""

from __future__ import annotations

import torch
from torch import Tensor

RANKS = 8


class Scores:
    """Counts by depth: places whose path so far was right, and of those, the rank at which the target's token stood.

    counts  f64 [depths, 1 + RANKS]: tried, then right at rank 0, 1, ...
    """

    def __init__(self, depths: int) -> None:
        self.counts = torch.zeros(depths, 1 + RANKS, dtype=torch.float64)

    def add(self, depth: int, wanted: Tensor, ranks: Tensor, right: Tensor | None) -> Tensor:
        """Count one depth; bool, like `wanted`: the path was right before, and the best candidate of this depth is.

        wanted: places that count; ranks: i64 [number of them], as `rank_of_best` gives them; right: where the path was
        right before, None for everywhere
        """
        reached = wanted if right is None else wanted & right
        inside = ranks[reached[wanted]]
        self.counts[depth, 0] += len(inside)
        self.counts[depth, 1:] += torch.bincount(inside.clamp(max=RANKS), minlength=RANKS + 1)[:RANKS].cpu()
        stands = torch.zeros_like(wanted)
        stands[wanted] = ranks == 0
        return stands & reached

    def merge(self, other: Scores) -> None:
        """Add the counts of another."""
        self.counts += other.counts

    def acceptance(self) -> list[list[float]]:
        """[depth][rank]: the chance that the candidate is the target's token where the path so far was right."""
        rates = self.counts[:, 1:] / self.counts[:, :1].clamp(min=1)
        return [[round(float(rate), 4) for rate in row] for row in rates]

    def mean_accepted_tokens(self) -> float:
        """Tokens a round of a chain of all depths, the bonus or correction included."""
        total = reach = 1.0
        for row in self.acceptance():
            reach *= row[0]
            total += reach
        return total


def rank_of_best(logits: Tensor, target: Tensor, written: Tensor) -> Tensor:
    """At which rank of `logits` the target's most probable token stands, i64 [rows]; RANKS where it cannot.

    logits and target [rows, draft vocabulary], the target's as logits or probabilities; written: i64 [rows], the token
    that stands there in the text, as a row of the draft vocabulary, -1 for one that it lacks. What the vocabulary lacks
    is known of the written token alone, and no candidate is right there; of equal ones the written token is the
    target's. Of equal logits the first counts as better.
    """
    known = written >= 0
    most, best = target.max(-1)
    place = written.clamp(min=0)
    best = torch.where(known & (target.gather(-1, place[:, None])[:, 0] == most), place, best)
    mine = logits.gather(-1, best[:, None])
    earlier = torch.arange(logits.shape[-1], device=logits.device) < best[:, None]
    found = ((logits > mine) | (logits == mine) & earlier).sum(-1)
    return torch.where(known, found, RANKS)
