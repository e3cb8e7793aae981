"""Chi-squared tests: what the rules emit follows the target's processed distribution, computed here in another way.

An 8-token toy pair with fixed next-token tables; 20,000 seeded draws each. Seeds are fixed, so a p-value under 1e-3 is
a fault and not bad luck; the negative controls show that wrong rules fall under 1e-6.
"""

import functools
import itertools

import numpy as np
import pytest
import scipy.stats

from specrun.runtime.acceptance import Outcome, accept_tree, choose_child, draw_children, sampled_children
from specrun.runtime.options import SamplingOptions
from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import Distribution, RandomStream, TokenCounts, coupled_token, distribution, sample

from .rules import coupled_chain, rejection_chain, rejection_chain_deterministic

DRAWS = 20_000
V = 8
TARGET = np.random.default_rng(30).normal(0, 1.5, (V, V)).astype(np.float32)
DRAFT = TARGET + np.random.default_rng(31).normal(0, 0.9, (V, V)).astype(np.float32)
TABLES = {"target": TARGET, "draft": DRAFT}
PROMPT = (2, 5)
PLAIN = SamplingOptions(temperature=1.0)
OPTIONS = {
    "temperature 0.3 (dflash#74)": SamplingOptions(temperature=0.3),
    "temperature 0.7": SamplingOptions(temperature=0.7),
    "temperature 1 (dflash#74)": PLAIN,
    "temperature 2 (dflash#74)": SamplingOptions(temperature=2.0),
    "top-k 3": SamplingOptions(temperature=1.0, top_k=3),
    "top-p 0.8": SamplingOptions(temperature=1.0, top_p=0.8),
    "min-p 0.1": SamplingOptions(temperature=1.0, min_p=0.1),
    "repetition 1.5": SamplingOptions(temperature=1.0, repetition_penalty=1.5),
    "presence 1.5": SamplingOptions(temperature=1.0, presence_penalty=1.5),
    "frequency 2 (vllm#18902)": SamplingOptions(temperature=1.0, frequency_penalty=2.0),
    "frequency -2 (vllm#18902)": SamplingOptions(temperature=1.0, frequency_penalty=-2.0),
    "all filters": SamplingOptions(temperature=1.3, top_k=6, top_p=0.95, min_p=0.03),
    "all": SamplingOptions(
        temperature=1.3, top_k=6, top_p=0.95, min_p=0.03, repetition_penalty=1.2, presence_penalty=0.4,
        frequency_penalty=0.3,
    ),
}  # fmt: skip


def expected(context, o, table=TARGET):
    """The processed distribution [V] after a context (prompt included), dense and straightforward."""
    z = table[context[-1]].astype(float).copy()
    output = np.bincount(np.array(context[len(PROMPT) :], int), minlength=V)
    seen = np.isin(np.arange(V), context)
    z[seen] = np.where(z[seen] > 0, z[seen] / o.repetition_penalty, z[seen] * o.repetition_penalty)
    z = (z - o.frequency_penalty * output - o.presence_penalty * (output > 0)) / o.temperature
    if o.top_k:
        z[z < np.sort(z)[-o.top_k]] = -np.inf
    p = np.exp(z - z.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= o.top_p]] = 0
    p[p < o.min_p * p.max()] = 0
    return p / p.sum()


def expected_joint(o, length):
    """Probabilities of the first `length` tokens, [V, ..., V]."""
    joint = np.zeros((V,) * length)
    for tokens in itertools.product(range(V), repeat=length):
        mass = 1.0
        for index, token in enumerate(tokens):
            mass *= expected(PROMPT + tokens[:index], o)[token] if mass else 0.0
        joint[tokens] = mass
    return joint


