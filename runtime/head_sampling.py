"""How a learned head draws its candidates under a request's sampling options.

A head's graph takes the best of logits / T + noise. What the noise is decides what comes out:

    greedy      none: the most probable tokens
    coupled     the target's own Gumbel noise of that position: the head guesses what the target will draw with it
    rejection   fresh Gumbel noise: the best k are k draws without replacement from softmax(logits / T), in draw order
                (Kool et al. 2019, 'Stochastic beams and where to find them')
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.runtime.coupled_noise import COARSE_UNIT, KEPT, CoupledNoise
from specrun.runtime.options import SamplingOptions
from specrun.runtime.proposal import ProposalKind
from specrun.runtime.sampling import Distribution
from specrun.runtime.speculator import PLAIN, Candidates, Choice

_WORD: Final = 64
_LANE_HEADS: Final = 2 << (3 * _WORD)
_UNIT: Final = 2.0**-53


class HeadSampling:
    """One request's way of drawing. vocabulary: i64 [draft], the target's token of each row of the head, ascending.

    tokens: ids from there on are padding and never drawn. noise: the target's. `options.seed` must be set unless they
    are greedy.
    """

    def __init__(
        self,
        options: SamplingOptions,
        vocabulary: NDArray[np.int64],
        noise: CoupledNoise,
        *,
        tokens: int,
        sample_index: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._real = int(vocabulary.searchsorted(tokens))
        self._greedy = options.greedy
        self._temperature = 1.0 if options.greedy else options.temperature
        self._noise = noise
        self._rows: OrderedDict[int, NDArray[np.float32]] = OrderedDict()
        drawn = options.mode == "rejection" and not options.greedy
        key = (options.seed or 0) | sample_index << _WORD
        self._stream = np.random.Philox(counter=_LANE_HEADS, key=key) if drawn else None

    @property
    def kind(self) -> ProposalKind:
        """What proposals made so are."""
        return "deterministic" if self._stream is None else "sampled"

    @property
    def drawn(self) -> bool:
        """Whether candidates are draws, so that nothing may be chosen among them by what they are."""
        return self._stream is not None

    def choice(self, *positions: int) -> Choice:
        """For rows that guess the tokens of these absolute positions; one position serves any number of rows."""
        if self._greedy:
            return PLAIN
        noise = np.full((len(positions), self._vocabulary.size), -np.inf, np.float32)
        for row, position in enumerate(positions):
            noise[row, : self._real] = self._gumbel(position)
        return Choice(1.0 / self._temperature, noise, self.drawn)

    def noise(self, *positions: int) -> NDArray[np.float32] | None:
        """As the noise of `choice`, for a run at temperature 1 that serves requests of several: f32 [positions, draft].

        logits / T + noise has the order of logits + T noise. None where greedy decoding has none.
        """
        choice = self.choice(*positions)
        return None if choice.noise is None else choice.noise * np.float32(self._temperature)

    def sureness_at_one(
        self, tokens: Sequence[int], log_probs: Sequence[float], noise: NDArray[np.float32] | None
    ) -> list[float]:
        """As `sureness` for the candidates of one row of a run with `noise`'s row f32 [draft], at temperature 1."""
        if noise is None:
            return list(log_probs)
        scores = np.array(log_probs) + noise[self._vocabulary.searchsorted(tokens)]
        scores /= self._temperature
        scores -= scores.max()
        sure: list[float] = (scores - np.log(np.exp(scores).sum())).tolist()
        return sure

    def sureness(self, candidates: Candidates, choice: Choice) -> list[list[float]]:
        """How sure the head is of each candidate, as logarithms.

        Its log-probability; with the noise that decides, that of softmax(log-probability + noise) among the candidates:
        what lies far ahead with its noise stays ahead in the target.
        """
        if choice.noise is None:
            return candidates.log_probs
        places = self._vocabulary.searchsorted(candidates.tokens)
        rows = np.arange(len(places))[:, None] if len(choice.noise) > 1 else 0
        scores = np.array(candidates.log_probs) + choice.noise[rows, places]
        scores -= scores.max(axis=1, keepdims=True)
        sure: list[list[float]] = (scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))).tolist()
        return sure

    def _gumbel(self, position: int) -> NDArray[np.float32]:
        """-log(E) with E = -log(1 - u): the noise whose argmax `coupled_token` finds as argmin of E / p.

        Of the target's u the upper 32 bits do: what comes out is a guess of its choice.
        """
        row = self._rows.get(position)
        if row is None:
            if self._stream is None:
                self._noise.keep(position)
                u = (self._noise.coarse(self._vocabulary[: self._real], position) + 0.5) * COARSE_UNIT
            else:
                u = (self._stream.random_raw(self._real) >> np.uint64(11)) * _UNIT
            with np.errstate(divide="ignore"):  # u = 0 wins against everything
                row = (-np.log(-np.log1p(-u))).astype(np.float32)
            if self._stream is None:  # most are needed again in the next round
                self._rows[position] = row
                if len(self._rows) > KEPT:
                    self._rows.popitem(last=False)
        return row

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """What the candidates of a row of logits f32 [draft] were drawn from, without replacement."""
        ids = self._vocabulary[: self._real]
        weights = logits[: self._real].astype(np.float64)
        weights -= weights.max()
        weights /= self._temperature
        np.exp(weights, out=weights)
        weights /= weights.sum()
        mass = weights > 0.0
        return Distribution(ids, weights) if mass.all() else Distribution(ids[mass], weights[mass])
