"""The acceptance rules: pure functions over distributions and random numbers.

p is the target's distribution of a row (after penalties, temperature and filters), q the draft's. Row j of a chain is
the distribution of the token after draft tokens d1 .. dj, so K draft tokens have rows 0 .. K. Rows are asked for one by
one, in order, each once, and only as far as they are reached: a caller may push d(j) to its token counts on asking for
row j. With u uniform in [0, 1):

    chain, sampled q          accept x if u < p(x) / q(x), else emit from norm((p - q)+); all pass: bonus from p
                              (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1)
    chain, deterministic      draw y ~ p; accept x if y = x, else emit y: the same rule with q a point mass
    chain, coupled or greedy  y is the target's own choice at that position; accept x if y = x, else emit y
    tree, deterministic       draw y ~ p (or take the target's choice); descend to the child y if there is one, else
                              emit y: the point-mass rule over siblings
    tree, drawn without       R = p, D = q; for each child x in draw order accept if u < R(x) / D(x), else
    replacement               R = norm((R - D)+), D(x) = 0, D renormalised; all fail: emit from R
                              (Jeon et al. 2024; Chen et al. 2024, Sequoia, algorithm 2)

Target and draft may have different supports: what a distribution does not list has probability 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specrun.runtime.sampling import Distribution, RandomStream, coupled_token, sample

__all__ = [
    "NodeStep",
    "Outcome",
    "OutcomeKind",
    "Rows",
    "TreeOutcome",
    "accept_tree",
    "choose_child",
    "coupled_chain",
    "draw_children",
    "greedy_chain",
    "match_chain",
    "rejection_chain",
    "rejection_chain_deterministic",
    "residual",
    "sampled_children",
]

OutcomeKind = Literal["correction", "bonus"]
Rows = Callable[[int], Distribution]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a chain came to.

    num_accepted  draft tokens d1 .. dn that stand
    next_token    the token after them
    kind          'bonus' if every draft token stands, else 'correction'
    """

    num_accepted: int
    next_token: int
    kind: OutcomeKind


@dataclass(frozen=True, slots=True)
class NodeStep:
    """What one tree node came to: `child` is the place among its children to descend to, or None to emit `token`."""

    child: int | None
    token: int


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    """What a tree came to.

    path        accepted nodes from the root's child on, indices into the tree's arrays
    next_token  the token after them
    kind        'bonus' if the path ends at a leaf (or the tree is empty), else 'correction'
    """

    path: tuple[int, ...]
    next_token: int
    kind: OutcomeKind


def match_chain(draft_tokens: Sequence[int], choose: Callable[[int], int]) -> Outcome:
    """Accept as long as the target's own choice, choose(j) for row j, is the draft token."""
    for row, token in enumerate(draft_tokens):
        choice = choose(row)
        if choice != token:
            return Outcome(row, choice, "correction")
    return Outcome(len(draft_tokens), choose(len(draft_tokens)), "bonus")


def greedy_chain(choices: Sequence[int] | npt.NDArray[np.int64], draft_tokens: Sequence[int]) -> Outcome:
    """Greedy: choices i64 [at least K + 1] are the target's most probable ids, row by row."""
    return match_chain(draft_tokens, lambda row: int(choices[row]))


def coupled_chain(
    draft_tokens: Sequence[int],
    rows: Rows,
    *,
    seed: int,
    sample_index: int,
    position: int,
    vocabulary: int | None = None,
) -> Outcome:
    """Coupled sampling: the tokens are those of plain decoding with the same seed, for any proposal of any kind.

    position  absolute position of d1, the token that row 0 decides
    """
    return match_chain(
        draft_tokens,
        lambda row: coupled_token(
            rows(row), seed=seed, sample_index=sample_index, position=position + row, vocabulary=vocabulary
        ),
    )


