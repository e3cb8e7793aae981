"""The cost model of speculative decoding: closed forms for planning and reports, as pure functions.

These are averages for people: one chance `alpha` that a draft token stands, one cost of drafting it, and costs as
ratios to a plain step of the target. The loop does not plan with them: it chooses K round by round in `draft_length`,
and a tree's shape in `tree_shape`, from a chance for each place that follows what was accepted, and from seconds. For
one chance and the same costs, `best_draft_length_measured` and `DraftLengthPlanner.choose` name the same K.

alpha   E[sum_x min(p(x), q(x))]: the chance that a draft token stands if those before it do, 0 to 1
K       draft tokens of a round, 0 is plain decoding
phi     time of a draft step / time of a plain step of the target
v(n)    time of a target run of n positions / time of a plain step, so that v(1) = 1; a round runs K + 1 positions

Every function raises UsageError for a value outside its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from specrun.models_cache.errors import UsageError

WidthCosts = Mapping[int, float] | Callable[[int], float]

MOST_DRAFT_TOKENS: Final = 4096
"""The largest K that is accepted: beyond every context's use, and still quick to search."""


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens that a round of K draft tokens commits on average, the correction or bonus included.

    1 + alpha + .. + alpha^K = (1 - alpha^(K+1)) / (1 - alpha), and K + 1 at alpha = 1. Leviathan et al. 2023, eq. 1.
    """
    _check_share("alpha", alpha)
    _check_draft_length("K", k)
    if k == 0 or alpha == 0.0:
        return 1.0
    if alpha == 1.0:
        return k + 1.0
    # As 1 - alpha^(K+1), but without its cancellation near 1.
    return -math.expm1((k + 1) * math.log(alpha)) / (1.0 - alpha)


def speedup(alpha: float, k: int, phi: float) -> float:
    """How many times as fast as plain decoding, if verifying K + 1 positions costs one plain step.

    S = (1 - alpha^(K+1)) / ((1 - alpha)(K phi + 1)). Leviathan et al. 2023, theorem 3.8.
    """
    _check_ratio("phi", phi)
    return expected_tokens(alpha, k) / (k * phi + 1.0)


def gains(alpha: float, phi: float) -> bool:
    """Whether any K is faster than plain decoding by `speedup`: where alpha > phi.

    K = 1 then already is, by (1 + alpha) / (1 + phi). Leviathan et al. 2023, corollary 3.9.
    """
    _check_share("alpha", alpha)
    _check_ratio("phi", phi)
    return alpha > phi


def best_draft_length(alpha: float, phi: float, most: int) -> int:
    """The K in 0 .. most with the largest `speedup`; 0 where alpha <= phi, `most` where drafting is free."""
    _check_draft_length("most", most)
    if not gains(alpha, phi):
        return 0
    if phi == 0.0:
        return most
    # Tokens are concave in K and time is linear, so the first K that is not worth one more is the best.
    k, reached = 0, alpha
    while k < most and reached * (k * phi + 1.0) > expected_tokens(alpha, k) * phi:
        k += 1
        reached *= alpha
    return k


def speedup_measured(alpha: float, k: int, phi: float, v: WidthCosts, *, first: float | None = None) -> float:
    """How many times as fast as plain decoding, with the measured cost of verifying: S = E[tokens] / (K phi + v(K+1)).

    `speedup`'s extended form: theorem 3.8 has v(n) = 1. v: a mapping or a function of the width. first: the cost of the
    first draft token of a round where it differs from the others', so that drafting costs first + (K - 1) phi; heads
    that draft all tokens in one run have phi = 0.
    """
    return expected_tokens(alpha, k) / _round_cost(k, phi, v, first)


def best_draft_length_measured(
    alpha: float, phi: float, v: WidthCosts, most: int, *, first: float | None = None
) -> int:
    """The K in 0 .. most with the largest `speedup_measured`, the smallest of equals; 0 where none gains."""
    _check_draft_length("most", most)
    best, best_tokens, best_cost = 0, 1.0, _round_cost(0, phi, v, first)
    for k in range(1, most + 1):
        tokens, cost = expected_tokens(alpha, k), _round_cost(k, phi, v, first)
        if tokens * best_cost > best_tokens * cost:
            best, best_tokens, best_cost = k, tokens, cost
    return best


def equivalent_alpha(chances: Sequence[float]) -> float:
    """The one alpha whose chain of len(chances) draft tokens commits as many tokens a round as these chances do.

    chances[j]: that draft token j + 1 stands if those before it do, so a round commits 1 + c1 + c1 c2 + .. tokens.
    """
    if not chances:
        raise UsageError("There is no acceptance to take alpha from: give the chance of one place or more.")
    tokens = reached = 1.0
    for chance in chances:
        _check_share("an acceptance", chance)
        reached *= chance
        tokens += reached
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if expected_tokens(middle, len(chances)) < tokens else (low, middle)
    return high


def agreement_phi(k: int) -> float:
    """The only phi at which the denominators (1 - alpha) K and (1 - alpha)(K phi + 1) agree: (K - 1) / K, K >= 1."""
    _check_draft_length("K", k, least=1)
    return (k - 1) / k


def kv_bytes(
    layers: int, kv_heads: int, head_dim: int, positions: int, batch: int = 1, bytes_per_value: int = 2
) -> int:
    """Bytes of the keys and values of `batch` texts of so many positions: 2 L h d n B b.

    The 2 is for keys and values. bytes_per_value: 2 for fp16, 4 for fp32.
    """
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim), ("positions", positions)):
        _check_count(name, value, 0)
    _check_count("batch", batch, 1)
    _check_count("bytes_per_value", bytes_per_value, 1)
    return 2 * layers * kv_heads * head_dim * positions * batch * bytes_per_value


def dual_kv_bytes(target: int, draft: int) -> int:
    """Bytes of KV as specrun keeps it, a target's and a draft's buffer: a rollback only shortens a length.

    target, draft: `kv_bytes` of each.
    """
    _check_count("target", target, 0)
    _check_count("draft", draft, 0)
    return target + draft


def naive_kv_bytes(target: int) -> int:
    """Bytes of the naive scheme, 3 L d b: a target, a draft and a rollback buffer, each as large as the target's.

    target: `kv_bytes`, which has the factors that the bare formula lacks, K and V and the length of the text.
    """
    _check_count("target", target, 0)
    return 3 * target


def prefix_saving(prefix: int, suffix: int, n: int) -> float:
    """The share of KV positions saved where n texts store their common prefix once: (n-1) p / (n (p + l)).

    prefix, suffix: positions that are common, and of each text by itself.
    """
    _check_count("prefix", prefix, 0)
    _check_count("suffix", suffix, 0)
    _check_count("n", n, 1)
    if prefix + suffix == 0:
        return 0.0
    return (n - 1) * prefix / (n * (prefix + suffix))


def coverage_bound(p: float, n: int) -> float:
    """The chance that one or more of n independent samples is right, each being so with p: 1 - (1 - p)^n.

    What best-of-n reaches with a perfect choice; no choice among the samples reaches more.
    """
    _check_share("p", p)
    _check_count("n", n, 0)
    if n == 0 or p == 0.0:
        return 0.0
    if p == 1.0:
        return 1.0
    return -math.expm1(n * math.log1p(-p))


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate of the chance that one of k samples is right, where c of n were.

    1 - C(n-c, k) / C(n, k), as a product. Chen et al. 2021, eq. 1. 1 <= k <= n, 0 <= c <= n.
    """
    _check_count("n", n, 1)
    for name, value, least in (("c", c, 0), ("k", k, 1)):
        _check_count(name, value, least)
        if value > n:
            raise UsageError(f"{name} must be at most n, the {n} samples, not {value}.")
    if c == 0:
        return 0.0
    if n - c < k:
        return 1.0
    # C(n-c, k) / C(n, k) is a product of k factors, and of c factors with the two changed about.
    fewer, more = min(c, k), max(c, k)
    return -math.expm1(math.fsum(math.log1p(-more / (n - place)) for place in range(fewer)))


