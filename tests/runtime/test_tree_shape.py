"""Tree shapes against brute force over all small trees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from specrun.runtime.tree_shape import best_shape, choose_nodes, node_depths

Parents = tuple[int, ...]
Ranks = tuple[int, ...]


def all_trees(nodes: int, widest: int, deepest: int) -> set[tuple[Parents, Ranks]]:
    """Every tree of so many nodes whose children have the ranks 0 .. c - 1, as paths of ranks, brought to one order."""
    paths: set[frozenset[tuple[int, ...]]] = {frozenset()}
    for _ in range(nodes):
        grown = set()
        for tree in paths:
            for above in [(), *tree]:
                rank = sum(1 for path in tree if path[:-1] == above and len(path) == len(above) + 1)
                if rank < widest and len(above) < deepest:
                    grown.add(tree | {(*above, rank)})
        paths = grown
    trees = set()
    for tree in paths:
        order = sorted(tree, key=lambda path: (len(path), path))
        places = {path: place for place, path in enumerate(order)}
        trees.add((tuple(places.get(path[:-1], -1) for path in order), tuple(path[-1] for path in order)))
    return trees


def expected_tokens(parents: Parents, ranks: Ranks, acceptance: list[list[float]], side_value: float) -> float:
    total, products, main = 1.0, [], []
    depths = node_depths(parents)
    for node, parent in enumerate(parents):
        product = acceptance[depths[node] - 1][ranks[node]] * (1.0 if parent < 0 else products[parent])
        products.append(product)
        main.append(ranks[node] == 0 and (parent < 0 or main[parent]))
        total += product if main[node] else side_value * product
    return total


def check_layout(parents: Parents, ranks: Ranks) -> None:
    """Parents first, the main branch before all others, siblings in the order of their ranks without a gap."""
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    length = next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
    node, chain = -1, 0
    while (child := next((i for i, p in enumerate(parents) if p == node and ranks[i] == 0), None)) is not None:
        assert child == chain
        node, chain = child, chain + 1
    assert chain == length
    for parent in {-1, *parents}:
        siblings = [ranks[i] for i, p in enumerate(parents) if p == parent]
        assert siblings == list(range(len(siblings)))


def brute_force(
    acceptance: list[list[float]], costs: list[float], step_cost: float, fixed_cost: float, side_value: float
) -> float:
    """The best rate of all trees."""
    best = 1.0 / costs[0]
    for nodes in range(1, len(costs)):
        for parents, ranks in all_trees(nodes, len(acceptance[0]), len(acceptance)):
            seconds = fixed_cost + step_cost * max(node_depths(parents)) + costs[nodes]
            best = max(best, expected_tokens(parents, ranks, acceptance, side_value) / seconds)
    return best


def random_cases(rng: np.random.Generator, count: int) -> Iterator[tuple[list[list[float]], list[float]]]:
    for _ in range(count):
        depth, ranks, nodes = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 6))
        acceptance = [sorted(rng.dirichlet(np.ones(ranks + 1))[:ranks].tolist(), reverse=True) for _ in range(depth)]
        costs = np.cumsum([1.0, *rng.uniform(0.0, 0.3, nodes)]).tolist()
        yield acceptance, costs


@pytest.mark.parametrize("side_value", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("step_cost", [0.0, 0.15])
def test_the_shape_is_the_best_of_all(rng: np.random.Generator, step_cost: float, side_value: float) -> None:
    sizes = set()
    for acceptance, costs in random_cases(rng, 25):
        shape = best_shape(acceptance, costs, step_cost=step_cost, fixed_cost=0.02, side_value=side_value)
        check_layout(shape.parents, shape.ranks)
        assert shape.rate == pytest.approx(brute_force(acceptance, costs, step_cost, 0.02, side_value))
        if len(shape):
            assert shape.expected == pytest.approx(expected_tokens(shape.parents, shape.ranks, acceptance, side_value))
            assert shape.seconds == pytest.approx(0.02 + step_cost * max(shape.depths) + costs[len(shape)])
        sizes.add(len(shape))
    assert len(sizes) >= 3


def test_every_number_of_nodes_is_the_best_of_its_size(rng: np.random.Generator) -> None:
    """With runs that cost nothing below a width and very much above, the tree has that width."""
    acceptance = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1], [0.7, 0.1, 0.05]]
    for nodes in range(1, 7):
        shape = best_shape(acceptance, [1.0] * (nodes + 1), side_value=0.8)
        best = max(expected_tokens(*tree, acceptance, 0.8) for tree in all_trees(nodes, 3, 3))
        assert len(shape) == nodes
        assert shape.expected == pytest.approx(best)


def test_a_rank_that_is_better_than_the_one_before_needs_it() -> None:
    """Ranks 0 .. c - 1: a child is never taken without those drawn before it."""
    shape = best_shape([[0.1, 0.6]], [1.0, 1.05, 1.1])
    assert shape.ranks == (0, 1)


def test_side_nodes_without_value_leave_a_chain() -> None:
    shape = best_shape([[0.5, 0.4]] * 4, [1.0] * 5, side_value=0.0)
    assert shape.parents[:4] == (-1, 0, 1, 2)


def test_plain_where_nothing_pays() -> None:
    assert len(best_shape([[0.05, 0.01]] * 3, [1.0, 1.5, 2.0])) == 0
    assert len(best_shape([], [1.0, 1.1])) == 0
    assert len(best_shape([[0.9]], [1.0])) == 0
    assert len(best_shape([[0.9]], [1.0, 1.1], step_cost=3.0)) == 0
    assert best_shape([[0.9, 0.05]] * 8, [1.0, 1.1, 1.2], max_depth=1).depths == (1,)


def choose_by_force(
    parents: Parents, chances: list[float], costs: list[float], spent: float, side_value: float, first_is_main: bool
) -> float:
    """The best rate over all connected sets of candidates, each with its best main branch."""
    products: list[float] = []
    for node, parent in enumerate(parents):
        products.append(chances[node] * (1.0 if parent < 0 else products[parent]))
    best = 1.0 / (spent + costs[0])
    count = len(parents)
    for size in range(1, min(count, len(costs) - 1) + 1):
        for nodes in itertools.combinations(range(count), size):
            held = set(nodes)
            if any(parents[node] >= 0 and parents[node] not in held for node in nodes):
                continue
            for main in main_branches(parents, first_is_main):
                total = 1.0 + sum(products[node] * (1.0 if node in main else side_value) for node in nodes)
                best = max(best, total / (spent + costs[size]))
    return best


def main_branches(parents: Parents, first_is_main: bool) -> list[set[int]]:
    branches = []
    for leaf in range(len(parents)):
        branch, node = set(), leaf
        while node >= 0:
            branch.add(node)
            node = parents[node]
        firsts = {next(i for i, p in enumerate(parents) if p == parents[node]) for node in branch}
        if not first_is_main or firsts == branch:
            branches.append(branch)
    return branches


@pytest.mark.parametrize("first_is_main", [False, True])
@pytest.mark.parametrize("side_value", [1.0, 0.6])
def test_the_choice_is_the_best_of_all(rng: np.random.Generator, side_value: float, first_is_main: bool) -> None:
    """With side_value 1 the very best; below it the main branch is fixed before the nodes are chosen."""
    sizes = set()
    for _ in range(60):
        count = int(rng.integers(1, 8))
        parents = tuple(int(rng.integers(-1, node)) if node else -1 for node in range(count))
        chances = rng.uniform(0.05, 0.95, count).tolist()
        costs = np.cumsum([1.0, *rng.uniform(0.0, 0.3, 8)]).tolist()
        chosen = choose_nodes(parents, chances, costs, spent=0.1, side_value=side_value, first_is_main=first_is_main)
        best = choose_by_force(parents, chances, costs, 0.1, side_value, first_is_main)
        if side_value == 1.0 or first_is_main:
            assert chosen.rate == pytest.approx(best)
        assert best * 0.93 <= chosen.rate <= best * (1 + 1e-9)
        check_selection(parents, chosen.nodes, chosen.parents)
        sizes.add(len(chosen.nodes))
    assert len(sizes) >= 3


def check_selection(parents: Parents, nodes: tuple[int, ...], chosen: Parents) -> None:
    assert len(set(nodes)) == len(nodes) == len(chosen)
    for place, (node, parent) in enumerate(zip(nodes, chosen, strict=True)):
        assert -1 <= parent < place
        assert (nodes[parent] if parent >= 0 else -1) == parents[node]


def test_the_main_branch_comes_first_and_is_the_longest_in_tokens() -> None:
    #   0 .5 -> 2 .3;  1 .4 -> 3 .9 -> 4 .9
    chosen = choose_nodes([-1, -1, 0, 1, 3], [0.5, 0.4, 0.3, 0.9, 0.9], [1.0] * 6, side_value=0.5)
    assert chosen.nodes == (1, 3, 4, 0, 2)
    assert chosen.parents == (-1, 0, 1, -1, 3)
    first = choose_nodes([-1, -1, 0, 1, 3], [0.5, 0.4, 0.3, 0.9, 0.9], [1.0] * 6, side_value=0.5, first_is_main=True)
    assert first.nodes == (0, 2, 1, 3, 4)


def test_no_candidates() -> None:
    chosen = choose_nodes([], [], [1.0, 1.1])
    assert (chosen.nodes, chosen.expected, chosen.seconds) == ((), 1.0, 1.0)
    assert choose_nodes([-1], [0.01], [1.0, 1.1]).nodes == ()
    assert choose_nodes([-1], [1.0], [1.0]).nodes == ()