def p_value(tokens, probabilities):
    """Chi-squared p-value of drawn tokens (or tuples of them); rare cells are pooled, impossible ones must be empty."""
    counts = np.zeros(probabilities.shape)
    np.add.at(counts, tuple(np.array(tokens).reshape(len(tokens), -1).T), 1)
    assert len(tokens) >= DRAWS
    assert counts[probabilities == 0].sum() == 0
    want = probabilities * len(tokens)
    rare = want < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    if want[-1] < 5:  # too little even together: into the smallest other cell
        smallest = want[:-1].argmin()
        for cells in (observed, want):
            cells[smallest] += cells[-1]
        observed, want = observed[:-1], want[:-1]
    assert len(want) > 1
    return scipy.stats.chisquare(observed, want).pvalue


@functools.cache
def processed(name, context, o):
    """The distribution of the code under test; cached, because 20,000 draws meet few contexts."""
    counts = TokenCounts(PROMPT, context[len(PROMPT) :])
    return distribution(TABLES[name][context[-1]], counts, o, tokens=V)


def propose(context, limit, stream, o):
    """Draw a chain from the draft."""
    tokens, q = (), ()
    for _ in range(limit):
        q += (processed("draft", context + tokens, o),)
        tokens += (sample(q[-1], stream.uniform()),)
    return Proposal(tokens, "sampled", q)


def first_tokens(index, o, length, limit, propose=propose, rule=None):
    """The first tokens of one run of the loop with rejection sampling."""
    stream = RandomStream(11, index)
    text = PROMPT
    while len(text) < len(PROMPT) + length:
        proposal = propose(text, limit, stream, o)

        def rows(row, text=text, proposal=proposal):
            return processed("target", text + proposal.tokens[:row], o)

        if rule is not None:
            outcome = rule(proposal, rows, stream)
        elif proposal.kind == "sampled":
            outcome = rejection_chain(proposal.tokens, proposal.q, rows, stream)
        else:
            outcome = rejection_chain_deterministic(proposal.tokens, rows, stream)
        text += (*proposal.tokens[: len(outcome.path)], outcome.next_token)
    return text[len(PROMPT) :][:length]


@pytest.mark.parametrize("name", OPTIONS)
def test_rejection_sampling_with_a_sampled_draft(name):
    """The joint of the first two tokens, K = 2."""
    o = OPTIONS[name]
    drawn = [first_tokens(index, o, 2, 2) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(o, 2)) > 1e-3


@pytest.mark.parametrize("name", OPTIONS)
def test_coupled_sampling(name):
    """The joint of the first two tokens; that drafts change nothing of it is shown token by token elsewhere."""
    o = OPTIONS[name]
    drawn = []
    for index in range(DRAWS):
        text = PROMPT
        for _ in range(2):
            made = processed("target", text, o)
            text += (coupled_token(made, seed=5, sample_index=index, position=len(text)),)
        drawn.append(text[len(PROMPT) :])
    assert p_value(drawn, expected_joint(o, 2)) > 1e-3


def test_mlx_swift_lm_459_joint_of_three_tokens():
    """mlx-swift-lm#459: temperature 0.7, k 4: the first three tokens together."""
    o = SamplingOptions(temperature=0.7)
    drawn = [first_tokens(index, o, 3, 4) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(o, 3)) > 1e-3


def test_coupled_chain_with_a_coupled_draft():
    """Draft and target share the noise; the joint of two tokens is still the target's."""
    drawn = []
    for index in range(DRAWS):
        q = processed("draft", PROMPT, PLAIN)
        draft = (coupled_token(q, seed=6, sample_index=index, position=2),)
        rows = lambda row, draft=draft: processed("target", PROMPT + draft[:row], PLAIN)  # noqa: E731
        outcome = coupled_chain(draft, rows, seed=6, sample_index=index, position=2)
        text = (*draft[: len(outcome.path)], outcome.next_token)
        if len(text) == 1:
            made = processed("target", PROMPT + text, PLAIN)
            text += (coupled_token(made, seed=6, sample_index=index, position=3),)
        drawn.append(text)
    assert p_value(drawn, expected_joint(PLAIN, 2)) > 1e-3


