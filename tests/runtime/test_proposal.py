"""The proposal type: chains and trees, what contradicts itself, and joining one to another."""

import pytest

from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import Distribution

TREE = Proposal((4, 5, 6, 7, 5), "deterministic", parents=(-1, -1, 0, 2, 0))


def test_a_proposal_declares_its_kind():
    q = (Distribution.from_dense([0.5, 0.5]), Distribution.from_dense([0.0, 1.0]))
    assert Proposal((0, 1), "sampled", q).first(1).q == q[:1]
    assert Proposal((5, 6, 7), "deterministic").first(2).tokens == (5, 6)
    assert len(EMPTY) == EMPTY.main_length == 0
    assert EMPTY.kind == "deterministic"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((1,), "deterministic", (Distribution.point(1),)), "has no q"),
        (((1,), "sampled", None), "one q for each"),
        (((1, 2), "sampled", (Distribution.point(1),)), "one q for each"),
        (((1,), "sampled", (Distribution.point(2),)), "cannot have been drawn"),
        (((1,), "guess", None), "kind must be"),
        (((-1,), "deterministic", None), "negative"),
        (((4, 4), "deterministic", None, (-1, -1)), "repeats the token 4"),
        (((4,), "deterministic", None, (0,)), "parents come first"),
        (((4,), "deterministic", None, (-2,)), "parents come first"),
        (((4, 5), "deterministic", None, (-1,)), "as many parents"),
        (((0, 1), "sampled", tuple(Distribution.from_dense([1, 1]) for _ in "ab"), (-1, -1)), "share the distribution"),
    ],
)
def test_proposals_that_contradict_themselves(arguments, message):
    with pytest.raises(ValueError, match=message):
        Proposal(*arguments)


def test_a_chain_is_a_tree():
    chain = Proposal((4, 5, 6), "deterministic")
    assert Proposal((4, 5, 6), "deterministic", parents=(-1, 0, 1)) == chain
    assert [chain.children(node) for node in range(-1, 3)] == [(0,), (1,), (2,), ()]
    assert chain.main_length == 3


def test_a_tree_and_its_main_branch():
    assert [TREE.children(node) for node in range(-1, 5)] == [(0, 1), (2, 4), (), (3,), (), ()]
    assert TREE.main_length == 1
    assert TREE.first(1) == Proposal((4,), "deterministic")
    assert TREE.first(3) == Proposal((4, 5, 6), "deterministic", parents=(-1, -1, 0))
    assert TREE.first(9) is TREE
    # A child of the last main node that comes after another branch is no main node: its keys lie behind that branch.
    assert Proposal((1, 2, 3, 4), "deterministic", parents=(-1, 0, -1, 1)).main_length == 2
    assert Proposal((1, 2, 3), "deterministic", parents=(-1, -1, -1)).main_length == 1


def test_siblings_share_their_distribution_or_were_not_drawn():
    q = Distribution.from_dense([1, 1, 0, 0])
    drawn = Proposal((0, 1, 3), "sampled", (q, q, q), (-1, -1, -1))  # the third came after q was used up
    assert not drawn.fixed(drawn.children(-1))
    given = Proposal((0, 1), "sampled", (Distribution.point(0), Distribution.point(1)), (-1, -1))
    assert given.fixed(given.children(-1))
    assert TREE.fixed(TREE.children(-1))


def test_a_proposal_behind_a_chain():
    head = Proposal((8, 9), "deterministic")
    assert TREE.behind(head) == Proposal((8, 9, 4, 5, 6, 7, 5), "deterministic", parents=(-1, 0, 1, 1, 2, 4, 2))
    assert TREE.behind(head).main_length == 3
    assert head.behind(head) == Proposal((8, 9, 8, 9), "deterministic")
    assert TREE.behind(EMPTY) is TREE
    assert EMPTY.behind(head) is head
    q = Distribution.from_dense([0] * 8 + [1, 1])
    joined = TREE.behind(Proposal((8, 9), "sampled", (q, q)))
    assert joined.kind == "sampled"
    assert joined.q[:2] == (q, q)
    assert [joined.fixed(joined.children(node)) for node in range(-1, 3)] == [False, False, True, True]
    joined = Proposal((8,), "sampled", (q,)).behind(head)
    assert [joined.fixed(joined.children(node)) for node in range(-1, 2)] == [True, True, False]
