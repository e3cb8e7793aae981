"""From logits to a distribution, and from a distribution to a token: one code path for target and draft alike.

The order of `distribution` is fixed; greedy runs without penalties never come there, they take `greedy_tokens`.

Random numbers are Philox4x64-10 (Salmon et al. 2011) with key (seed, sample index); numpy keeps `random_raw` of this
generator the same on every platform and release. The 256-bit counter holds, from its lowest 64-bit word: block,
position, 0, lane; lanes 0 and 3 are the coupled noise, 1 the stream of the rejection mode, 2 what heads draw: they
never meet.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from specrun.models_cache.errors import BackendError, UsageError
from specrun.runtime.coupled_noise import COARSE_UNIT, CoupledNoise, least_race, longest_race
from specrun.runtime.options import SamplingOptions
from specrun.runtime.random_stream import RandomStream

__all__ = [
    "Distribution",
    "Ids",
    "RandomStream",
    "TokenCounts",
    "coupled_token",
    "distribution",
    "greedy_tokens",
    "possible_row",
    "sample",
]

Ids = Sequence[int] | npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_LARGEST: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """A distribution over token ids, kept as its support.

    ids    i64 [n], ascending
    probs  f64 [n], all above 0, sum 1
    """

    ids: npt.NDArray[np.int64]
    probs: Floats

    @classmethod
    def point(cls, token: int) -> Distribution:
        """All mass on one token."""
        return cls(np.array([token], np.int64), np.ones(1))

    @classmethod
    def from_dense(cls, weights: npt.ArrayLike) -> Distribution:
        """From weights [V], finite and not negative, normalised here; ValueError if none is above 0."""
        dense = np.asarray(weights, np.float64)
        total = float(dense.sum())
        if dense.ndim != 1 or not np.isfinite(total) or total <= 0.0 or float(dense.min()) < 0.0:
            raise ValueError("weights must be one row of finite numbers, none negative and not all 0")
        return _normalised(_all_ids(dense.size), dense.copy())

    def prob(self, token: int) -> float:
        """The probability of a token; 0 outside the support."""
        at = int(self.ids.searchsorted(token))
        return float(self.probs[at]) if at < self.ids.size and self.ids[at] == token else 0.0

    def probs_of(self, ids: npt.NDArray[np.int64]) -> Floats:
        """The probabilities f64 [m] of ids i64 [m], ascending; 0 outside the support."""
        if ids.size > 512:
            return self.dense(1 + int(max(ids[-1], self.ids[-1])))[ids]
        at = np.minimum(self.ids.searchsorted(ids), self.ids.size - 1)
        return np.where(self.ids[at] == ids, self.probs[at], 0.0)

    def dense(self, size: int) -> Floats:
        """All probabilities, f64 [size]; ids >= size must not be in the support."""
        row = np.zeros(size)
        row[self.ids] = self.probs
        return row


class TokenCounts:
    """Counts of the tokens of prompt and output, with cheap push and pop of draft tokens.

    Row j of a verify is decided with d1 .. dj pushed; `rewind_to` takes them off again. Pushing costs O(1).
    """

    __slots__ = ("_count", "_ids", "_output", "_slots", "_tokens", "_total")

    def __init__(self, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> None:
        self._slots: dict[int, int] = {}  # token -> its place below; places are given and taken back as a stack
        self._ids = np.zeros(64, np.int64)
        self._total = np.zeros(64, np.int64)
        self._output = np.zeros(64, np.int64)
        self._tokens: list[int] = []
        for token in prompt:
            slot = self._slot(int(token))
            self._total[slot] += 1
        for token in output:
            self.push(token)

    def __len__(self) -> int:
        """The number of output tokens."""
        return len(self._tokens)

    def _slot(self, token: int) -> int:
        slot = self._slots.get(token)
        if slot is None:  # the arrays may be replaced here
            slot = len(self._slots)
            if slot == self._ids.size:
                for name in ("_ids", "_total", "_output"):
                    old = getattr(self, name)
                    setattr(self, name, np.concatenate((old, np.zeros_like(old))))
            self._slots[token] = slot
            self._ids[slot] = token
        return slot

    def push(self, token: int) -> None:
        """Add one output token."""
        token = int(token)
        slot = self._slot(token)
        self._total[slot] += 1
        self._output[slot] += 1
        self._tokens.append(token)

    def pop(self) -> int:
        """Take the newest output token off and return it; IndexError if there is none."""
        token = self._tokens.pop()
        slot = self._slots[token]
        self._output[slot] -= 1
        self._total[slot] -= 1
        if not self._total[slot]:  # it was new, so its place is the newest one
            del self._slots[token]
        return token

    def rewind_to(self, length: int) -> None:
        """Keep the first `length` output tokens; ValueError if there are fewer."""
        if not 0 <= length <= len(self._tokens):
            raise ValueError(f"cannot rewind to {length}: there are {len(self._tokens)} output tokens")
        for _ in range(len(self._tokens) - length):
            self.pop()

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Distinct ids of prompt and output, i64 [n], and the count of each in the output alone, i64 [n]; views."""
        used = len(self._slots)
        return self._ids[:used], self._output[:used]