def argmax_draft(context, limit, stream, o):
    tokens = ()
    for _ in range(limit):
        q = processed("draft", context + tokens, o)
        tokens += (int(q.ids[q.probs.argmax()]),)
    return Proposal(tokens, "deterministic")


def test_transformers_32867_argmax_draft_at_temperature_1():
    """transformers#32867: a greedy draft is a point mass."""
    drawn = [first_tokens(index, PLAIN, 2, 2, argmax_draft) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(PLAIN, 2)) > 1e-3


def test_negative_control_argmax_draft_judged_with_its_softmax():
    """The fault of transformers#32867 is found: ratios against a softmax that the token was not drawn from."""

    def wrong(context, limit, stream, o):
        tokens = argmax_draft(context, limit, stream, o).tokens
        q = tuple(processed("draft", context + tokens[:index], o) for index in range(limit))
        return Proposal(tokens, "sampled", q)

    drawn = [first_tokens(index, PLAIN, 1, 1, wrong) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(PLAIN, 1)) < 1e-6


def filtered_draft(context, limit, stream, o):
    return propose(context, limit, stream, SamplingOptions(temperature=1.0, top_k=3))


def test_transformers_47932_filtered_draft_with_its_filtered_q():
    """transformers#47932: the draft keeps its top 3 and says so; the target keeps all."""
    drawn = [first_tokens(index, PLAIN, 2, 2, filtered_draft) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(PLAIN, 2)) > 1e-3


def test_negative_control_filtered_draft_with_an_unfiltered_q():
    """The fault of transformers#47932 is found."""

    def wrong(context, limit, stream, o):
        tokens = filtered_draft(context, limit, stream, o).tokens
        q = tuple(processed("draft", context + tokens[:index], PLAIN) for index in range(limit))
        return Proposal(tokens, "sampled", q)

    drawn = [first_tokens(index, PLAIN, 1, 1, wrong) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(PLAIN, 1)) < 1e-6


def test_negative_control_correction_from_p_instead_of_the_residual():
    """A correction drawn from p, not from norm((p - q)+), is found."""

    def wrong(proposal, rows, stream):
        outcome = rejection_chain(proposal.tokens, proposal.q, rows, stream)
        if outcome.kind == "correction":
            token = sample(rows(len(outcome.path)), stream.uniform())
            return Outcome(outcome.path, token, "correction")
        return outcome

    drawn = [first_tokens(index, PLAIN, 1, 1, rule=wrong) for index in range(DRAWS)]
    assert p_value(drawn, expected_joint(PLAIN, 1)) < 1e-6


def test_tensorrt_llm_2789_a_draft_with_a_smaller_vocabulary():
    """TensorRT-LLM#2789: temperature 0.8; the draft lacks the last three ids."""
    o = SamplingOptions(temperature=0.8)

    def smaller(context, limit, stream, o):
        row = DRAFT[context[-1]][:5]
        q = (distribution(row, None, SamplingOptions(temperature=0.8), tokens=V),)
        return Proposal((sample(q[0], stream.uniform()),), "sampled", q)

    drawn = [first_tokens(index, o, 1, 1, smaller) for index in range(DRAWS)]
    assert {token for (token,) in drawn} > {5, 6, 7}
    assert p_value(drawn, expected_joint(o, 1)) > 1e-3


def test_llama_cpp_3919_acceptance_is_what_theory_says():
    """llama.cpp#3919: E[accept] = sum min(p, q), not 100 %; and all of 0 .. k are seen, whatever k is."""
    p, q = expected(PROMPT, PLAIN), expected(PROMPT, PLAIN, DRAFT)
    alpha = np.minimum(p, q).sum()
    assert alpha < 0.9
    for limit in (1, 3):
        accepted = []
        for index in range(DRAWS):
            stream = RandomStream(12, index)
            proposal = propose(PROMPT, limit, stream, PLAIN)
            rows = lambda row, made=proposal: processed("target", PROMPT + made.tokens[:row], PLAIN)  # noqa: E731
            accepted.append(len(rejection_chain(proposal.tokens, proposal.q, rows, stream).path))
        assert set(accepted) == set(range(limit + 1))
        first = np.mean(np.array(accepted) > 0)
        assert abs(first - alpha) < 4 * np.sqrt(alpha * (1 - alpha) / DRAWS)


