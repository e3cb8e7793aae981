"""The closed forms against direct sums and exact fractions, their limits, and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime import cost_model as cm
from specrun.runtime.draft_length import MAX_DRAFT_LENGTH, DraftLengthPlanner

ALPHAS = (0.0, 1e-9, 0.1, 0.5, 0.7, 0.75, 0.9, 0.999, 1 - 1e-9, 1 - 2**-53, 1.0)
LENGTHS = (0, 1, 2, 5, 8, 16, 200)
PHIS = (0.0, 0.01, 0.1, 0.5, 1.0, 3.0)
COSTS = {width: 1.0 + 0.13 * (width - 1) + (0.2 if width > 5 else 0.0) for width in range(1, 18)}


def exact_tokens(alpha: float, k: int) -> Fraction:
    return sum((Fraction(alpha) ** power for power in range(k + 1)), Fraction(0))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("k", LENGTHS)
def test_expected_tokens_is_the_geometric_sum(alpha: float, k: int) -> None:
    assert cm.expected_tokens(alpha, k) == pytest.approx(float(exact_tokens(alpha, k)), rel=1e-12, abs=0)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_expected_tokens_is_what_rounds_commit_on_average(alpha: float) -> None:
    """K draft tokens, each stands with alpha; the first that does not is replaced, and after all K there is a bonus."""
    k = 4
    mean = math.fsum(
        math.prod(alpha if stood else 1 - alpha for stood in outcome)
        * (1 + len(list(itertools.takewhile(bool, outcome))))
        for outcome in itertools.product((True, False), repeat=k)
    )
    assert cm.expected_tokens(alpha, k) == pytest.approx(mean, rel=1e-12, abs=0)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("phi", PHIS)
def test_speedup_is_theorem_3_8(alpha: float, phi: float) -> None:
    for k in LENGTHS:
        wanted = exact_tokens(alpha, k) / (k * Fraction(phi) + 1)
        assert cm.speedup(alpha, k, phi) == pytest.approx(float(wanted), rel=1e-12, abs=0)
        # With v(n) = 1 the extended form is the theorem's.
        assert cm.speedup_measured(alpha, k, phi, lambda width: 1.0) == pytest.approx(float(wanted), rel=1e-12, abs=0)


def test_limits_are_exact() -> None:
    for k in LENGTHS:
        assert cm.expected_tokens(1.0, k) == k + 1
        assert cm.expected_tokens(0.0, k) == 1.0
        assert cm.speedup(1.0, k, 0.0) == k + 1
        assert cm.speedup(1.0, k, 1.0) == 1.0
        assert cm.speedup(0.7, k, 0.0) == cm.expected_tokens(0.7, k)
    for alpha, phi in itertools.product(ALPHAS, PHIS):
        assert cm.expected_tokens(alpha, 0) == 1.0
        assert cm.speedup(alpha, 0, phi) == 1.0
        assert cm.speedup_measured(alpha, 0, phi, COSTS) == 1.0


def test_monotonicity() -> None:
    for phi in PHIS:
        for k in (1, 4, 16):
            by_alpha = [cm.speedup(alpha, k, phi) for alpha in np.linspace(0, 1, 50).tolist()]
            assert by_alpha == sorted(by_alpha)
    for alpha in (0.3, 0.8):
        tokens = [cm.expected_tokens(alpha, k) for k in range(20)]
        assert all(a < b for a, b in itertools.pairwise(tokens))
        for k in (1, 4):
            by_phi = [cm.speedup(alpha, k, phi) for phi in PHIS]
            assert all(a > b for a, b in itertools.pairwise(by_phi))


@pytest.mark.parametrize("phi", [0.01, 0.05, 0.1, 0.3, 0.7, 1.0, 2.0])
def test_the_best_draft_length_is_that_of_a_search(phi: float) -> None:
    for alpha in (0.0, 0.1, 0.3, 0.5, 0.7, 0.75, 0.9, 0.95, 1.0):
        for most in (0, 3, 40):
            exact = [exact_tokens(alpha, k) / (k * Fraction(phi) + 1) for k in range(most + 1)]
            assert cm.best_draft_length(alpha, phi, most) == exact.index(max(exact))


def test_free_drafts_take_all_that_is_allowed() -> None:
    assert cm.best_draft_length(0.5, 0.0, 4096) == 4096
    assert cm.best_draft_length(0.0, 0.0, 64) == 0
    assert cm.best_draft_length(1.0, 0.5, 64) == 64


def test_it_gains_exactly_where_alpha_is_above_phi() -> None:
    shares = [step / 20 for step in range(21)]
    for alpha, phi in itertools.product(shares, shares):
        exact = max(exact_tokens(alpha, k) / (k * Fraction(phi) + 1) for k in range(12))
        assert cm.gains(alpha, phi) == (exact > 1) == (cm.best_draft_length(alpha, phi, 11) > 0)
        if cm.gains(alpha, phi):
            assert cm.speedup(alpha, 1, phi) == pytest.approx((1 + alpha) / (1 + phi), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.2, 0.57, 0.9])
@pytest.mark.parametrize("first", [None, 0.0, 0.2])
def test_the_measured_form(alpha: float, first: float | None) -> None:
    phi = 0.03
    values = []
    for k in range(17):
        drafting = 0 if k == 0 else Fraction(phi if first is None else first) + (k - 1) * Fraction(phi)
        wanted = exact_tokens(alpha, k) / (drafting + Fraction(COSTS[k + 1]))
        values.append(wanted)
        for costs in (COSTS, COSTS.__getitem__):
            found = cm.speedup_measured(alpha, k, phi, costs, first=first)
            assert found == pytest.approx(float(wanted), rel=1e-12, abs=0)
    assert cm.best_draft_length_measured(alpha, phi, COSTS, 16, first=first) == values.index(max(values))


def test_a_dear_verify_makes_the_best_draft_length_shorter() -> None:
    assert cm.best_draft_length_measured(0.7, 0.05, lambda width: 1.0, 16) == cm.best_draft_length(0.7, 0.05, 16) == 6
    assert cm.best_draft_length_measured(0.7, 0.05, COSTS, 16) == 3
    assert cm.best_draft_length_measured(0.7, 0.05, lambda width: float(width), 16) == 0


def test_the_loops_planner_names_the_same_length() -> None:
    for alpha, phi in itertools.product((0.1, 0.4, 0.6, 0.8, 0.95), (0.0, 0.02, 0.2)):
        planner = DraftLengthPlanner(COSTS.__getitem__, step_cost=phi)
        chosen = planner.choose([alpha] * MAX_DRAFT_LENGTH, MAX_DRAFT_LENGTH)
        assert chosen == cm.best_draft_length_measured(alpha, phi, COSTS, MAX_DRAFT_LENGTH)


@pytest.mark.parametrize(
    "chances", [(0.56, 0.57, 0.58, 0.6), (0.47, 0.32, 0.28, 0.32), (0.4,), (1.0, 1.0), (0.0, 0.9), (0.999999, 1.0, 1.0)]
)
def test_the_equivalent_alpha_has_the_same_tokens_a_round(chances: tuple[float, ...]) -> None:
    tokens = 1 + sum(math.prod(chances[: place + 1]) for place in range(len(chances)))
    alpha = cm.equivalent_alpha(chances)
    assert 0.0 <= alpha <= 1.0
    assert cm.expected_tokens(alpha, len(chances)) == pytest.approx(tokens, rel=1e-12, abs=0)


def test_equal_chances_are_their_own_alpha() -> None:
    for alpha in (0.0, 0.3, 0.9, 1.0):
        assert cm.equivalent_alpha([alpha] * 5) == pytest.approx(alpha, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5, 8, 100])
def test_the_two_denominators_agree_at_one_phi(k: int) -> None:
    """(1-a) K and (1-a)(K phi + 1) for K >= 1: at phi = (K-1)/K, and nowhere else; at phi = 1 never."""
    phi = Fraction(k - 1, k)
    assert k == k * phi + 1
    assert cm.agreement_phi(k) == pytest.approx(float(phi), rel=1e-12, abs=0)
    assert k * Fraction(1) + 1 != k
    assert all(k != k * (phi + step) + 1 for step in (Fraction(-1, 1000), Fraction(1, 1000)))


def test_kv_bytes() -> None:
    llama = cm.kv_bytes(layers=32, kv_heads=32, head_dim=128, positions=2048, batch=32, bytes_per_value=2)
    assert llama == 2 * 32 * 4096 * 2 * 65536 == 32 * 2**30
    assert f"{llama / 1e9:.1f}" == "34.4"
    assert cm.kv_bytes(32, 32, 128, 2048, 32, 4) == 2 * llama
    assert cm.kv_bytes(0, 0, 0, 100) == 0


def test_two_buffers_stay_below_the_three_of_the_naive_scheme() -> None:
    target = cm.kv_bytes(32, 32, 128, 2048, 32)
    for draft in (0, cm.kv_bytes(2, 12, 64, 2048, 32), target):
        assert cm.dual_kv_bytes(target, draft) == target + draft
        assert 3 * cm.dual_kv_bytes(target, draft) <= 2 * cm.naive_kv_bytes(target)
    assert cm.naive_kv_bytes(target) == 3 * 32 * 4096 * 32 * (2 * 2 * 2048)  # 3 L d b, times what it leaves out


def test_prefix_saving() -> None:
    assert cm.prefix_saving(768, 512, 16) == pytest.approx(0.5625, rel=1e-12, abs=0)
    for prefix, suffix, n in itertools.product((0, 1, 768), (1, 512), (1, 2, 100)):
        alone, shared = n * (prefix + suffix), prefix + n * suffix
        assert cm.prefix_saving(prefix, suffix, n) == pytest.approx(float(Fraction(alone - shared, alone)), rel=1e-12)
    assert cm.prefix_saving(0, 0, 4) == 0.0
    assert cm.prefix_saving(100, 0, 4) == 0.75


@pytest.mark.parametrize("p", [0.0, 1e-15, 1e-6, 0.1, 0.7, 0.999999, 1.0])
@pytest.mark.parametrize("n", [0, 1, 4, 16, 1000])
def test_coverage_bound(p: float, n: int) -> None:
    assert cm.coverage_bound(p, n) == pytest.approx(float(1 - (1 - Fraction(p)) ** n), rel=1e-12, abs=0)


def test_sixteen_samples_are_more_than_99_2_percent() -> None:
    assert cm.coverage_bound(0.7, 16) == pytest.approx(float(1 - Fraction(3, 10) ** 16), abs=1e-12)
    assert f"{cm.coverage_bound(0.7, 16):.9f}" == "0.999999996"
    assert f"{cm.coverage_bound(0.7, 4):.3f}" == "0.992"


def test_pass_at_k_is_the_ratio_of_binomials() -> None:
    for n in (1, 2, 5, 20, 200):
        for c, k in itertools.product({0, 1, n // 3, n - 1, n}, {1, n // 2 or 1, n}):
            wanted = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
            assert cm.pass_at_k(n, c, k) == pytest.approx(float(wanted), rel=1e-12, abs=0)
    assert math.copysign(1.0, cm.pass_at_k(5, 0, 1)) == 1.0


def test_pass_at_k_is_unbiased() -> None:
    """Over the binomial number of right samples its mean is 1 - (1 - p)^k; the plug-in 1 - (1 - c/n)^k is below it."""
    n, k, p = 12, 4, Fraction(1, 5)
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = math.fsum(float(chance) * cm.pass_at_k(n, c, k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(cm.coverage_bound(0.2, k), rel=1e-12)
    plug_in = math.fsum(float(chance) * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert plug_in < mean - 0.01


def test_pass_at_k_of_many_samples() -> None:
    """Binomials of this size overflow floats, and a difference from 1 would lose its digits."""
    n, c, k = 1_000_000, 1, 1
    assert cm.pass_at_k(n, c, k) == pytest.approx(1e-6, rel=1e-12, abs=0)
    wanted = 1 - math.prod(Fraction(n - 300 - place, n - place) for place in range(50))
    assert cm.pass_at_k(n, 300, 50) == pytest.approx(float(wanted), rel=1e-12, abs=0)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: cm.expected_tokens(-0.1, 1), "alpha must be between 0 and 1, not -0.1"),
    (lambda: cm.expected_tokens(1.1, 1), "alpha"),
    (lambda: cm.expected_tokens(math.nan, 1), "alpha"),
    (lambda: cm.expected_tokens(0.5, -1), "K must be a whole number, 0 or more"),
    (lambda: cm.expected_tokens(0.5, 1.5), "K"),  # type: ignore[arg-type]
    (lambda: cm.expected_tokens(0.5, True), "K"),
    (lambda: cm.expected_tokens(0.5, 4097), "at most 4096"),
    (lambda: cm.speedup(0.5, 1, -0.1), "phi must be 0 or more"),
    (lambda: cm.speedup(0.5, 1, math.inf), "phi"),
    (lambda: cm.speedup(0.5, 1, math.nan), "phi"),
    (lambda: cm.gains(2.0, 0.1), "alpha"),
    (lambda: cm.gains(0.5, -1.0), "phi"),
    (lambda: cm.best_draft_length(0.5, 0.1, -1), "most"),
    (lambda: cm.best_draft_length(0.5, 0.1, 5000), "most"),
    (lambda: cm.speedup_measured(0.5, 4, 0.1, {1: 1.0, 2: 1.1}), r"The cost of 5 positions is missing \(known: 1, 2\)"),
    (lambda: cm.speedup_measured(0.5, 4, 0.1, {}), "known: none"),
    (lambda: cm.speedup_measured(0.5, 4, 0.1, lambda width: 0.0), "must be a number above 0"),
    (lambda: cm.speedup_measured(0.5, 4, 0.1, lambda width: math.nan), "must be a number above 0"),
    (lambda: cm.speedup_measured(0.5, 4, 0.1, COSTS, first=-1.0), "first"),
    (lambda: cm.best_draft_length_measured(0.5, 0.1, COSTS, 17), "The cost of 18 positions is missing"),
    (lambda: cm.equivalent_alpha([]), "no acceptance"),
    (lambda: cm.equivalent_alpha([0.5, 1.5]), "acceptance"),
    (lambda: cm.agreement_phi(0), "K must be a whole number, 1 or more"),
    (lambda: cm.kv_bytes(-1, 1, 1, 1), "layers"),
    (lambda: cm.kv_bytes(1, 1, 1, -1), "positions"),
    (lambda: cm.kv_bytes(1, 1, 1, 1, 0), "batch"),
    (lambda: cm.kv_bytes(1, 1, 1, 1, 1, 0), "bytes_per_value"),
    (lambda: cm.dual_kv_bytes(1, -1), "draft"),
    (lambda: cm.naive_kv_bytes(-1), "target"),
    (lambda: cm.prefix_saving(-1, 1, 1), "prefix"),
    (lambda: cm.prefix_saving(1, 1, 0), "n must be a whole number, 1 or more"),
    (lambda: cm.coverage_bound(1.5, 1), "p must be between 0 and 1"),
    (lambda: cm.coverage_bound(0.5, -1), "n"),
    (lambda: cm.pass_at_k(0, 0, 1), "n"),
    (lambda: cm.pass_at_k(5, 6, 1), "c must be at most n"),
    (lambda: cm.pass_at_k(5, 1, 6), "k must be at most n"),
    (lambda: cm.pass_at_k(5, 1, 0), "k must be a whole number, 1 or more"),
    (lambda: cm.pass_at_k(5, -1, 1), "c"),
]


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_values_outside_their_range_are_refused(call: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call()