def _round_cost(k: int, phi: float, v: WidthCosts, first: float | None) -> float:
    """Cost of a round of K draft tokens, in plain steps."""
    _check_draft_length("K", k)
    _check_ratio("phi", phi)
    if first is not None:
        _check_ratio("first", first)
    drafting = 0.0 if k == 0 else (phi if first is None else first) + (k - 1) * phi
    return drafting + _width_cost(v, k + 1)


def _width_cost(v: WidthCosts, width: int) -> float:
    if isinstance(v, Mapping):
        if width not in v:
            known = ", ".join(map(str, sorted(v))) or "none"
            raise UsageError(f"The cost of {width} positions is missing (known: {known}): measure it, or lower K.")
        cost = v[width]
    else:
        cost = v(width)
    if not (math.isfinite(cost) and cost > 0):
        raise UsageError(f"The cost of {width} positions must be a number above 0, not {cost}.")
    return cost


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must be between 0 and 1, not {value}.")


def _check_ratio(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0.0):
        raise UsageError(f"{name} must be 0 or more, and finite, not {value}.")


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} must be a whole number, {least} or more, not {value}.")


def _check_draft_length(name: str, value: int, least: int = 0) -> None:
    _check_count(name, value, least)
    if value > MOST_DRAFT_TOKENS:
        raise UsageError(f"{name} must be at most {MOST_DRAFT_TOKENS}, not {value}.")
