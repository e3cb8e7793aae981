"""Decides the target's tokens under one request's options: the same for every method, plain decoding included."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.acceptance import (
    Outcome,
    coupled_chain,
    match_chain,
    rejection_chain,
    rejection_chain_deterministic,
)
from specrun.runtime.options import GenerationOptions
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.sampling import (
    Distribution,
    RandomStream,
    TokenCounts,
    coupled_token,
    distribution,
    greedy_tokens,
    logprob,
    sample,
    top_logprobs,
)


class Chooser:
    """Turns rows of logits into tokens. `options.sampling.seed` must be set unless it is greedy.

    tokens: real size of the vocabulary. sample_index: which of several samples of one request this is.
    """

    def __init__(
        self,
        options: GenerationOptions,
        *,
        prompt: Sequence[int],
        tokens: int,
        eos: Sequence[int],
        sample_index: int = 0,
    ) -> None:
        self._options = options
        self._sampling = options.sampling
        self._tokens = tokens
        self._eos = tuple(eos)
        self._prompt_length = len(prompt)
        self._sample_index = sample_index
        self._seed = options.sampling.seed or 0
        self._plain_greedy = self._sampling.greedy and not self._sampling.penalised
        self._counts = TokenCounts(prompt) if self._sampling.penalised else None
        self._counted = 0
        self._stream = RandomStream(self._seed, sample_index) if self._sampling.mode == "rejection" else None

    def decide(self, proposal: Proposal, logits: NDArray[np.float32], committed: int) -> Outcome:
        """Judge a proposal by logits f32 [K + 1, V]; row j decides the token at position `committed` + j."""
        drafts = proposal.tokens

        def rows(row: int) -> Distribution:
            return self._distribution(logits[row], drafts[:row], committed)

        if self._plain_greedy:
            return match_chain(drafts, lambda row: self._best(logits[row], committed + row))
        if self._sampling.greedy:
            return match_chain(drafts, lambda row: int(rows(row).ids[0]))
        if self._stream is None:
            return coupled_chain(drafts, rows, seed=self._seed, sample_index=self._sample_index, position=committed)
        if proposal.q is None:
            return rejection_chain_deterministic(drafts, rows, self._stream)
        return rejection_chain(drafts, proposal.q, rows, self._stream)

    def first(self, logits: NDArray[np.float32], committed: int) -> int:
        """The token that follows the prompt, from the prefill's logits f32 [1, V]."""
        return self.decide(EMPTY, logits, committed).next_token

    def draft(
        self, logits: NDArray[np.float32], drafts: Sequence[int], committed: int
    ) -> tuple[int, Distribution | None]:
        """(next draft token, q it was drawn from or None) by a draft model's row f32 [V] after `drafts`.

        Under the rejection rule the token is drawn from the draft's own distribution q. Otherwise it is the draft's
        guess of what the target will choose: its argmax, or its sample under the target's own noise.
        """
        position = committed + len(drafts)
        if self._plain_greedy:
            return self._best(logits, position), None
        q = self._distribution(logits, drafts, committed)
        if self._stream is not None and not self._sampling.greedy:
            return sample(q, self._stream.uniform()), q
        return coupled_token(q, seed=self._seed, sample_index=self._sample_index, position=position), None

    def commit(self, tokens: Sequence[int]) -> None:
        """Count tokens that were committed."""
        if self._counts is not None:
            self._counts.rewind_to(self._counted)
            for token in tokens:
                self._counts.push(token)
            self._counted += len(tokens)

    def logprobs(self, row: NDArray[np.float32], token: int) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """(log-probability of `token`, the most probable ones) of a row f32 [V], if the request asks for them."""
        if self._options.logprobs is None:
            return None, ()
        return (
            logprob(row, token, tokens=self._tokens),
            tuple(top_logprobs(row, self._options.logprobs, tokens=self._tokens)),
        )

    def _banned(self, position: int) -> tuple[int, ...] | None:
        number = position - self._prompt_length + 1
        return None if self._options.may_end(number) or self._options.ignore_eos else self._eos

    def _best(self, row: NDArray[np.float32], position: int) -> int:
        return int(greedy_tokens(row[None], self._tokens, self._banned(position))[0])

    def _distribution(self, row: NDArray[np.float32], drafts: Sequence[int], committed: int) -> Distribution:
        if self._counts is not None:
            self._counts.rewind_to(self._counted)
            for token in drafts:
                self._counts.push(token)
        banned = self._banned(committed + len(drafts))
        return distribution(row, self._counts, self._sampling, tokens=self._tokens, banned=banned)
