"""The acceptance rules over chains, each as the walk of a proposal: `rows(j)` is the distribution after d1 .. dj."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specrun.runtime.acceptance import NodeStep, Outcome, accept_tree, choose_child, sampled_children
from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import Distribution, RandomStream, coupled_token, sample

Rows = Callable[[int], Distribution]


def outcome(count: int, token: int, kind: str) -> Outcome:
    """What a chain comes to of which `count` tokens stand."""
    return Outcome(tuple(range(count)), token, kind)


def match_chain(tokens: Sequence[int], choose: Callable[[int], int]) -> Outcome:
    """Greedy, or any rule that compares: choose(j) is the target's token after d1 .. dj."""
    proposal = Proposal(tuple(tokens), "deterministic")
    return accept_tree(proposal, lambda node, children: choose_child(children, choose(node + 1)))


def coupled_chain(tokens: Sequence[int], rows: Rows, *, seed: int, sample_index: int, position: int) -> Outcome:
    """Coupled sampling."""

    def choose(row: int) -> int:
        return coupled_token(rows(row), seed=seed, sample_index=sample_index, position=position + row)

    return match_chain(tokens, choose)


def rejection_chain_deterministic(tokens: Sequence[int], rows: Rows, stream: RandomStream) -> Outcome:
    """The rejection rule for tokens that were not drawn."""
    return match_chain(tokens, lambda row: sample(rows(row), stream.uniform()))


def rejection_chain(tokens: Sequence[int], q: Sequence[Distribution], rows: Rows, stream: RandomStream) -> Outcome:
    """The rejection rule for tokens drawn from q."""

    def step(node: int, children: tuple[int, ...]) -> NodeStep:
        p = rows(node + 1)
        if not children:
            return NodeStep(None, sample(p, stream.uniform()))
        return sampled_children(p, q[node + 1], children, stream, tokens=1 + int(max(p.ids[-1], q[node + 1].ids[-1])))

    return accept_tree(Proposal(tuple(tokens), "deterministic"), step)
