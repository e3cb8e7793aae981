"""The coupled choice straight from logits is that of the distribution."""

from __future__ import annotations

import numpy as np
import pytest

from specrun.runtime.coupled_choice import coupled_choice
from specrun.runtime.coupled_noise import CoupledNoise
from specrun.runtime.options import SamplingOptions
from specrun.runtime.sampling import Distribution, coupled_token, distribution


def drawn(p: Distribution, position: int) -> int:
    return coupled_token(p, seed=7, sample_index=1, position=position)


def chosen(row: np.ndarray, temperature: float, position: int) -> int:
    return coupled_choice(row, float(row.max()), temperature, CoupledNoise(7, 1, row.size), position)


@pytest.mark.parametrize("temperature", [0.02, 0.3, 0.8, 1.0, 1.7, 40.0])
@pytest.mark.parametrize(("size", "spread"), [(2, 1.0), (50, 3.0), (3_000, 0.0), (3_000, 6.0), (49_152, 3.0)])
def test_it_is_the_token_of_the_distribution(size: int, spread: float, temperature: float) -> None:
    rng = np.random.default_rng(size)
    options = SamplingOptions(temperature=temperature)
    found = set()
    for position in range(60):
        row = (spread * rng.standard_normal(size) - 20).astype(np.float32)
        if position % 3 == 1:
            row[rng.integers(size)] += 40
        if position % 3 == 2:
            row[rng.permutation(size)[: size // 2]] = -np.inf
        wanted = drawn(distribution(row, None, options, tokens=size), position)
        assert chosen(row, temperature, position) == wanted
        found.add(wanted)
    assert len(found) > 1


def test_rare_tokens_come_as_often_as_they_should() -> None:
    # One in 200 draws is none of the likely token: the bound must not lose those.
    row = np.full(1_000, -12.0, np.float32)
    row[3] = np.log(199 * 999) - 12.0
    rare = sum(chosen(row, 1.0, position) != 3 for position in range(4_000))
    assert 5 <= rare <= 40  # 20 expected; outside with a chance under 1e-4


class FixedNoise(CoupledNoise):
    """These values, u times 2**53, at every position."""

    def __init__(self, values: np.ndarray | list[int]) -> None:
        self.values = np.asarray(values, np.uint64)

    def row(self, count: int, position: int) -> np.ndarray:
        return (self.values[:count] >> np.uint64(21)).astype(np.uint32)

    def of(self, ids: np.ndarray, position: int) -> np.ndarray:
        return self.values[ids]


def fixed(row: np.ndarray, temperature: float, values: np.ndarray | list[int]) -> int:
    return coupled_choice(row, float(row.max()), temperature, FixedNoise(values), 0)


def test_noise_of_zero_wins_and_the_lowest_id_on_ties() -> None:
    row = np.array([0.0, -1.0, -1.0, -np.inf], np.float32)
    assert fixed(row, 1.0, [5, 0, 0, 0]) == 1
    assert fixed(row, 1.0, [0, 0, 9, 0]) == 0
    assert fixed(np.zeros(3, np.float32), 1.0, [1 << 50, 1 << 40, 1 << 40]) == 1
    assert fixed(np.zeros(3, np.float32), 1.0, [900, 700, 701]) == 1  # under the bounds' bits
    assert fixed(np.zeros(3, np.float32), 1.0, [(9 << 21) + 8, (9 << 21) + 7, 10 << 21]) == 1  # in the lower bits
    assert fixed(row, 1e-300, [(1 << 53) - 1, 1, 1, 1]) == 0
    assert fixed(np.zeros(2, np.float32), 1.0, [(1 << 53) - 1, (1 << 53) - 2]) == 1


@pytest.mark.parametrize("temperature", [1e-3, 0.7, 3.0])
def test_neighbours_of_the_winner_are_compared_exactly(temperature: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        noise = rng.integers(1, 1 << 53, 40, dtype=np.uint64)
        # Logits for which every token's ratio is the same but for the last bits.
        level = temperature * np.log(-np.log1p(noise * -(2.0**-53)))
        row = (level - level.max()).astype(np.float32)
        ratios = -np.log1p(noise * -(2.0**-53)) / np.exp((row.astype(np.float64) - float(row.max())) / temperature)
        assert fixed(row, temperature, noise) == int(ratios.argmin())


@pytest.mark.parametrize("temperature", [1e29, 1e36, 1e40, 1e100, 1e308])
def test_the_hottest_temperatures(temperature: float) -> None:
    """Logits whose difference is beyond 32-bit floats, and some that are banned."""
    row = np.array([3e38, -3e38, -np.inf, 0.0] * 50, np.float32)
    for position in range(40):
        noise = CoupledNoise(7, 1, row.size).of(np.arange(row.size), position)
        with np.errstate(divide="ignore"):
            ratios = -np.log1p(noise * -(2.0**-53)) / np.exp((row.astype(np.float64) - float(row.max())) / temperature)
        assert chosen(row, temperature, position) == int(ratios.argmin())
