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

The loop makes no run itself: it asks for one and goes on with the answer, so that a request alone and a row of a batch
are the same loop (`target_run.alone`, `batch`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from specrun.runtime.chooser import Chooser
from specrun.runtime.feature_rows import hand_features
from specrun.runtime.proposal import EMPTY, Proposer, TakesLogits
from specrun.runtime.result import SpeculationStats, Token
from specrun.runtime.session import PREFILL_CHUNK
from specrun.runtime.target_run import RunAnswer, RunRequest, TargetRow


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
    target: TargetRow,
    proposer: Proposer | None,
    chooser: Chooser,
    committed: list[int],
    limits: Limits,
    stats: SpeculationStats,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[list[Token] | RunRequest, RunAnswer | None]:
    """Yield the tokens of the prefill, then of each round, until an end-of-text id or the limit.

    Between them come requests for runs of the target, each to be answered. committed: the prompt, extended in place.
    The target's cache holds a true prefix of it, shorter than the prompt, and again when the loop ends, so the caller
    may stop at any yield. A round may yield no token. `cancelled` is asked after each chunk of the prefill; if it says
    so, nothing is yielded.
    """
    if proposer is not None:
        proposer.start(committed)
    for start in range(target.length, len(committed), PREFILL_CHUNK):
        answer = yield RunRequest(committed[start : start + PREFILL_CHUNK], prefill=True)
        assert answer is not None
        if cancelled():
            return
        logits = answer.logits
        hand_features(target, proposer, target.length, target.length)
    token = chooser.first(logits, len(committed))
    committed.append(token)
    chooser.commit([token])
    yield [chooser.token(token, "prefill", logits, 0)]

    carried, exact, reopened = EMPTY, target.length, False
    watching: TakesLogits | None = proposer if isinstance(proposer, TakesLogits) else None
    try:
        while len(committed) < limits.length and committed[-1] not in limits.eos:
            # propose
            length, held, head = len(committed), target.length, len(carried)
            began = time.perf_counter()
            proposal = EMPTY
            if proposer is not None:
                context = [*committed, *carried.tokens] if head else committed
                proposal = proposer.propose(context, limits.depth(length) - head).behind(carried)
            if proposal.parents is not None:
                # Where a tree makes no row exact it is of use only where choices win clearly, not after an open one.
                useful = target.trees_exact or (chooser.commits_side_branches and not reopened)
                proposal = proposal.first(max(proposal.main_length, target.tree_room(length) if useful else 0))
            proposed = time.perf_counter()

            # verify
            answer = yield RunRequest(committed[held:], proposal)
            assert answer is not None
            proposal, logits = answer.proposal, answer.logits
            verified = time.perf_counter()

            # accept
            exact_run = proposal.parents is None or target.trees_exact
            decision = chooser.decide(proposal, logits, length, exact_cache=exact == held and exact_run)
            tokens, path, main = decision.tokens, decision.path, decision.main

            # commit
            committed += tokens
            chooser.commit(tokens)
            carried = decision.carried.first(limits.depth(len(committed)))
            stats.count_round(
                proposed=len(proposal),
                accepted=decision.num_accepted,
                kind=decision.kind,
                draft_s=proposed - began,
                verify_s=answer.seconds,
            )

            # rewind
            kept = path[: len(tokens) - 1]
            target.keep_path(length, kept)
            if exact == held and exact_run:
                exact = length + min(main, len(kept))
            reopened = decision.open
            if reopened:
                target.rewind_to(exact)
            if proposer is not None:
                own = tuple([node - head for node in path if node >= head]) if head else path
                judged = decision.rejected and len(path) >= head
                if watching is not None:
                    watching.take_logits(logits[head:])
                proposer.observe(evaluated=len(own) + judged, accepted=len(own), path=own)
                proposer.rewind_to(min(length + main, len(committed) - 1))
                end = len(committed) + len(carried) - 1
                hand_features(target, proposer, length, end, path, len(proposal))
                target.note_rest(time.perf_counter() - verified)

            yield [
                chooser.token(token, source, logits, row)
                for token, source, row in zip(tokens, decision.sources, (0, *[node + 1 for node in path]), strict=False)
            ]
    finally:
        target.rewind_to(min(target.length, exact))
