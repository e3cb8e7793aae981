"""The chain that a head drafts for one row of a batch, beside a copy that n-grams offer."""

from __future__ import annotations

from specrun.runtime.batching.row_chain import RowChain
from specrun.runtime.head_estimate import HeadEstimate
from specrun.runtime.sampling import Distribution


def new_chain(*, blind: bool = False) -> RowChain:
    return RowChain(HeadEstimate(((0.5, 0.2), (0.4, 0.2))), blind=blind)


def test_the_likeliest_candidate_goes_on() -> None:
    chain = new_chain()
    chain.begin([1, 2], [])
    assert chain.extend([7, 8], [-0.1, -2.5])
    assert chain.extend([9, 5], [-0.5, -1.5])
    assert chain.drafted == [7, 9]
    assert chain.proposal.tokens == (7, 9)
    assert chain.chances[0] > chain.chances[1] > 0.3


def test_a_copy_goes_on_where_the_head_stops() -> None:
    chain = new_chain()
    chain.begin([1, 2], [(7, 0.9), (8, 0.8), (9, 0.7)])
    assert chain.proposal.tokens == (7, 8, 9)
    assert chain.extend([7, 3], [-0.2, -2.0])  # the head agrees
    assert chain.proposal.tokens == (7, 8, 9)
    assert chain.chances[0] > 0.9
    assert chain.chances[1:] == (0.8, 0.7)


def test_a_head_that_is_surer_leaves_the_copy() -> None:
    chain = new_chain()
    chain.begin([1, 2], [(7, 0.1), (8, 0.8)])
    assert chain.extend([3, 4], [-0.02, -5.0])
    assert chain.proposal.tokens == (3,)
    assert chain.depth == 1


def test_a_long_copy_is_kept_against_a_head_that_is_a_little_surer() -> None:
    chain = new_chain()
    copied = [(7, 0.6), *((token, 0.95) for token in range(8, 14))]
    chain.begin([1, 2], copied)
    assert chain.extend([3, 7], [-0.4, -1.2])
    assert chain.proposal.tokens == (7, 8, 9, 10, 11, 12, 13)
    chain.begin([1, 2], [(7, 0.3), (8, 0.9)])
    assert chain.extend([3, 5], [-0.05, -4.0])
    assert chain.proposal.tokens == (3,)


def test_it_learns_from_the_text_that_follows() -> None:
    chain = new_chain()
    before = chain.estimate.best_child(0)
    for _ in range(5):
        chain.begin([1, 2], [])
        chain.extend([7], [-0.5])
        chain.remember(2)
        chain.begin([1, 2, 7, 7], [])
    assert chain.estimate.best_child(0) > before
    risen = chain.estimate.best_child(0)
    chain.extend([7], [-0.5])
    chain.remember(4)
    chain.rewind_to(3)  # nothing of it is true
    chain.begin([1, 2, 7, 3], [])
    assert chain.estimate.best_child(0) == risen


def test_draws_are_not_chosen_among() -> None:
    """Their chances are those of their depth, whatever was drawn; a copy that is surer is kept."""
    chain, q = new_chain(blind=True), Distribution.point(4)
    chain.begin([1, 2], [(9, 0.3)])
    assert not chain.keeps_copy
    for sure in (-0.01, -4.0):
        assert chain.extend([4, 6], [sure, -3.0], q)
    assert chain.proposal.kind == "sampled"
    assert chain.proposal.tokens == (4, 4)
    assert chain.chances == (chain.estimate.best_child(0), chain.estimate.best_child(1))
    chain.begin([1, 2], [(9, 0.8)])
    assert chain.keeps_copy
    assert chain.proposal.tokens == (9,)
    assert chain.proposal.kind == "deterministic"
