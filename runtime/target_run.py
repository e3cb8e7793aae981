"""What the loop asks of a target, and how a target that serves one request alone answers."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.device_rows import Logits
from specrun.runtime.proposal import EMPTY, Proposal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the loop wants: `tokens` that were committed, behind them the nodes of `proposal`.

    prefill: a chunk of the prompt, whose last token's logits are wanted.
    """

    tokens: list[int]
    proposal: Proposal = EMPTY
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class RunAnswer:
    """The run was made: logits f32 [nodes + 1, vocabulary] after the newest committed token and after each node.

    proposal: what was run of it, its first nodes; rows of a batch have one width. seconds: what the run took, and of a
    batch this row's share. The logits are a view that the target's next run overwrites.
    """

    proposal: Proposal
    logits: Logits
    seconds: float


class TargetRow(Protocol):
    """What the loop sees of a target: one row's cache, of a `ModelSession` or of a batch."""

    @property
    def length(self) -> int:
        """Positions that the cache holds."""
        ...

    @property
    def features(self) -> NDArray[np.float32]:
        """Features f32 [n, taps x hidden] of the tokens of the last run."""
        ...

    @property
    def trees_exact(self) -> bool:
        """Whether in a run of a tree the main branch has a chain's bits; if not, none of its rows has."""
        ...

    def tree_room(self, length: int) -> int:
        """The most nodes that a token tree may have behind `length` tokens; 0: only a chain can be run."""
        ...

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` positions."""
        ...

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        """Of the nodes that the last run put behind `start` positions, keep these, ascending, and no more."""
        ...

    def note_rest(self, seconds: float) -> None:
        """A round took so long after its run."""
        ...


class SoloTarget(Protocol):
    """A target that runs one row."""

    def run(self, tokens: Sequence[int], *, rows: int, parents: Sequence[int] | None = None) -> Logits:
        """Append tokens; logits f32 [rows, vocabulary] of the last ones (`ModelSession.run`)."""
        ...


def alone(target: SoloTarget, steps: Generator[T | RunRequest, RunAnswer | None]) -> Generator[T]:
    """What `steps` yields besides requests, each of which is answered at once by a run of the whole proposal."""
    try:
        step = next(steps, None)
        while step is not None:
            if isinstance(step, RunRequest):
                step = resume(steps, answer(target, step))
            else:
                yield step
                step = next(steps, None)
    finally:
        steps.close()


def answer(target: SoloTarget, request: RunRequest) -> RunAnswer:
    """Run a request as it is."""
    proposal = request.proposal
    start = time.perf_counter()
    logits = target.run([*request.tokens, *proposal.tokens], rows=1 + len(proposal), parents=proposal.parents)
    return RunAnswer(proposal, logits, time.perf_counter() - start)


def resume(steps: Generator[T | RunRequest, RunAnswer | None], given: RunAnswer | None) -> T | RunRequest | None:
    """Send an answer; what `steps` yields then, None at its end."""
    try:
        return steps.send(given)
    except StopIteration:
        return None
