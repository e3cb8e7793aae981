"""The acceptance rules and the proposal type: shapes, laziness, refusals, equality with plain decoding."""

import itertools

import numpy as np
import pytest

from specrun.runtime.acceptance import (
    OPEN,
    NodeStep,
    accept_tree,
    choose_child,
    draw_children,
    residual,
    sampled_children,
)
from specrun.runtime.options import SamplingOptions
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import Distribution, RandomStream, TokenCounts, coupled_token, distribution, sample

from .rules import coupled_chain, match_chain, outcome, rejection_chain, rejection_chain_deterministic

ROWS = np.random.default_rng(20).normal(0, 1.5, (8, 8)).astype(np.float32)
DRAFT_ROWS = ROWS + np.random.default_rng(21).normal(0, 0.8, (8, 8)).astype(np.float32)
ALL_OPTIONS = [
    SamplingOptions(temperature=0.3),
    SamplingOptions(temperature=1.0),
    SamplingOptions(temperature=2.0, seed=42),
    SamplingOptions(temperature=1.0, top_k=3),
    SamplingOptions(temperature=1.5, top_p=0.8, min_p=0.05),
    SamplingOptions(temperature=1.0, repetition_penalty=1.4),
    SamplingOptions(temperature=1.0, presence_penalty=1.5),
    SamplingOptions(temperature=1.0, frequency_penalty=2.0),
    SamplingOptions(temperature=1.0, frequency_penalty=-2.0),
    SamplingOptions(repetition_penalty=1.4),
    SamplingOptions(presence_penalty=1.5),
    SamplingOptions(frequency_penalty=2.0),
    SamplingOptions(frequency_penalty=-2.0),
    SamplingOptions(temperature=1e-6),
]


def scripted(uniforms):
    """A stream that gives these numbers and no more."""

    class Scripted(RandomStream):
        def __init__(self):
            self.left = list(uniforms)

        def uniform(self):
            return self.left.pop(0)

    return Scripted()


def rows_of(*weights):
    """Rows that record which of them were asked for."""
    asked = []

    def rows(row):
        asked.append(row)
        return Distribution.from_dense(weights[row])

    return rows, asked


def test_greedy_chain():
    choose = [4, 5, 6, 7].__getitem__
    assert match_chain((4, 5, 6), choose) == outcome(3, 7, "bonus")
    assert match_chain((4, 9, 6), choose) == outcome(1, 5, "correction")
    assert match_chain((9, 5, 6), choose) == outcome(0, 4, "correction")
    assert match_chain((), choose) == outcome(0, 4, "bonus")


