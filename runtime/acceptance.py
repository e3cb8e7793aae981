"""The acceptance rules: pure functions over distributions and random numbers.

p is the target's distribution of a row (after penalties, temperature and filters), q the draft's. The walk goes down
the tree of a proposal from its root, the newest committed token; a chain is a tree with one child a node. The row of a
node is the distribution of the token after it, asked for when the node is reached, and only then. With u in [0, 1):

    greedy, coupled          y is the target's own choice at that position; descend to the child y if there is one,
                             else emit y
    rejection, deterministic the same with y drawn from p: the point-mass rule over siblings
    rejection, one child x   accept if u < p(x) / q(x), else emit from norm((p - q)+)
    drawn from q             (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, theorem 1)
    rejection, children      R = p, D = q; for each child x in draw order accept if u < R(x) / D(x), else
    drawn without            R = norm((R - D)+), D(x) = 0, D renormalised; all fail: emit from R
    replacement              (Jeon et al. 2024; Chen et al. 2024, Sequoia, algorithm 2)
    a leaf                   emit from p

Target and draft may have different supports: what a distribution does not list has probability 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import Distribution, RandomStream, sample

__all__ = [
    "OPEN",
    "NodeStep",
    "Outcome",
    "OutcomeKind",
    "accept_tree",
    "choose_child",
    "draw_children",
    "residual",
    "sampled_children",
]

OutcomeKind = Literal["correction", "bonus"]


class NodeStep(NamedTuple):
    """What one node came to: `child` is the place among its children to descend to, or None to emit `token`."""

    child: int | None
    token: int | None


OPEN: Final = NodeStep(None, None)
"""Nothing is emitted: the row cannot tell."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a proposal came to.

    path        the nodes gone through, from a child of the root on
    next_token  the token after them; None after the end of the text, or where a step was open
    kind        'bonus' if the path ends at a leaf (or nothing was proposed), else 'correction'; None with next_token
    """

    path: tuple[int, ...]
    next_token: int | None
    kind: OutcomeKind | None


def accept_tree(
    proposal: Proposal, step: Callable[[int, tuple[int, ...]], NodeStep], ends: Set[int] = frozenset()
) -> Outcome:
    """Walk a proposal from the root, asking step(node, tokens of its children) at each node reached; -1 is the root.

    A node without children must emit (ValueError). The walk stops at a node whose token is one of `ends`: what would
    come after the end of the text is not asked for.
    """
    tokens = proposal.tokens
    path: list[int] = []
    node = -1
    while True:
        nodes = proposal.children(node)
        taken = step(node, (tokens[nodes[0]],) if len(nodes) == 1 else tuple([tokens[child] for child in nodes]))
        if taken.child is None:
            kind: OutcomeKind | None = "correction" if nodes else "bonus"
            return Outcome(tuple(path), taken.token, None if taken.token is None else kind)
        if taken.child >= len(nodes):
            raise ValueError(f"node {node} has {len(nodes)} children: there is none at place {taken.child}")
        node = nodes[taken.child]
        path.append(node)
        if taken.token in ends:
            return Outcome(tuple(path), None, None)


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


def residual(p: Distribution, q: Distribution) -> Distribution:
    """norm((p - q)+); p itself where rounding leaves nothing of it."""
    mass = p.probs - q.probs_of(p.ids)
    positive = mass > 0.0
    if not positive.any():
        return p
    kept = mass[positive]
    return Distribution(p.ids[positive], kept / kept.sum())


def sampled_children(
    p: Distribution, q: Distribution, children: Sequence[int], stream: RandomStream, *, tokens: int
) -> NodeStep:
    """Children drawn from q without replacement, in draw order (`draw_children`); no two may be equal.

    tokens  size of the real vocabulary, which both distributions lie within

    Errors: ValueError if q gives a child no probability: then it was not drawn from it.
    """
    if len(children) == 1:  # the common case, without rows over the whole vocabulary
        drawn_with = q.prob(children[0])
        if drawn_with <= 0.0:
            raise ValueError(f"child {children[0]} cannot have been drawn: its q is 0")
        if stream.uniform() * drawn_with < p.prob(children[0]):
            return NodeStep(0, children[0])
        return NodeStep(None, sample(residual(p, q), stream.uniform()))
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
