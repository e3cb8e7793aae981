"""Proposers that know the text to come and put it where they are told, and a record of what the loop decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from specrun.runtime import Engine
from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import EMPTY, MAX_NODES, Proposal
from specrun.runtime.session import ModelSession
from specrun.runtime.side_branches import Decision

TOKENS = 270
Shape = Callable[[Sequence[int], np.random.Generator], Proposal]


class TreeProposer:
    """Gives `shape` the tokens that will follow the context, as far as they are known and may be proposed.

    Holds the loop to its word: the context is prompt and text, as far as it is committed; features come for all of it
    but the newest token, in order and without gaps.
    """

    name = "trees"
    needs_features = True

    def __init__(self, text: Sequence[int], shape: Shape, *, depth: int = 5, seed: int = 0) -> None:
        self.text, self.shape, self.depth = list(text), shape, depth
        self.rng = np.random.default_rng(seed)
        self.sizes: list[int] = []
        self.known = 0
        self.features: dict[int, np.ndarray] = {}
        self.last = EMPTY
        self.proposed = False

    def start(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt, self.known, self.features = list(prompt_tokens), -1, {}

    def take_features(self, position: int, features: np.ndarray) -> None:
        assert position >= 0
        assert len(features)
        assert self.known < 0 or position <= self.known
        for index, row in enumerate(features):
            self.features[position + index] = row.copy()
        self.known = position + len(features)

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        assert limit >= 0
        assert self.known == len(context) - 1
        done = len(context) - len(self.prompt)
        ahead = self.text[done : done + min(limit, self.depth)]
        proposal = self.shape(ahead, self.rng) if ahead else EMPTY
        assert len(proposal) <= MAX_NODES
        self.sizes.append(len(proposal))
        self.last = proposal
        return proposal

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        assert accepted == len(path) <= evaluated <= accepted + 1
        parent = -1
        for node in path:
            assert node in self.last.children(parent)
            parent = node
        assert evaluated == accepted or self.last.children(parent)

    def rewind_to(self, length: int) -> None:
        assert length >= len(self.prompt)

    def close(self) -> None:
        pass


def other(token: int, step: int = 1) -> int:
    """Another token, no special one."""
    return 3 + (token - 3 + step) % (TOKENS - 3)


def main_right(ahead: Sequence[int], rng: np.random.Generator) -> Proposal:
    """The text on the main branch, a wrong sibling at each node."""
    tokens, parents = list(ahead), list(range(-1, len(ahead) - 1))
    for place, token in enumerate(ahead):
        tokens.append(other(token))
        parents.append(place - 1)
    return Proposal(tuple(tokens), "deterministic", parents=tuple(parents))


def side_right(ahead: Sequence[int], rng: np.random.Generator, *, right: int | None = None) -> Proposal:
    """`right` tokens of the text on the main branch and a wrong one after them; the rest of the text beside that."""
    split = int(rng.integers(0, len(ahead))) if right is None else min(right, len(ahead) - 1)
    tokens = [*ahead[:split], other(ahead[split]), *ahead[split:]]
    parents = [*range(-1, split), split - 1, *range(split + 1, len(tokens) - 1)]
    return Proposal(tuple(tokens), "deterministic", parents=tuple(parents))


def all_wrong(ahead: Sequence[int], rng: np.random.Generator) -> Proposal:
    """Two branches, none of which begins right."""
    tokens = [other(token) for token in ahead] + [other(token, 2) for token in ahead]
    parents = [*range(-1, len(ahead) - 1), -1, *range(len(ahead), 2 * len(ahead) - 1)]
    return Proposal(tuple(tokens), "deterministic", parents=tuple(parents))


def random_tree(ahead: Sequence[int], rng: np.random.Generator) -> Proposal:
    """Any tree; a child of a node on the text's path is the text's next token more often than not."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    right: list[bool] = []
    for _ in range(int(rng.integers(0, MAX_NODES + 1))):
        parent = int(rng.integers(-1, len(tokens)))
        if rng.random() < 0.5:
            parent = len(tokens) - 1
        depth = depths[parent] + 1 if parent >= 0 else 0
        if depth >= len(ahead):
            continue
        on_path = parent < 0 or right[parent]
        token = ahead[depth] if on_path and rng.random() < 0.6 else int(rng.integers(3, TOKENS))
        if any(tokens[node] == token for node in range(len(tokens)) if parents[node] == parent):
            continue
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        right.append(on_path and token == ahead[depth])
    return Proposal(tuple(tokens), "deterministic", parents=tuple(parents))


SHAPES: dict[str, Shape] = {"main": main_right, "side": side_right, "wrong": all_wrong, "random": random_tree}


class Record:
    """What the rounds came to. side: tokens of side branches that were committed as drafts."""

    def __init__(self) -> None:
        self.rounds = self.carried = self.carried_accepted = self.open = self.side = self.inexact = 0
        self._head: tuple[int, ...] = ()

    def add(self, proposal: Proposal, decision: Decision, exact_cache: bool) -> None:
        self.rounds += 1
        self.carried += len(decision.carried)
        self.carried_accepted += min(decision.num_accepted, len(self._head))
        assert proposal.tokens[: len(self._head)] == self._head[: len(proposal)]
        self._head = decision.carried.tokens
        self.open += decision.open
        self.inexact += not exact_cache
        self.side += max(decision.num_accepted - decision.main, 0)
        assert not (decision.open and len(decision.carried))


@contextmanager
def proposing(
    monkeypatch: pytest.MonkeyPatch, proposer: Any, margin: float | str | None = "own", noise: float = 0.0
) -> Iterator[Record]:
    """Every request of a method other than "none" takes this proposer.

    margin: instead of the engine's own. noise: spread of what is added to logits, keys and values of side branches, as
    the tiny models' own rounding is far smaller than a real one's.
    """
    record, rng = Record(), np.random.default_rng(1)
    decide, run = Chooser.decide, ModelSession.run_batch

    def recorded(self: Chooser, proposal: Proposal, *args: Any, exact_cache: bool = True) -> Decision:
        decision = decide(self, proposal, *args, exact_cache=exact_cache)
        record.add(proposal, decision, exact_cache)
        return decision

    def rough(self: ModelSession, tokens: Any, *, rows: int, parents: Sequence[int] | None = None) -> np.ndarray:
        logits = run(self, tokens, rows=rows, parents=parents)
        if parents is not None:
            main = next(node for node, parent in enumerate(parents) if parent != node - 1)
            side = len(parents) - main
            logits[0, -side:] += noise * rng.standard_normal(logits[0, -side:].shape)
            for value in self.cache.values:
                entries = value.numpy()[0, :, self.length - side : self.length]
                entries += noise * rng.standard_normal(entries.shape)
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(Chooser, "decide", recorded)
        patch.setattr(Engine, "proposer", lambda self, request, _: None if request.method == "none" else proposer)
        if noise:
            patch.setattr(ModelSession, "run_batch", rough)
        if margin != "own":
            patch.setattr(Engine, "margin", margin)
        yield record