@functools.lru_cache(maxsize=4)
def _all_ids(size: int) -> npt.NDArray[np.int64]:
    """The read-only row 0 .. size - 1: without filters every distribution holds it."""
    ids = np.arange(size)
    ids.setflags(write=False)
    return ids


def _normalised(ids: npt.NDArray[np.int64], weights: Floats) -> Distribution:
    """Weights (>= 0, not all 0; overwritten) as a distribution: sum 1, ids without mass dropped."""
    weights /= weights.sum()
    mass = weights > 0.0
    return Distribution(ids, weights) if mass.all() else Distribution(ids[mass], weights[mass])


def check_peak(row: npt.NDArray[Any], peak: float) -> None:
    """Refuse logits that no distribution can come from."""
    if peak == -np.inf and not np.isnan(row).any():
        raise UsageError("No token is left to choose from: ban fewer ids.")
    if not np.isfinite(peak):
        raise BackendError("The graph gave logits that are not numbers: export it again in a higher precision.")


def _possible(logits: npt.NDArray[np.float32], banned: Ids | None, allowed: Mask | None) -> npt.NDArray[np.float32]:
    """Logits [..., n], in a copy if need be, with those that may not be emitted at -inf."""
    if banned is not None and len(banned):
        logits, ids = logits.copy(), np.asarray(banned, np.int64)
        logits[..., ids[ids < logits.shape[-1]]] = -np.inf
    return logits if allowed is None else np.where(allowed[: logits.shape[-1]], logits, -np.float32(np.inf))


def greedy_tokens(
    logits: npt.NDArray[np.float32], tokens: int, banned: Ids | None = None, allowed: Mask | None = None
) -> npt.NDArray[np.int64]:
    """The most probable id of each row, the lowest one on ties: i64 [rows], of logits f32 [rows, V].

    tokens, banned, allowed and errors as in `distribution`, the same for all these rows
    """
    real = _possible(logits[:, :tokens], banned, allowed)
    best: npt.NDArray[np.int64] = real.argmax(axis=1).astype(np.int64, copy=False)
    for row, token in zip(real, best, strict=True):
        check_peak(row, float(row[token]))
    return best


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the `count` largest values; among equals at the border the lowest indices."""
    if count >= values.size:
        return _all_ids(values.size)
    border = np.partition(values, values.size - count)[values.size - count]
    kept = np.flatnonzero(values >= border)
    if kept.size > count:
        equal = np.flatnonzero(values[kept] == border)
        kept = np.delete(kept, equal[equal.size - (kept.size - count) :])
    return kept


def _nucleus(weights: Floats, top_p: float) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the fewest largest weights that hold the share top_p of all (lowest index on ties).

    Holtzman et al. 2020, eq. 2-3. Weights below (1 - top_p) / V of the whole hold less than 1 - top_p together, so only
    the others are sorted.
    """
    total = weights.sum()
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / weights.size)
    values = weights[candidates]
    sums = np.sort(values)[::-1].cumsum()
    return candidates[largest(values, int(sums.searchsorted(top_p * total)) + 1)]


def _penalised(
    row: npt.NDArray[np.float32], history: TokenCounts | None, options: SamplingOptions
) -> npt.NDArray[np.float32]:
    """A row f32 [tokens] with the penalties applied (computed in f64)."""
    if history is None:
        raise UsageError("A penalty needs the tokens before: pass their TokenCounts as history.")
    ids, output = history.arrays()
    if ids.size and int(ids.max()) >= row.size:  # a draft may know fewer ids than the text holds
        known = ids < row.size
        ids, output = ids[known], output[known]
    before, penalty = row[ids].astype(np.float64), options.repetition_penalty
    with np.errstate(over="ignore"):
        values = np.where(before > 0.0, before / penalty, before * penalty)
    values -= options.frequency_penalty * output + options.presence_penalty * (output > 0)
    row = row.astype(np.float32, copy=True)
    row[ids] = np.where(np.isfinite(before), np.clip(values, -_LARGEST, _LARGEST), values)
    return row


