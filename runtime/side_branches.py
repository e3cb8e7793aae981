"""What a round commits of a token tree, so that the text keeps every bit of plain decoding's.

Only rows whose keys lie one after another in the cache have plain decoding's bits: those of the main branch, as long as
the cache before them does. A row of a side branch differs by the rounding of another order of sums: up to 7.5e-5 in a
logit of an fp32 graph; an 8-bit graph amplifies that to 0.65 and more. Two policies keep the promise (a chain needs
neither):

    re-verify   Commit what exact rows decided. When that ends at a token which is a child on a side branch, the token
                is committed as a correction, and what its branch came to, the token after it included, is carried: the
                next round proposes it first, and its keys and values are written anew. It nearly always stands; under
                the rejection rule it is proposed as drawn from the inexact rows.
    margin      Commit side branches too, where the choice wins by more than the rounding could turn, and remember from
                where on the cache is inexact. A choice that wins by less is left open: the cache is rewound to where it
                is exact, and the next run takes the tokens from there on as a chain (the bound starts anew there).

Where trees have a graph of their own (`session.TREES`), with another attention, none of a tree's rows is exact, so
there the margin alone is used, with a bound measured on the device (`calibration`).

The margin is for these and for fp32 graphs, greedy or coupled. Other graphs re-verify, and so do, because it is
simpler, requests with penalties, with top-k, top-p or min-p (a filter's border would need a margin too), or with
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specrun.runtime.acceptance import Outcome, OutcomeKind
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.result import Source
from specrun.runtime.sampling import Distribution

MARGIN: Final = 1e-3
"""By how much a choice must win, in logits of an fp32 graph: it then survives errors of half as much in every logit."""

TREE_SAFETY: Final = 8.0
"""By how many times the measured bound a choice must win; twice would do if no error were larger than it."""


def tree_margin(bound: float | None) -> float | None:
    """The margin for graphs of 16 bits whose trees have a graph of their own, by the bound that was measured there.

    None, so that trees are not run, where nothing was.
    """
    return None if bound is None else max(MARGIN, TREE_SAFETY * bound)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a round comes to.

    path          the nodes that the target went through, side branches included
    main          how many of them, the first ones, belong to the main branch
    tokens        to commit: those of the first `num_accepted` nodes of the path, then one of `kind` (None: none)
    num_accepted  draft tokens that stand
    rejected      whether the path ended where there were children and none was the choice
    carried       a chain that the next round proposes first
    open          whether the token after the path was left open
    """

    path: tuple[int, ...]
    main: int
    tokens: tuple[int, ...]
    num_accepted: int
    kind: OutcomeKind | None
    rejected: bool
    carried: Proposal
    open: bool

    @property
    def sources(self) -> list[Source]:
        """Where each of the tokens came from."""
        drafts: list[Source] = ["draft"] * self.num_accepted
        return drafts if self.kind is None else [*drafts, self.kind]


def settle(
    proposal: Proposal, outcome: Outcome, *, whole: bool, rows: Sequence[Distribution] = (), ended: bool = False
) -> Decision:
    """What is committed of an outcome, and what is carried.

    whole: side branches are committed too (margin), else what the main branch's rows decided (re-verify). rows: under
    the rejection rule the distributions of the path's rows, in order. ended: the path ends the text.
    """
    path, last = outcome.path, outcome.next_token
    tokens = tuple([proposal.tokens[node] for node in path])
    if last is not None:
        tokens += (last,)
    main = len(path)
    if path and path[-1] != main - 1:
        main = next(place for place, node in enumerate(path) if node != place)
    rejected, undecided = outcome.kind == "correction", last is None and not ended
    if whole or main == len(path):
        return Decision(path, main, tokens, len(path), outcome.kind, rejected, EMPTY, undecided)
    later = tokens[main + 1 :]
    carried = Proposal(later, "sampled", tuple(rows[main + 1 :])) if rows else Proposal(later, "deterministic")
    return Decision(path, main, tokens[: main + 1], main, "correction", rejected, carried, False)
