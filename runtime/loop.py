"""The speculative loop: propose -> verify -> accept -> commit -> rewind.

Lengths while it runs, with n = len(committed), the prompt included:

    committed           n          owner: the loop; the only truth
    target.length       n - 1      after each round; n + K inside one. The newest token has no KV yet: it is the first
                                   input of the next run
    proposer            <= n       what it has seen is its own affair; `rewind_to` tells it how far that stays true
    chooser's counts    n          draft tokens are pushed and taken off inside `decide`

A round's run has 1 + K inputs, [newest committed, d1 .. dK], and gives K + 1 rows of logits: row j decides the token
after d1 .. dj. With a of the K accepted, a + 1 tokens are committed: the drafts and a correction or a bonus.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from specrun.runtime.chooser import Chooser
from specrun.runtime.proposal import EMPTY, Proposer
from specrun.runtime.result import Source, SpeculationStats, Token
from specrun.runtime.session import ModelSession


@dataclass(frozen=True, slots=True)
class Limits:
    """`length`: the most committed tokens, prompt included; `draft_length`: the most draft tokens a round."""

    length: int
    draft_length: int
    eos: frozenset[int]


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

    committed: the prompt, extended in place. The target's cache holds a true prefix of it, shorter than the prompt.
    Between two yields the target's length is len(committed) - 1, so the caller may stop at any of them. `cancelled` is
    asked after each chunk of the prefill; if it says so, nothing is yielded.
    """
    for step in target.prefill_steps(committed[target.length :]):
        if cancelled():
            return
        logits = step
    token = chooser.first(logits, len(committed))
    logprob, top = chooser.logprobs(logits[0], token)
    if proposer is not None:
        proposer.start(committed)
    committed.append(token)
    chooser.commit([token])
    yield [Token(token, "prefill", logprob, top)]

    while len(committed) < limits.length and committed[-1] not in limits.eos:
        # propose: never more than could still be committed
        length = len(committed)
        limit = min(limits.draft_length, limits.length - length - 1)
        start = time.perf_counter()
        proposal = EMPTY if proposer is None else proposer.propose(committed, limit)
        proposed = time.perf_counter()

        # verify
        logits = target.run([committed[-1], *proposal.tokens], rows=1 + len(proposal))
        verified = time.perf_counter()

        # accept
        outcome = chooser.decide(proposal, logits, length)
        tokens = [*proposal.tokens[: outcome.num_accepted], outcome.next_token]
        drafts: list[Source] = ["draft"] * outcome.num_accepted
        sources = [*drafts, outcome.kind]
        ends = [index for index, token in enumerate(tokens) if token in limits.eos]
        if ends:  # what was decided beyond the end of the text does not count
            del tokens[ends[0] + 1 :], sources[ends[0] + 1 :]
        num_accepted = sources.count("draft")
        evaluated = num_accepted + (sources[-1] == "correction")

        # commit
        committed += tokens
        chooser.commit(tokens)
        stats.rounds += 1
        stats.proposed += len(proposal)
        stats.evaluated += evaluated
        stats.accepted += num_accepted
        stats.corrections += sources[-1] == "correction"
        stats.bonuses += sources[-1] == "bonus"
        stats.histogram[num_accepted] += 1
        stats.draft_s += proposed - start
        stats.verify_s += verified - proposed

        # rewind
        target.rewind_to(len(committed) - 1)
        if proposer is not None:
            proposer.observe(evaluated=evaluated, accepted=num_accepted, path=tuple(range(num_accepted)))
            proposer.rewind_to(length + num_accepted)
        yield [
            Token(token, source, *chooser.logprobs(logits[row], token))
            for row, (token, source) in enumerate(zip(tokens, sources, strict=True))
        ]