def possible_row(
    logits: npt.NDArray[np.float32],
    history: TokenCounts | None,
    options: SamplingOptions,
    *,
    tokens: int,
    banned: Ids | None = None,
    allowed: Mask | None = None,
) -> tuple[npt.NDArray[np.float32], int]:
    """(The row f32 [tokens] after step 1 of `distribution`, -inf where banned; the id of its largest)."""
    row = _penalised(logits[:tokens], history, options) if options.penalised else logits[:tokens]
    row = _possible(row, banned, allowed)
    best = int(row.argmax())
    check_peak(row, float(row[best]))
    return row, best


def distribution(
    logits: npt.NDArray[np.float32],
    history: TokenCounts | None,
    options: SamplingOptions,
    *,
    tokens: int,
    banned: Ids | None = None,
    allowed: Mask | None = None,
) -> Distribution:
    """The distribution that the options make of one row of logits.

    logits   f32 [V]; left as they are
    history  the tokens before this row (draft tokens of the same row included); needed only under a penalty
    tokens   ids from here on are padding of the vocabulary and never emitted; V may be smaller or larger
    banned   ids with probability 0 in this row (end-of-sequence ids before min_tokens)
    allowed  bool [tokens]: so have all other ids (a grammar's mask)
    In this order:
    1. repetition penalty r, ids of prompt and output: positive logits / r, others * r (CTRL, Keskar et al. 2019);
       then logit -= frequency * count + presence * (count > 0), counts over the output only (OpenAI's rule);
    2. temperature; a greedy temperature gives a point mass on the largest logit;
    3. top-k; 4. top-p over what top-k left, renormalised; 5. min-p relative to the largest probability.
    Where equal values meet a border the lowest id is kept first; ids are banned between 1 and 2.
    Errors: BackendError for NaN or infinite logits; UsageError if nothing is left, or a penalty has no history.
    """
    row, best = possible_row(logits, history, options, tokens=tokens, banned=banned, allowed=allowed)
    peak = float(row[best])
    if options.greedy:
        return Distribution.point(best)
    kept = largest(row, options.top_k or row.size)
    weights = (row if kept.size == row.size else row[kept]).astype(np.float64)
    weights -= peak
    weights /= options.temperature
    # Relative to the largest probability, so the same before top-p as after it, and cheaper before the exponential.
    strong = weights >= math.log(options.min_p) if options.min_p > 0.0 else None
    if strong is not None and options.top_p == 1.0:
        kept, weights, strong = kept[strong], weights[strong], None
    np.exp(weights, out=weights)
    if options.top_p < 1.0:
        chosen = _nucleus(weights, options.top_p)
        kept, weights = kept[chosen], weights[chosen]
        if strong is not None:
            kept, weights = kept[strong[chosen]], weights[strong[chosen]]
    return _normalised(kept, weights)


def coupled_token(
    distribution: Distribution, *, seed: int, sample_index: int, position: int, noise: CoupledNoise | None = None
) -> int:
    """Draw a token with noise keyed on (seed, sample index, absolute position, token id).

    Gumbel-max in its exponential form: argmin_x E_x / p(x) with E_x = -log(1 - u_x), lowest id on ties. u_x depends on
    the key only, never on the support: target and draft that look at the same position share the noise, and the token
    of a position is the same whatever was proposed.
    position  of the token to draw, counted from the start of the prompt
    noise     that of this seed and sample index, where some of it was drawn before
    """
    ids, probs = distribution.ids, distribution.probs
    if ids.size == 1:
        return int(ids[0])
    noise = noise or CoupledNoise(seed, sample_index, 0)
    coarse = noise.coarse(ids, position)
    with np.errstate(over="ignore"):  # noise over a vanishing probability: infinite, and never the least
        # E >= u, and u is at least its upper bits, so only ids with those over p up to some E / p can win.
        scaled = coarse * COARSE_UNIT / probs
        near = int(scaled.argmin())
        few = np.flatnonzero(scaled <= longest_race(int(coarse[near])) / probs[near] * (1.0 + 1e-9))
    return least_race(ids[few], probs[few], noise, position)


def sample(distribution: Distribution, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the cumulative distribution (ids ascending)."""
    if distribution.ids.size == 1:
        return int(distribution.ids[0])
    sums = distribution.probs.cumsum()
    at = int(sums.searchsorted(uniform * sums[-1], side="right"))
    return int(distribution.ids[min(at, sums.size - 1)])