# --- trees


def test_tree_with_deterministic_children():
    """Two levels, the draft's top 3 and top 2: the joint of two tokens follows the target."""
    ranked = lambda token, count: [int(x) for x in np.argsort(-DRAFT[token])[:count]]  # noqa: E731
    tokens, parents = ranked(PROMPT[-1], 3), [-1, -1, -1]
    for node in range(2):  # the third child stays a leaf
        tokens += ranked(tokens[node], 2)
        parents += [node, node]
    tree = Proposal(tuple(tokens), "deterministic", parents=tuple(parents))
    drawn = []
    for index in range(DRAWS):
        stream = RandomStream(13, index)

        def step(node, children, stream=stream):
            last = tokens[node] if node >= 0 else PROMPT[-1]
            return choose_child(children, sample(processed("target", (*PROMPT, last), PLAIN), stream.uniform()))

        outcome = accept_tree(tree, step)
        text = (*(tokens[node] for node in outcome.path), outcome.next_token)
        if len(text) == 1:
            text += (sample(processed("target", PROMPT + text, PLAIN), stream.uniform()),)
        drawn.append(text[:2])
    assert p_value(drawn, expected_joint(PLAIN, 2)) > 1e-3


def drawn_children(p, q, count, rule=sampled_children):
    """The token that one node with `count` children gives, many times, and how often each place was accepted."""
    tokens, places = [], np.zeros(count + 1)
    for index in range(DRAWS):
        stream = RandomStream(14, index)
        outcome = rule(p, q, draw_children(q, count, stream, tokens=p.ids.size), stream, tokens=p.ids.size)
        tokens.append(outcome.token)
        places[count if outcome.child is None else outcome.child] += 1
    return tokens, places


@pytest.mark.parametrize(
    ("q", "count"),
    [
        (expected(PROMPT, PLAIN, DRAFT), 3),
        ([0.7, 0, 0, 0, 0, 0.3, 0, 0], 3),  # used up after two: the third child is uniform over the rest
        ([0, 0, 0, 1.0, 0, 0, 0, 0], 2),
    ],
    ids=["draft", "used up", "point mass"],
)
def test_tree_with_children_drawn_without_replacement(q, count):
    p = Distribution.from_dense(expected(PROMPT, PLAIN))
    tokens, places = drawn_children(p, Distribution.from_dense(q), count)
    assert p_value(tokens, p.dense(V)) > 1e-3
    assert places[0] > 0
    assert places[count - 1] > 0


def test_children_of_a_perfect_draft_are_always_accepted_at_once():
    p = Distribution.from_dense(expected(PROMPT, PLAIN))
    tokens, places = drawn_children(p, p, 2)
    assert places.tolist() == [DRAWS, 0, 0]
    assert p_value(tokens, p.dense(V)) > 1e-3


def test_negative_control_children_judged_as_if_drawn_with_replacement():
    """Judging the second child against q itself instead of the renormalised rest is found."""

    def wrong(p, q, children, stream, *, tokens):
        for token in children:
            outcome = sampled_children(p, q, (token,), stream, tokens=tokens)
            if outcome.child is not None:
                return outcome
            left = np.maximum(p.dense(tokens) - q.dense(tokens), 0.0)
            p = Distribution.from_dense(left)
        return outcome

    p = Distribution.from_dense(expected(PROMPT, PLAIN))
    tokens, _ = drawn_children(p, Distribution.from_dense(expected(PROMPT, PLAIN, DRAFT)), 3, wrong)
    assert p_value(tokens, p.dense(V)) < 1e-6
