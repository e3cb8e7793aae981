"""Decides the target's tokens under one request's options: the same for every method, plain decoding included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.acceptance import OPEN, NodeStep, Outcome, accept_tree, choose_child, sampled_children
from specrun.runtime.coupled_choice import coupled_choice
from specrun.runtime.coupled_noise import CoupledNoise
from specrun.runtime.device_rows import DeviceLogits, Logits
from specrun.runtime.grammar import Matcher
from specrun.runtime.logprobs import logprob, top_logprobs
from specrun.runtime.options import GenerationOptions
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.result import Source, Token
from specrun.runtime.sampling import (
    Distribution,
    Mask,
    RandomStream,
    TokenCounts,
    coupled_token,
    distribution,
    greedy_tokens,
    possible_row,
    sample,
)
from specrun.runtime.side_branches import Decision, settle

MOST_CANDIDATES: Final = 1024  # of a row that come from a device one by one


class Chooser:
    """Turns rows of logits into tokens. `options.sampling.seed` must be set unless it is greedy.

    tokens: real size of the vocabulary. sample_index: which of several samples of one request this is. margin: by how
    much a choice must win, in logits, on a row that is not exact; None where such rows are never trusted. grammar: what
    the completion must fit. `noise` is that of coupled sampling, for heads that look at the same positions.
    """

    def __init__(
        self,
        options: GenerationOptions,
        *,
        prompt: Sequence[int],
        tokens: int,
        eos: Sequence[int],
        sample_index: int = 0,
        margin: float | None = None,
        grammar: Matcher | None = None,
    ) -> None:
        self._options = options
        self._sampling = options.sampling
        self._tokens = tokens
        self._eos = tuple(eos)
        self._ends = frozenset(() if options.ignore_eos else eos)
        self._prompt_length = len(prompt)
        self._sample_index = sample_index
        self._seed = options.sampling.seed or 0
        self._plain_greedy = self._sampling.greedy and not self._sampling.penalised
        self._counts = TokenCounts(prompt) if self._sampling.penalised else None
        self._counted = 0
        self._grammar = grammar
        self.noise = CoupledNoise(self._seed, sample_index, tokens)
        drawn = self._sampling.mode == "rejection" and not self._sampling.greedy
        self._stream = RandomStream(self._seed, sample_index) if drawn else None
        simple = self._plain_greedy or not (drawn or self._sampling.filtered or self._sampling.penalised)
        self._margin = margin if simple and options.logprobs is None else None

    @property
    def commits_side_branches(self) -> bool:
        """Whether tokens of side branches are committed in their own round, where they win clearly."""
        return self._margin is not None

    def decide(self, proposal: Proposal, logits: Logits, committed: int, *, exact_cache: bool = True) -> Decision:
        """Judge a proposal by logits f32 [nodes + 1, V]; row 0 decides the token at position `committed`.

        exact_cache: the cache had plain decoding's bits before this run, so the rows of the main branch have them too.
        Logits on a device are judged there, where the rule is a plain one.
        """
        if isinstance(logits, DeviceLogits):
            whole = self._margin is None or (exact_cache and proposal.main_length == len(proposal))
            outcome = self._judged(proposal, logits, committed) if whole else None
            if outcome is not None:
                ended = bool(outcome.path) and outcome.next_token is None
                return settle(proposal, outcome, whole=self._margin is not None, rows=[], ended=ended)
            # Under top-k nothing else of a row is looked at, and a penalty would have to come before.
            few = 0 < self._sampling.top_k <= MOST_CANDIDATES and not self._sampling.penalised
            few = few and self._options.logprobs is None and self._grammar is None and self._banned(committed) is None
            logits = logits.best(self._sampling.top_k, self._tokens) if few else np.asarray(logits)
        exact = proposal.main_length if exact_cache else -1
        drafts: list[int] = []
        rows: list[Distribution] = []

        def step(node: int, children: tuple[int, ...]) -> NodeStep:
            row, position = logits[node + 1], committed + len(drafts)
            mask = self._mask(position, drafts)
            if self._stream is not None:
                rows.append(self._distribution(row, drafts, committed, mask))
                taken = self._drawn(rows[-1], proposal, node, children, self._stream)
            else:
                choice = self._choice(row, drafts, committed, mask)
                sure = node < exact or self._margin is None or self._wins(row, drafts, committed, choice, mask)
                taken = choose_child(children, choice) if sure else OPEN
            if taken.child is not None:
                drafts.append(children[taken.child])
            return taken

        outcome = accept_tree(proposal, step, self._ends)
        ended = bool(drafts) and drafts[-1] in self._ends
        return settle(proposal, outcome, whole=self._margin is not None, rows=rows, ended=ended)

    def _judged(self, proposal: Proposal, logits: DeviceLogits, committed: int) -> Outcome | None:
        """What the device decides; None where it cannot, and the rows must come to the host.

        It can for greedy decoding, and for a point-mass proposal under the rejection rule without filters or penalties;
        not where ids are banned.
        """
        plain = self._grammar is None and self._banned(committed) is None
        if not plain or self._options.logprobs is not None:
            return None
        if self._plain_greedy:
            verdict = logits.greedy(proposal, self._tokens)
        elif (
            self._stream is not None
            and proposal.q is None
            and not (self._sampling.filtered or self._sampling.penalised)
        ):
            uniforms = self._stream.ahead(len(proposal) + 1)
            verdict = logits.drawn(proposal, self._tokens, self._sampling.temperature, uniforms)
        else:
            return None
        path: tuple[int, ...] = ()
        for node in verdict.path:
            path = (*path, node)
            if proposal.tokens[node] in self._ends:
                break
        ended = bool(path) and proposal.tokens[path[-1]] in self._ends
        if self._stream is not None:
            self._stream.skip(len(path) + (not ended))
        if ended:
            return Outcome(path, None, None)
        last = path[-1] if path else -1
        return Outcome(path, verdict.next_token, "correction" if proposal.children(last) else "bonus")

    def _choice(self, row: NDArray[np.float32], drafts: Sequence[int], committed: int, mask: Mask | None) -> int:
        """The token of a row f32 [V] behind `drafts`, which the options and the noise of the position fix."""
        position = committed + len(drafts)
        if self._plain_greedy:
            return self._best(row, position, mask)
        if self._sampling.filtered or self._sampling.greedy:
            return self._coupled(self._distribution(row, drafts, committed, mask), position)
        row, best = possible_row(row, **self._of_row(drafts, committed, mask))
        return coupled_choice(row, float(row[best]), self._sampling.temperature, self.noise, position)

    def _wins(
        self, row: NDArray[np.float32], drafts: Sequence[int], committed: int, choice: int, mask: Mask | None
    ) -> bool:
        """Whether the choice would be the same if its logit were lower by the margin, under the same noise."""
        row = row.copy()
        row[choice] -= self._margin or 0.0
        return self._choice(row, drafts, committed, mask) == choice

    def _coupled(self, p: Distribution, position: int) -> int:
        return coupled_token(p, seed=self._seed, sample_index=self._sample_index, position=position, noise=self.noise)

    def _drawn(
        self, p: Distribution, proposal: Proposal, node: int, children: tuple[int, ...], stream: RandomStream
    ) -> NodeStep:
        """The rejection rule at a node."""
        nodes = proposal.children(node)
        if proposal.q is None or proposal.fixed(nodes):
            return choose_child(children, sample(p, stream.uniform()))
        return sampled_children(p, proposal.q[nodes[0]], children, stream, tokens=self._tokens)

    def first(self, logits: Logits, committed: int) -> int:
        """The token that follows the prompt, from the prefill's logits f32 [1, V]."""
        return self.decide(EMPTY, logits, committed).tokens[0]

    def draft(
        self, logits: NDArray[np.float32], drafts: Sequence[int], committed: int
    ) -> tuple[int, Distribution | None]:
        """(next draft token, q it was drawn from or None) by a draft model's row f32 [V] after `drafts`.

        Under the rejection rule the token is drawn from the draft's own distribution q. Otherwise it is the draft's
        guess of what the target will choose: its argmax, or its sample under the target's own noise.
        """
        mask = None
        if self._grammar is not None and committed == self._prompt_length + len(self._grammar):
            mask = self._grammar.allowed(drafts)  # None behind a draft token that is forbidden or ends the text
            if mask is not None and not np.isfinite(logits[: mask.size][mask[: logits.size]]).any():
                mask = None  # the draft knows none of the tokens that may come
        if self._stream is None:
            return self._choice(logits, drafts, committed, mask), None
        q = self._distribution(logits, drafts, committed, mask)
        return sample(q, self._stream.uniform()), q

    def allowed_part(self, proposal: Proposal, length: int) -> Proposal:
        """What of a proposal behind a context of `length` tokens may stand by the grammar: the rest need not be run.

        Draws stay as they are: the rejection rule needs those that fail, too. So does what is proposed behind tokens
        that are not sure yet.
        """
        if self._grammar is None or proposal.kind != "deterministic" or not proposal.tokens:
            return proposal
        if length != self._prompt_length + len(self._grammar):
            return proposal
        if proposal.parents is None:
            return proposal.first(self._grammar.fitting(proposal.tokens))
        paths: list[tuple[int, ...]] = []
        kept: dict[int, int] = {-1: -1}  # the new number of each node that stays
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True)):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            if parent in kept and self._grammar.fitting(paths[node]) == len(paths[node]):
                kept[node] = len(kept) - 1
        if len(kept) > len(proposal):
            return proposal
        nodes = [node for node in kept if node >= 0]
        parents = tuple(kept[proposal.parents[node]] for node in nodes)
        return Proposal(tuple(proposal.tokens[node] for node in nodes), "deterministic", parents=parents)

    def commit(self, tokens: Sequence[int]) -> None:
        """Count tokens that were committed."""
        if self._grammar is not None:
            self._grammar.commit(tokens)
        if self._counts is not None:
            self._counts.rewind_to(self._counted)
            for token in tokens:
                self._counts.push(token)
            self._counted += len(tokens)

    def token(self, token: int, source: Source, logits: Logits, row: int) -> Token:
        """A token that a row of logits f32 [rows, V] decided, with log-probabilities if the request asks for them."""
        if self._options.logprobs is None:
            return Token(token, source)
        wanted = self._options.logprobs
        top = top_logprobs(logits[row], wanted, tokens=self._tokens) if wanted else []
        value = logprob(logits[row], token, tokens=self._tokens)
        if not self._options.certainties:
            return Token(token, source, value, tuple(top))
        # The mean over the vocabulary of -log(V p), with log p(x) = logit(x) - logit(token) + log p(token).
        mean = float(logits[row, : self._tokens].mean(dtype=np.float64))
        certainty = float(logits[row, token]) - value - mean - math.log(self._tokens)
        return Token(token, source, value, tuple(top), certainty)

    def _banned(self, position: int) -> tuple[int, ...] | None:
        number = position - self._prompt_length + 1
        return None if self._options.may_end(number) or self._options.ignore_eos else self._eos

    def _mask(self, position: int, drafts: Sequence[int]) -> Mask | None:
        """What the grammar allows at a position of the target, behind `drafts` that it allowed.

        Where only the end of the text is left, min_tokens does not hold it off.
        """
        if self._grammar is None:
            return None
        mask = self._grammar.allowed(drafts)
        if mask is None:
            raise ValueError(f"draft tokens {drafts} are not of the grammar")
        banned = self._banned(position)
        if banned is not None:
            held = mask.copy()
            held[list(banned)] = False
            mask = held if held.any() else mask
        return mask

    def _best(self, row: NDArray[np.float32], position: int, mask: Mask | None) -> int:
        return int(greedy_tokens(row[None], self._tokens, self._bans(position, mask), mask)[0])

    def _bans(self, position: int, mask: Mask | None) -> tuple[int, ...] | None:
        """Ids that are banned at a position; a mask knows them already."""
        return self._banned(position) if mask is None else None

    def _distribution(
        self, row: NDArray[np.float32], drafts: Sequence[int], committed: int, mask: Mask | None
    ) -> Distribution:
        return distribution(row, **self._of_row(drafts, committed, mask))

    def _of_row(self, drafts: Sequence[int], committed: int, mask: Mask | None) -> dict[str, Any]:
        """What makes a distribution of the row behind `drafts`, as arguments."""
        if self._counts is not None:
            self._counts.rewind_to(self._counted)
            for token in drafts:
                self._counts.push(token)
        banned = self._bans(committed + len(drafts), mask)
        return {
            "history": self._counts,
            "options": self._sampling,
            "tokens": self._tokens,
            "banned": banned,
            "allowed": mask,
        }
