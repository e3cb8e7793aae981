"""What is committed of a tree, what is carried and what is left open: the policies by themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specrun.runtime.acceptance import Outcome
from specrun.runtime.chooser import Chooser
from specrun.runtime.options import GenerationOptions, SamplingOptions
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import Distribution
from specrun.runtime.side_branches import settle

#       4 - 5 - 6      the main branch, and two others: 7 behind 4; 8 - 9 behind the root
TREE = Proposal((4, 5, 6, 7, 8, 9), "deterministic", parents=(-1, 0, 1, 0, -1, 4))


def chooser(margin: float | None = 1e-3, **options: Any) -> Chooser:
    names = SamplingOptions.__dataclass_fields__
    sampling = SamplingOptions(**{"seed": 5} | {name: value for name, value in options.items() if name in names})
    others = {name: value for name, value in options.items() if name not in names}
    request = GenerationOptions(sampling=sampling, **others)
    return Chooser(request, prompt=[1, 2], tokens=40, eos=[0], margin=margin)


@pytest.mark.parametrize("whole", [False, True])
def test_the_main_branch_is_committed_by_both_policies(whole: bool) -> None:
    made = settle(TREE, Outcome((0, 1, 2), 3, "bonus"), whole=whole)
    assert (made.tokens, made.num_accepted, made.kind, made.main) == ((4, 5, 6, 3), 3, "bonus", 3)
    assert made.sources == ["draft", "draft", "draft", "bonus"]
    assert (made.carried, made.open, made.rejected) == (EMPTY, False, False)
    made = settle(TREE, Outcome((0,), 3, "correction"), whole=whole)
    assert (made.tokens, made.num_accepted, made.kind, made.main) == ((4, 3), 1, "correction", 1)
    assert made.rejected


def test_side_branches_under_re_verify() -> None:
    """The first token of the branch is a correction, for an exact row chose it; the others are carried."""
    made = settle(TREE, Outcome((0, 3), 3, "bonus"), whole=False)
    assert (made.tokens, made.num_accepted, made.kind, made.main) == ((4, 7), 1, "correction", 1)
    assert made.carried == Proposal((3,), "deterministic")
    assert made.path == (0, 3)
    assert not made.rejected
    made = settle(TREE, Outcome((4, 5), 3, "bonus"), whole=False)
    assert (made.tokens, made.carried.tokens) == ((8,), (9, 3))
    made = settle(TREE, Outcome((4,), 2, "correction"), whole=False)
    assert (made.tokens, made.carried.tokens, made.rejected) == ((8,), (2,), True)
    made = settle(TREE, Outcome((4,), None, None), whole=False, ended=True)
    assert (made.tokens, made.kind, len(made.carried), made.open) == ((8,), "correction", 0, False)


def test_what_is_carried_under_the_rejection_rule_was_drawn_from_the_rows() -> None:
    rows = [Distribution.from_dense(np.arange(1, 12) ** power) for power in (1, 2, 3)]
    made = settle(TREE, Outcome((4, 5), 3, "bonus"), whole=False, rows=rows)
    assert made.carried.kind == "sampled"
    assert made.carried.q == (rows[1], rows[2])


def test_side_branches_under_the_margin() -> None:
    made = settle(TREE, Outcome((4, 5), 3, "bonus"), whole=True)
    assert (made.tokens, made.num_accepted, made.kind, made.main) == ((8, 9, 3), 2, "bonus", 0)
    assert (made.carried, made.open) == (EMPTY, False)
    made = settle(TREE, Outcome((4,), None, None), whole=True)
    assert (made.tokens, made.num_accepted, made.kind, made.open) == ((8,), 1, None, True)
    made = settle(TREE, Outcome((), None, None), whole=True)
    assert (made.tokens, made.sources, made.open) == ((), [], True)
    made = settle(TREE, Outcome((4,), None, None), whole=True, ended=True)
    assert (made.tokens, made.kind, made.open) == ((8,), None, False)


TRUSTING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 2.0, "min_tokens": 4},
    {"mode": "rejection"},
    {"top_k": 5},  # greedy all the same
]
VERIFYING: list[dict[str, Any]] = [
    {"temperature": 0.7, "mode": "rejection"},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"temperature": 0.7, "presence_penalty": 0.3},
    {"logprobs": 0},
]


def test_which_requests_go_by_the_margin() -> None:
    assert all(chooser(**options).commits_side_branches for options in TRUSTING)
    assert not any(chooser(**options).commits_side_branches for options in VERIFYING)
    assert not any(chooser(None, **options).commits_side_branches for options in TRUSTING)


@pytest.mark.parametrize("temperature", [0.0, 0.2, 1.0, 3.0])
def test_a_sure_choice_survives_any_rounding_within_the_margin(temperature: float) -> None:
    """Logits that are off by up to half the margin, in the worst direction too; and an open choice can be turned."""
    rng = np.random.default_rng(int(temperature * 10))
    margin, sure, turned = 0.2, 0, 0
    judge = chooser(margin, temperature=temperature)
    for position in range(2, 600):
        logits = rng.normal(0, 1.5, (1, 40)).astype(np.float32)
        choice = judge.decide(EMPTY, logits, position).tokens[0]
        made = judge.decide(EMPTY, logits, position, exact_cache=False)
        worst = logits + np.float32(margin / 2)
        worst[0, choice] -= np.float32(margin)
        if made.open:
            assert made.tokens == ()
            worst[0, choice] -= np.float32(1e-4)
            turned += judge.decide(EMPTY, worst, position).tokens[0] != choice
            continue
        assert made.tokens == (choice,)
        sure += 1
        worst[0, choice] += np.float32(1e-4)
        off = [logits + rng.uniform(-margin / 2, margin / 2, logits.shape).astype(np.float32) for _ in range(5)]
        assert all(judge.decide(EMPTY, row, position).tokens == (choice,) for row in (worst, *off))
    assert sure > 300
    assert turned == 598 - sure > 10


def test_exact_rows_are_never_left_open() -> None:
    """Two equal logits: the lowest id on an exact row, open on another."""
    judge, logits = chooser(), np.zeros((7, 40), np.float32)
    logits[:, [4, 5]] = 1.0
    assert judge.decide(EMPTY, logits, 9).tokens == (4,)
    assert judge.decide(EMPTY, logits, 9, exact_cache=False).open
    made = judge.decide(TREE, logits, 9)
    assert (made.tokens, made.open) == ((4, 4), False)  # root and node 0 are exact, and 4 is no child of node 0
    logits[0, 8] = 2.0  # down the side branch, whose row is not
    made = judge.decide(TREE, logits, 9)
    assert (made.tokens, made.path, made.open) == ((8,), (4,), True)
    assert judge.decide(TREE, logits, 9, exact_cache=False).tokens == (8,)