def test_rows_are_asked_for_in_order_and_only_as_far_as_they_are_reached():
    sure = [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    q = [Distribution.from_dense(row) for row in ([0, 1, 0], [1, 1, 1])]
    for tokens, reached in (((1, 2), [0, 1, 2]), ((1, 0), [0, 1]), ((2, 2), [0])):
        rows, asked = rows_of(*sure)
        coupled_chain(tokens, rows, seed=1, sample_index=0, position=5)
        assert asked == reached
        rows, asked = rows_of(*sure)
        rejection_chain_deterministic(tokens, rows, RandomStream(1))
        assert asked == reached
        if tokens[0] == 1:
            rows, asked = rows_of(*sure)
            rejection_chain(tokens, q, rows, RandomStream(1))
            assert asked == reached


def test_rejection_chain_step_by_step():
    """p = (.5, .3, .2), q = (.2, .6, .2): token 1 passes while u < .5; then norm((p - q)+) is all on token 0."""
    p, q = [0.5, 0.3, 0.2], [Distribution.from_dense([0.2, 0.6, 0.2])]
    rows, _ = rows_of(p, p)
    assert rejection_chain((1,), q, rows, scripted([0.4999, 0.0])) == outcome(1, 0, "bonus")
    assert rejection_chain((1,), q, rows, scripted([0.4999, 0.81])) == outcome(1, 2, "bonus")
    assert rejection_chain((1,), q, rows, scripted([0.5, 0.99])) == outcome(0, 0, "correction")
    assert rejection_chain((0,), q, rows, scripted([0.9999, 0.6])) == outcome(1, 1, "bonus")
    assert rejection_chain((), [], rows, scripted([0.6])) == outcome(0, 1, "bonus")


def test_the_point_mass_rule_is_one_draw_of_p():
    rows, _ = rows_of([0.5, 0.3, 0.2], [0.1, 0.1, 0.8])
    assert rejection_chain_deterministic((1,), rows, scripted([0.6, 0.5])) == outcome(1, 2, "bonus")
    assert rejection_chain_deterministic((1,), rows, scripted([0.9])) == outcome(0, 2, "correction")


def test_tensorrt_llm_2789_a_draft_that_knows_fewer_ids():
    """TensorRT-LLM#2789: 4 ids for the target, 2 for the draft: what one lacks has probability 0, both ways round."""
    p, q = Distribution.from_dense([0.1, 0.2, 0.3, 0.4]), Distribution.from_dense([0.5, 0.5])
    left = residual(p, q)
    assert left.ids.tolist() == [2, 3]
    np.testing.assert_allclose(left.probs, [3 / 7, 4 / 7])
    assert residual(q, p).ids.tolist() == [0, 1]
    rows, _ = rows_of([0.5, 0.5, 0, 0])
    assert rejection_chain((3,), [p], rows, scripted([0.0, 0.1])) == outcome(0, 0, "correction")


def test_residual_of_equal_distributions_is_p():
    p = Distribution.from_dense([0.1, 0.2, 0.7])
    assert residual(p, p) is p


def test_a_token_that_its_q_cannot_give_is_an_error():
    rows, _ = rows_of([1, 1, 1])
    with pytest.raises(ValueError, match="cannot have been drawn"):
        rejection_chain((2,), [Distribution.from_dense([1, 1, 0])], rows, RandomStream(0))
    with pytest.raises(ValueError, match="cannot have been drawn"):
        sampled_children(rows(0), Distribution.from_dense([1, 1, 0]), (2,), scripted([]), tokens=3)


# --- equality with plain decoding


def history_distribution(table, context, options):
    """One row, from the real function, with counts that were made for it alone."""
    return distribution(table[context[-1]], TokenCounts(context[:1], context[1:]), options, tokens=8)


def plain(options, seed, length):
    text = [0]
    while len(text) <= length:
        made = history_distribution(ROWS, text, options)
        text.append(coupled_token(made, seed=seed, sample_index=0, position=len(text)))
    return text[: length + 1]


def speculative(options, seed, length, draft_length, kind):
    """A loop that keeps one TokenCounts through every round, pushing draft tokens as rows are asked for."""
    text, counts, accepted = [0], TokenCounts([0]), 0
    stream = RandomStream(seed, 99)
    while len(text) <= length:
        draft = []
        for _ in range(draft_length):
            q = history_distribution(DRAFT_ROWS, text + draft, options)
            if kind == "argmax":
                draft.append(int(q.ids[q.probs.argmax()]))
            elif kind == "own noise":
                draft.append(sample(q, stream.uniform()))
            elif kind == "coupled":
                draft.append(coupled_token(q, seed=seed, sample_index=0, position=len(text) + len(draft)))
            else:  # hopeless: never what the target would say
                draft.append(int(ROWS[(text + draft)[-1]].argmin()))

        def rows(row, draft=draft, text=text):
            if row:
                counts.push(draft[row - 1])
            return distribution(ROWS[(text + draft[:row])[-1]], counts, options, tokens=8)

        made = coupled_chain(draft, rows, seed=seed, sample_index=0, position=len(text))
        stands = len(made.path)
        assert (made.kind == "bonus") == (stands == len(draft))
        counts.rewind_to(len(text) - 1 + stands)
        counts.push(made.next_token)
        text += [*draft[:stands], made.next_token]
        accepted += stands
    return text[: length + 1], accepted


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_coupled_and_greedy_texts_do_not_depend_on_the_draft(options):
    """TensorRT-LLM#2208, #17701, vllm#18902, llama.cpp#5657: every K and kind of draft gives the plain text.

    K in {1, 2, 3, 5, 8}; each penalty alone, frequency +-2.0, temperature 1e-6 (greedy).
    """
    total = 0
    for seed in range(4):
        want = plain(options, seed, 14)
        for draft_length, kind in itertools.product((1, 2, 3, 5, 8), ("argmax", "own noise", "coupled", "hopeless")):
            got, accepted = speculative(options, seed, 14, draft_length, kind)
            assert got == want
            total += accepted
    assert total > 0


def test_vllm_18902_frequency_penalties_of_either_sign_matter():
    """vllm#18902: frequency -2.0, 0 and 2.0 give three different texts."""
    assert len({tuple(plain(SamplingOptions(frequency_penalty=value), 0, 14)) for value in (-2.0, 0.0, 2.0)}) == 3


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_llama_cpp_5657_tiny_temperatures_accept_as_greedy_does(temperature):
    """llama.cpp#5657: temperature 0, 0.0 and 1e-6 are greedy, with normal acceptance."""
    options = SamplingOptions(temperature=temperature)
    text, accepted = speculative(options, 0, 14, 4, "argmax")
    want = [0]
    while len(want) <= 14:
        want.append(int(ROWS[want[-1]].argmax()))
    assert text == want
    assert accepted > 0


def test_coupled_drafts_are_accepted_more_often_than_independent_ones():
    """The draft shares the target's noise: at least (1 - TV) / (1 + TV), independent draws only sum p q."""
    options = SamplingOptions(temperature=1.0)
    shared, own = (
        sum(speculative(options, seed, 30, 3, kind)[1] for seed in range(20)) for kind in ("coupled", "own noise")
    )
    assert shared > 1.2 * own


# --- trees


def test_choose_child():
    assert choose_child((4, 7, 9), 7) == NodeStep(1, 7)
    assert choose_child((4, 7, 9), 5) == NodeStep(None, 5)
    assert choose_child((), 5) == NodeStep(None, 5)


TREE = Proposal((4, 5, 6, 7, 5), "deterministic", parents=(-1, -1, 0, 2, 0))


@pytest.mark.parametrize(
    ("choices", "path", "token", "kind"),
    [
        ({-1: 9}, (), 9, "correction"),
        ({-1: 5, 1: 8}, (1,), 8, "bonus"),
        ({-1: 4, 0: 9}, (0,), 9, "correction"),
        ({-1: 4, 0: 5, 4: 1}, (0, 4), 1, "bonus"),
        ({-1: 4, 0: 6, 2: 7, 3: 2}, (0, 2, 3), 2, "bonus"),
    ],
)
def test_accept_tree(choices, path, token, kind):
    made = accept_tree(TREE, lambda node, children: choose_child(children, choices[node]))
    assert (made.path, made.next_token, made.kind) == (path, token, kind)


def test_an_empty_tree_is_a_plain_step():
    assert accept_tree(EMPTY, lambda node, children: choose_child(children, 3)) == outcome(0, 3, "bonus")


def test_nothing_is_asked_beyond_the_end_of_the_text():
    asked = []

    def step(node, children):
        asked.append(node)
        return choose_child(children, {-1: 4, 0: 6}[node])

    made = accept_tree(TREE, step, {6})
    assert (made.path, made.next_token, made.kind) == ((0, 2), None, None)
    assert asked == [-1, 0]


def test_an_open_step_ends_the_walk():
    made = accept_tree(TREE, lambda node, children: choose_child(children, 4) if node < 0 else OPEN)
    assert (made.path, made.next_token, made.kind) == ((0,), None, None)


def test_steps_that_cannot_be():
    with pytest.raises(ValueError, match="none at place 0"):
        accept_tree(Proposal((4,), "deterministic"), lambda node, children: NodeStep(0, 4))


def test_children_drawn_without_replacement_are_different_and_may_be_all():
    q = Distribution.from_dense([0.6, 0.4, 0, 0, 0])
    for seed in range(50):
        assert sorted(draw_children(q, 5, RandomStream(seed), tokens=5)) == [0, 1, 2, 3, 4]
        assert sorted(draw_children(q, 9, RandomStream(seed), tokens=5)) == [0, 1, 2, 3, 4]
        assert set(draw_children(q, 2, RandomStream(seed), tokens=5)) == {0, 1}