def rejection_chain_deterministic(draft_tokens: Sequence[int], rows: Rows, stream: RandomStream) -> Outcome:
    """The rejection rule for draft tokens that are a function of the text; one random number a row."""
    return match_chain(draft_tokens, lambda row: sample(rows(row), stream.uniform()))


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm((p - q)+); p itself where rounding leaves nothing of it."""
    mass = p.probs - q.probs_of(p.ids)
    positive = mass > 0.0
    if not positive.any():
        return p
    kept = mass[positive]
    return Distribution(p.ids[positive], kept / kept.sum())


def rejection_chain(
    draft_tokens: Sequence[int], q: Sequence[Distribution], rows: Rows, stream: RandomStream
) -> Outcome:
    """The rejection rule for draft tokens drawn from q[0] .. q[K-1].

    Each q must be the distribution that its token was drawn from, after the draft's own filters. ValueError if one
    gives its token no probability: then it was not.
    """
    for row, token in enumerate(draft_tokens):
        p = rows(row)
        drawn_with = q[row].prob(token)
        if drawn_with <= 0.0:
            raise ValueError(f"draft token {token} cannot have been drawn: its q is 0")
        if stream.uniform() * drawn_with >= p.prob(token):
            return Outcome(row, sample(residual(p, q[row]), stream.uniform()), "correction")
    return Outcome(len(draft_tokens), sample(rows(len(draft_tokens)), stream.uniform()), "bonus")


def choose_child(children: Sequence[int], choice: int) -> NodeStep:
    """Deterministic children: descend to the one that is the target's choice (greedy, coupled, or drawn from p)."""
    return NodeStep(children.index(choice) if choice in children else None, choice)


def _without(weights: npt.NDArray[np.float64], tried: Sequence[int]) -> npt.NDArray[np.float64] | None:
    """Weights [V] without the tried ids, sum 1; uniform over the untried if nothing is left; None if all are tried."""
    left = weights.copy()
    left[list(tried)] = 0.0
    total = left.sum()
    if total > 0.0:
        left /= total
        return left
    if len(tried) == left.size:
        return None
    left[:] = 1.0 / (left.size - len(tried))
    left[list(tried)] = 0.0
    return left


def draw_children(q: Distribution, count: int, stream: RandomStream, *, tokens: int) -> tuple[int, ...]:
    """Draw `count` different children from q without replacement, in draw order (fewer if `tokens` ids are fewer).

    When the support of q is used up the rest is drawn uniformly from the other ids below `tokens`.
    """
    weights = q.dense(tokens)
    drawn: list[int] = []
    while len(drawn) < count:
        left = _without(weights, drawn)
        if left is None:
            break
        drawn.append(sample(Distribution.from_dense(left), stream.uniform()))
    return tuple(drawn)


def sampled_children(
    p: Distribution, q: Distribution, children: Sequence[int], stream: RandomStream, *, tokens: int
) -> NodeStep:
    """Children drawn from q without replacement, in draw order (`draw_children`); no two may be equal.

    tokens  size of the real vocabulary, which both distributions lie within
    """
    left = p.dense(tokens)
    weights = q.dense(tokens)
    for place, token in enumerate(children):
        draft = _without(weights, children[:place])
        if draft is None or draft[token] <= 0.0:
            raise ValueError(f"child {token} cannot have been drawn: its q is 0")
        if stream.uniform() * draft[token] < left[token]:
            return NodeStep(place, token)
        rest = np.maximum(left - draft, 0.0)
        total = rest.sum()
        if total <= 0.0:  # only rounding comes here: where R = D the child is accepted
            break
        left = rest / total
    return NodeStep(None, sample(Distribution.from_dense(left), stream.uniform()))


def accept_tree(
    tokens: Sequence[int], parents: Sequence[int], step: Callable[[int, tuple[int, ...]], NodeStep]
) -> TreeOutcome:
    """Walk a token tree from the root, asking `step` at each node reached.

    tokens   draft token of each node, parents before children, siblings in draw order
    parents  index of each node's parent; -1 for children of the root (the last committed token)
    step     step(node, child tokens) -> NodeStep by one of the rules; node -1 is the root; no children: it must emit

    Errors: ValueError if siblings are equal, a parent follows its child, or a leaf's step descends.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}: parents come first")
        siblings = children.setdefault(parent, [])
        if any(tokens[other] == tokens[node] for other in siblings):
            raise ValueError(f"node {node} repeats the token {tokens[node]} of a sibling")
        siblings.append(node)
    path: list[int] = []
    node = -1
    while True:
        below = children.get(node, [])
        outcome = step(node, tuple(tokens[child] for child in below))
        if outcome.child is None:
            return TreeOutcome(tuple(path), outcome.token, "correction" if below else "bonus")
        if outcome.child >= len(below):
            raise ValueError(f"node {node} has {len(below)} children: there is none at place {outcome.child}")
        node = below[outcome.child]
        path.append(node)
