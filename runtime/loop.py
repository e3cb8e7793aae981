"""The speculative loop: propose -> verify -> accept -> commit -> rewind.

Lengths while it runs, with n = len(committed), the prompt included:

    committed           n          owner: the loop; the only truth
    carried             c          owner: the loop; tokens that inexact rows decided (`side_branches`): no truth, but
                                   proposed first. A proposer's context is committed + carried
    target.length       n - 1      after each round; n + nodes inside one. The newest token has no KV yet: it is the
                                   first input of the next run. Less after a choice was left open
    exact               <= target.length   owner: the loop; so far the cache has plain decoding's bits. It is
                                   target.length unless a side branch was committed; no more is left when the loop ends
    proposer            <= n       what it has seen is its own affair; `rewind_to` tells it how far that stays true
    proposer's features n + c - 1  after each round: those of all tokens of its context but the newest
    chooser's counts    n          draft tokens are pushed and taken off inside `decide`

A round's run takes committed[target.length:], as a rule one token, and behind it the nodes of the proposal. It gives a
row of logits for the newest committed token and for each node: the row decides the token after it. With a draft tokens
accepted, a + 1 tokens are committed: these and a correction or a bonus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import EMPTY, Proposer, TakesLogits
from specrun.runtime.result import SpeculationStats, Token
from specrun.runtime.session import ModelSession


@dataclass(frozen=True, slots=True)
class Limits:
    """`length`: the most committed tokens, prompt included; `draft_length`: how deep a proposal may be."""

    length: int
    draft_length: int
    eos: frozenset[int]

    def depth(self, committed: int) -> int:
        """How deep a proposal may be: never deeper than could still be committed."""
        return max(0, min(self.draft_length, self.length - committed - 1))


def speculate(
    target: ModelSession,
    proposer: Proposer | None,
    chooser: Chooser,
    committed: list[int],
    limits: Limits,
    stats: SpeculationStats,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[list[Token]]:
    """Yield the tokens of the prefill, then of each round, until an end-of-text id or the limit.

    committed: the prompt, extended in place. The target's cache holds a true prefix of it, shorter than the prompt, and
    again when the loop ends, so the caller may stop at any yield. A round may yield no token. `cancelled` is asked
    after each chunk of the prefill; if it says so, nothing is yielded.
    """
    if proposer is not None:
        proposer.start(committed)
    for step in target.prefill_steps(committed[target.length :]):
        if cancelled():
            return
        logits = step
        _hand_features(target, proposer, target.length, target.length)
    token = chooser.first(logits, len(committed))
    committed.append(token)
    chooser.commit([token])
    yield [chooser.token(token, "prefill", logits, 0)]

    carried, exact = EMPTY, target.length
    watching: TakesLogits | None = proposer if isinstance(proposer, TakesLogits) else None
    try:
        while len(committed) < limits.length and committed[-1] not in limits.eos:
            # propose
            length, held, head = len(committed), target.length, len(carried)
            start = time.perf_counter()
            proposal = EMPTY
            if proposer is not None:
                context = [*committed, *carried.tokens] if head else committed
                proposal = proposer.propose(context, limits.depth(length) - head).behind(carried)
            if proposal.parents is not None:
                proposal = proposal.first(max(proposal.main_length, target.tree_room(length)))
            proposed = time.perf_counter()

            # verify
            inputs = [*committed[held:], *proposal.tokens]
            logits = target.run(inputs, rows=1 + len(proposal), parents=proposal.parents)
            verified = time.perf_counter()

            # accept
            decision = chooser.decide(proposal, logits, length, exact_cache=exact == held)
            tokens, path, main = decision.tokens, decision.path, decision.main

            # commit
            committed += tokens
            chooser.commit(tokens)
            carried = decision.carried.first(limits.depth(len(committed)))
            stats.count_round(
                proposed=len(proposal),
                accepted=decision.num_accepted,
                kind=decision.kind,
                draft_s=proposed - start,
                verify_s=verified - proposed,
            )

            # rewind
            kept = path[: len(tokens) - 1]
            target.keep_path(length, kept)
            if exact == held:
                exact = length + min(main, len(kept))
            if decision.open:
                target.rewind_to(exact)
            if proposer is not None:
                own = tuple([node - head for node in path if node >= head]) if head else path
                judged = decision.rejected and len(path) >= head
                if watching is not None:
                    watching.take_logits(logits[head:])
                proposer.observe(evaluated=len(own) + judged, accepted=len(own), path=own)
                proposer.rewind_to(min(length + main, len(committed) - 1))
                end = len(committed) + len(carried) - 1
                _hand_features(target, proposer, length, end, path, len(proposal))
                target.note_rest(time.perf_counter() - verified)

            yield [
                chooser.token(token, source, logits, row)
                for token, source, row in zip(tokens, decision.sources, (0, *[node + 1 for node in path]), strict=False)
            ]
    finally:
        target.rewind_to(min(target.length, exact))


def _hand_features(
    target: ModelSession, proposer: Proposer | None, root: int, end: int, path: Sequence[int] = (), nodes: int = 0
) -> None:
    """Hand over what the last run found: features of the context's tokens before `root` and of the path there.

    nodes: how many the run had there. Nothing of the context's tokens from `end` on is handed over.
    """
    if proposer is None or not proposer.needs_features:
        return
    features = target.features
    before = len(features) - nodes
    rows = [*range(before), *[before + node for node in path]][: end - (root - before)]
    if rows:
        in_order = rows[-1] == len(rows) - 1
        proposer.take_features(root - before, features[: len(rows)] if in_order else features[rows])
