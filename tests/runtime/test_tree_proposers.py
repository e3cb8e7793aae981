"""Draft model and n-grams as part of a tree: what they hold stays the context, whatever side branches do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.runtime import Engine
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.proposers.draft import DraftProposer
from specrun.runtime.proposers.ngram import NgramProposer

from .checks import make_speculation_pay, same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT
from .tree_proposers import Record, TreeProposer, proposing

RAW: dict[str, Any] = {"raw": True, "ignore_eos": True}


class Beside:
    """The chain of `inner` as the main branch, and beside it, now and then, the text to come as another."""

    needs_features = False
    name = "beside"

    def __init__(self, inner: Any, text: Sequence[int], check: Any) -> None:
        self.inner, self.text, self.check = inner, list(text), check
        self.rng = np.random.default_rng(1)
        self.main = 0

    def start(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt = len(prompt_tokens)
        self.inner.start(prompt_tokens)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        chain = self.inner.propose(context, limit)
        self.check(context, chain)
        self.main = len(chain)
        done = len(context) - self.prompt
        ahead = self.text[done : done + limit]
        if not ahead or self.rng.random() < 0.3:
            return chain
        tokens, parents = list(chain.tokens), list(range(-1, len(chain) - 1))
        node = -1
        for token in ahead:
            same = [at for at in range(len(tokens)) if parents[at] == node and tokens[at] == token]
            if not same:
                tokens.append(token)
                parents.append(node)
            node = same[0] if same else len(tokens) - 1
        return Proposal(tuple(tokens), "deterministic", parents=tuple(parents))

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        main = tuple(node for place, node in enumerate(path) if node == place < self.main)
        judged = min(len(main) + 1, self.main, evaluated)
        self.inner.observe(evaluated=judged, accepted=len(main), path=main)

    def rewind_to(self, length: int) -> None:
        self.inner.rewind_to(length)

    def close(self) -> None:
        self.inner.close()


POLICIES = {"margin": ("tgt", 0.3, 1e-3), "repair": ("tgt", 1.5, 1e-3), "re-verify": ("tgt-int8", None, 1.0)}


def seen_all(policy: str, record: Record) -> None:
    assert record.side > 0 if policy != "re-verify" else record.carried_accepted > 0
    if policy == "repair":
        assert record.open > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
def test_a_draft_beside_a_side_branch(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, policy: str, sampling: dict[str, Any]
) -> None:
    """mlxcel#1002: each proposal is that of a draft which has just read the whole context."""
    name, margin, noise = POLICIES[policy]
    engine, fresh = models.engine(name, "mix"), models.engine("mix")
    make_speculation_pay(engine, monkeypatch)
    build = Engine.proposer
    options = {"max_tokens": 120, **RAW, **sampling}
    plain = engine.generate(PROMPT, method="none", **options)
    compared = [0]
    for draft_length in (1, 4, None):
        engine.reset()
        made: list[DraftProposer] = []

        def check(context: Sequence[int], chain: Proposal, made=made) -> None:
            text = list(context)
            for token in chain.tokens:
                fresh.target.rewind_to(0)
                logits = fresh.target.prefill(text)
                drafted, _ = made[0]._reader._chooser.draft(logits[0], text[len(context) :], len(context))
                assert drafted == token
                text.append(token)
                compared[0] += 1

        with proposing(monkeypatch, None, margin, noise) as record:

            def proposer(self: Engine, request: Any, chooser: Any, made=made, check=check) -> Any:
                made.append(build(self, request, chooser))
                return Beside(made[0], plain.token_ids, check)

            with monkeypatch.context() as patch:
                patch.setattr(Engine, "proposer", proposer)
                result = engine.generate(PROMPT, method="draft", draft_length=draft_length, **options)
            same_output(result, plain)
        seen_all(policy, record)
    assert compared[0] > 100


@pytest.mark.parametrize("policy", POLICIES)
def test_ngrams_beside_a_side_branch(models: TinyModels, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """The table holds the context, no more and no less, when it is asked."""
    name, margin, noise = POLICIES[policy]
    engine = models.engine(name)
    make_speculation_pay(engine, monkeypatch)
    build = Engine.proposer
    options = {"max_tokens": 120, **RAW}
    plain = engine.generate(PROMPT, method="none", **options)
    proposals = 0
    for draft_length in (3, None):

        def proposer(self: Engine, request: Any, chooser: Any) -> Any:
            inner = build(self, request, chooser)
            assert isinstance(inner, NgramProposer)

            def check(context: Sequence[int], chain: Proposal) -> None:
                nonlocal proposals
                table = inner._table
                assert len(table) == len(context)
                other = engine.drafting.new_table()
                other.extend(context)
                if chain.tokens:
                    proposals += 1
                    again = table.lookup(len(chain))
                    assert again is not None
                    assert again.tokens[: len(chain)] == chain.tokens

            return Beside(inner, plain.token_ids, check)

        for _ in range(2):  # the second time the earlier text proposes
            with proposing(monkeypatch, None, margin, noise) as record, monkeypatch.context() as patch:
                patch.setattr(Engine, "proposer", proposer)
                result = engine.generate(PROMPT, method="ngram", draft_length=draft_length, **options)
            same_output(result, plain)
        assert record.rounds > 3
    assert proposals > 5


def test_proposals_of_an_odd_kind(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer that now proposes trees, now nothing, and a tree with more nodes than a run takes."""
    engine = models.engine("tgt")
    plain = engine.generate(PROMPT, method="none", max_tokens=60, **RAW)
    calls = [0]

    def shape(ahead: Sequence[int], rng: np.random.Generator) -> Proposal:
        calls[0] += 1
        if calls[0] % 3 == 0:
            return EMPTY
        if calls[0] % 3 == 1:
            return Proposal(tuple(ahead), "deterministic")
        wrong = [token for token in range(3, 34) if token != ahead[0]]
        return Proposal((*ahead, *wrong), "deterministic", parents=(*range(-1, len(ahead) - 1), *[-1] * len(wrong)))

    with proposing(monkeypatch, TreeProposer(plain.token_ids, shape)):
        monkeypatch.setattr("tests.runtime.tree_proposers.MAX_NODES", 99)
        result = engine.generate(PROMPT, method="ngram", **RAW, max_tokens=60)
    same_output(result, plain)
    assert result.speculation.proposed <= 32 * result.speculation.rounds
