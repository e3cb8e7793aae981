"""The window and the pool of lookahead decoding, against the published layout with its masks written out."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.chooser import Chooser
from specrun.runtime.lookahead import LookaheadShape, TokenTree, Window
from specrun.runtime.loop import Limits, speculate
from specrun.runtime.ngram_pool import NgramPool
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.options import GenerationOptions
from specrun.runtime.proposal import MAX_NODES, Proposal
from specrun.runtime.proposers.lookahead import SURE_MATCH, LookaheadProposer
from specrun.runtime.result import SpeculationStats
from specrun.runtime.target_run import alone

from .conftest import TinyModels
from .test_ngram_table import reference as lookup

V = 12
SHAPES = [(1, 2, 1), (4, 2, 3), (1, 4, 2), (2, 3, 2), (3, 3, 3), (4, 3, 4), (5, 4, 5), (3, 5, 4)]
NEXT = np.random.default_rng(7).integers(0, V, (V, V))


def choice(seen: Sequence[tuple[int, int]]) -> int:
    """What the toy model makes of the tokens that a place sees, with their positions: as a rule of the last two.

    Now and then of everything, so that one token too many or at another position tells.
    """
    ordered = sorted(seen)
    code = zlib.crc32(repr(ordered).encode())
    if code % 5 == 0:
        return code // 5 % V
    return int(NEXT[ordered[-1][1], ordered[-2][1] if len(ordered) > 1 else 0])


def plain(prompt: Sequence[int], count: int) -> list[int]:
    """The toy's text."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(choice(list(enumerate(text))))
    return text


class Layout:
    """The input of a step as the paper draws it: tokens, positions behind the newest committed token, and a mask.

    sees[a][b]: whether entry a sees entry b. Entry 0 is the current token; all see what was committed before it.
    """

    def __init__(self, current: int, guesses: Sequence[Sequence[int]], levels: Sequence[Sequence[int]]) -> None:
        self.tokens, self.positions, self.sees = [current], [0], [{0}]
        for guess in guesses:
            start = len(self.tokens)
            for place, token in enumerate(guess):
                self._add(token, place + 1, {0, *range(start, start + place)})
        self.level_zero = [0]  # entries of level 0, column 0 being the current token
        for column, token in enumerate(levels[0], 1):
            self.level_zero.append(self._add(token, column, {*self.level_zero}))
        self.last = list(self.level_zero)
        above: list[set[int]] = [set() for _ in self.level_zero]
        for level, row in enumerate(levels[1:], 1):
            for column, token in enumerate(row):
                self.last[column] = self._add(token, level + column, {*self.level_zero[: column + 1], *above[column]})
                above[column].add(self.last[column])

    def _add(self, token: int, position: int, sees: set[int]) -> int:
        self.tokens.append(token)
        self.positions.append(position)
        self.sees.append({*sees, len(self.tokens) - 1})
        return len(self.tokens) - 1

    def path(self, entry: int) -> tuple[int, ...]:
        """What an entry sees behind the current token, in the order of positions, itself included."""
        seen = sorted(self.sees[entry] - {0}, key=self.positions.__getitem__)
        assert [self.positions[other] for other in seen] == [*range(1, len(seen) + 1)]
        return tuple(self.tokens[other] for other in seen)


class Reference:
    """Lookahead decoding with its levels, masks and pool as in the paper and the authors' code (one column a step)."""

    def __init__(self, prompt: Sequence[int], shape: tuple[int, int, int]) -> None:
        self.w, self.n, self.g = shape
        self.text, self.prompt = list(prompt), list(prompt)
        starts = [column * len(prompt) // self.w for column in range(self.w)]
        self.levels = [[prompt[(s + level) % len(prompt)] for s in starts] for level in range(self.n - 1)]
        del self.levels[0][0]
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def guesses(self) -> list[tuple[int, ...]]:
        room, found = (self.n - 1) * self.g, []
        match = lookup(self.text, room)
        if match is not None:
            found.append(match.tokens if match.length >= SURE_MATCH else match.tokens[: self.n - 1])
        for gram in reversed(self.pool.get(self.text[-1], [])):
            nodes = {guess[:end] for guess in found for end in range(1, len(guess) + 1)}
            if len(nodes) + self.n - 1 > room:
                break
            found.append(gram)
        return found

    def step(self, target: Sequence[int]) -> set[tuple[int, ...]]:
        """One step, after which `text` is longer; the paths that it verified. target: the whole text to come."""
        current = self.text[-1]
        layout = Layout(current, self.guesses(), self.levels)
        before = list(enumerate(self.text[:-1]))
        base = len(self.text) - 1
        results = []
        for entry in layout.last:
            seen = [(base + layout.positions[other], layout.tokens[other]) for other in layout.sees[entry]]
            results.append(choice([*before, *seen]))
        for column, result in enumerate(results):
            token = current if column == 0 else self.levels[0][column - 1]
            gram = (*[level[column] for level in self.levels[1:]], result)
            held = self.pool.setdefault(token, [])
            if gram in held:
                held.remove(gram)
            elif len(held) == self.g:
                del held[0]
            held.append(gram)
        self.levels = [*self.levels[1:], results]
        self.levels[0] = self.levels[0][1:]
        paths = {layout.path(entry) for entry in range(1, len(layout.tokens))}
        ahead = tuple(target[len(self.text) :])
        accepted = max((len(path) for path in paths if ahead[: len(path)] == path), default=0)
        self.text += ahead[: accepted + 1]
        return paths


class ToyTarget:
    """The toy model behind the loop: each node of a tree sees its ancestors, at the position that its depth gives."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._nodes: list[int] = []

    @property
    def length(self) -> int:
        return len(self.text) + len(self._nodes)

    def run(self, tokens: Sequence[int], *, rows: int, parents: Sequence[int] | None = None) -> np.ndarray:
        nodes = tokens[len(tokens) - rows + 1 :]
        self.text += tokens[: len(tokens) - rows + 1]
        self._nodes = list(nodes)
        parents = range(-1, len(nodes) - 1) if parents is None else parents
        seen = [list(enumerate(self.text))]
        for node, parent in enumerate(parents):
            before = seen[parent + 1]
            seen.append([*before, (len(before), nodes[node])])
        return one_hot([choice(one) for one in seen])

    trees_exact = True

    def tree_room(self, length: int) -> int:
        return MAX_NODES

    def note_rest(self, seconds: float) -> None:
        """A toy costs nothing."""

    def keep_path(self, start: int, nodes: Sequence[int]) -> None:
        assert start == len(self.text)
        self.text += [self._nodes[node] for node in nodes]
        self._nodes = []

    def rewind_to(self, length: int) -> None:
        assert not self._nodes
        assert length <= len(self.text)
        del self.text[length:]


def one_hot(tokens: Sequence[int]) -> np.ndarray:
    logits = np.zeros((len(tokens), V), np.float32)
    logits[range(len(tokens)), list(tokens)] = 9.0
    return logits


class Watched(LookaheadProposer):
    """Remembers its last proposal."""

    def propose(self, context: Sequence[int], limit: int) -> Proposal:
        self.last = super().propose(context, limit)
        return self.last


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    """What each node sees, itself included."""
    found: list[tuple[int, ...]] = []
    for node, token in enumerate(proposal.tokens):
        parent = node - 1 if proposal.parents is None else proposal.parents[node]
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len({*found}) == len(found)
    return {*found}


def pool_of(table: NgramTable) -> dict[int, list[tuple[int, ...]]]:
    grams: dict[int, list[tuple[int, ...]]] = {}
    for token, *gram in table.pool:
        grams.setdefault(token, []).append(tuple(gram))
    return grams


@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_is_that_of_the_published_layout(shape: tuple[int, int, int]) -> None:
    """Round by round: the same paths verified, the same n-grams harvested, the same tokens committed."""
    rng = np.random.default_rng(sum(shape))
    accepted = 0
    for length in (1, 2, 5, 30):
        prompt = rng.integers(0, V, length).tolist()
        target = plain(prompt, 140)
        table = NgramTable()
        proposer = Watched(table, LookaheadShape(*shape), tokens=V)
        chooser = Chooser(GenerationOptions(), prompt=prompt, tokens=V, eos=(), margin=1e-3)
        limits = Limits(len(target), 60, frozenset())
        committed, stats, toy = list(prompt), SpeculationStats(), ToyTarget()
        rounds = alone(toy, speculate(toy, proposer, chooser, committed, limits, stats))  # type: ignore[arg-type]
        next(rounds)
        other = Reference(prompt, shape)
        other.text.append(committed[-1])
        while len(committed) < length + 80:  # far from where the limit cuts the window
            wanted = other.step(target)
            next(rounds)
            assert paths(proposer.last) == wanted
            assert pool_of(table) == other.pool
            assert committed == other.text == target[: len(committed)]
        assert stats.proposed <= stats.rounds * LookaheadShape(*shape).nodes
        accepted += stats.accepted
    assert accepted > 20


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tree_is_the_published_mask(shape: tuple[int, int, int]) -> None:
    """With tokens that all differ each entry of the layout is a node: it sees the same, at the same position."""
    w, n, g = shape
    tokens = iter(range(100, 1000))
    guesses = [[next(tokens) for _ in range(n - 1)] for _ in range(g)]
    window = Window(LookaheadShape(*shape), [0])
    window.columns = [[next(tokens) for _ in range(n - 1)] for _ in range(w)]
    levels = [[column[level] for column in window.columns] for level in range(n - 1)]
    layout = Layout(5, guesses, [levels[0][1:], *levels[1:]])
    tree = TokenTree(MAX_NODES)
    for guess in guesses:
        tree.add_chain(guess)
    ends = window.place(tree, 5)
    proposal = tree.proposal()
    parents = proposal.parents or tuple(range(-1, len(proposal) - 1))
    assert len(proposal) == LookaheadShape(*shape).nodes
    assert [5, *proposal.tokens] == layout.tokens
    sees, depths = [{0}], [0]
    for node, parent in enumerate(parents):
        sees.append({*sees[parent + 1], node + 1})
        depths.append(depths[parent + 1] + 1)
    assert sees == layout.sees
    assert depths == layout.positions
    assert [end + 1 for end in ends if end is not None] == layout.last
    assert proposal.main_length >= n - 1  # the best guess is the main branch


def test_a_run_of_the_tree_is_plain_decoding_of_each_path(models: TinyModels) -> None:
    """Through a real graph: the row of each entry is that of the tokens it sees, up to the rounding of the layout."""
    engine = models.engine("tgt")
    context = engine.encode("the days of the week", raw=True)
    rng = np.random.default_rng(3)
    window = Window(LookaheadShape(4, 4, 3), rng.integers(3, 200, 40).tolist())
    tree = TokenTree(MAX_NODES)
    for _ in range(3):
        tree.add_chain(rng.integers(3, 200, 3).tolist())
    window.place(tree, context[-1])
    proposal = tree.proposal()
    engine.logits(context)
    engine.target.rewind_to(len(context) - 1)
    inputs = [context[-1], *proposal.tokens]
    logits = engine.target.run(inputs, rows=len(inputs), parents=proposal.parents).copy()
    parents = proposal.parents
    assert parents is not None
    for node in range(len(proposal)):
        path, at = [], node
        while at >= 0:
            path.insert(0, proposal.tokens[at])
            at = parents[at]
        engine.reset()
        np.testing.assert_allclose(logits[node + 1], engine.logits([*context, *path]), atol=2e-4)


def test_a_column_that_was_not_run_stays() -> None:
    """Near the end of a text what lies too deep is left out, and the loop may leave out the last nodes."""
    table = NgramTable()
    proposer = LookaheadProposer(table, LookaheadShape(3, 3, 1), tokens=V)
    proposer.start([1, 2, 3, 4, 5, 6])
    columns = proposer._window.columns
    assert columns == [[1, 2], [3, 4], [5, 6]]
    proposal = proposer.propose([1, 2, 3, 4, 5, 6], 2)
    assert (proposal.tokens, proposal.parents) == ((3, 5, 2, 4), (-1, 0, -1, 0))  # 6 behind 5 would be the third
    proposer.take_logits(one_hot([9, 9, 9, 7, 8]))
    assert columns == [[2, 7], [4, 8], [5, 6]]
    assert pool_of(table) == {6: [(2, 7)], 3: [(4, 8)]}
    proposal = proposer.propose([1, 2, 3, 4, 5, 6, 0], 9)
    assert (proposal.tokens, proposal.parents) == ((4, 5, 7, 8, 6), (-1, 0, -1, 0, 1))
    proposer.take_logits(one_hot([9, 9, 9, 10]))  # two nodes were left out
    assert columns == [[7, 10], [4, 8], [5, 6]]
    proposer.propose([1, 2, 3, 4, 5, 6, 0, 3], 0)
    proposer.take_logits(one_hot([9]))
    assert columns == [[3, 10], [4, 8], [5, 6]]


def test_the_best_guess_comes_first_and_a_long_match_goes_on() -> None:
    table = NgramTable()
    shape = LookaheadShape(1, 3, 3)
    proposer = LookaheadProposer(table, shape, tokens=50)
    text = [7, 1, 2, 3, 30, 31, 32, 33, 34, 35, 36, 8, 9, 3]
    proposer.start(text)
    table.pool.add(3, (40, 41), 3)
    table.pool.add(3, (30, 42), 3)
    proposal = proposer.propose(text, 9)
    assert proposal.tokens[:5] == (30, 31, 42, 40, 41)  # one token matched: two are copied, then the newest n-gram
    assert proposal.main_length == 2
    text[-3:] = [1, 2, 3]
    proposer.start(text)
    proposal = proposer.propose(text, 9)
    assert proposal.tokens[:6] == (30, 31, 32, 33, 34, 35)  # three matched: the room of all guesses
    assert proposal.main_length == 6
    assert proposer.propose(text, 4).tokens[:4] == (30, 31, 32, 33)


def test_the_pool_keeps_the_newest() -> None:
    pool = NgramPool(eos_ids={0}, keys=2)
    for gram in ((1, 2), (3, 4), (1, 2), (5, 6)):
        pool.add(9, gram, 2)
    assert pool.guesses(9) == ((5, 6), (1, 2))
    pool.add(9, (5, 6), 3)
    assert pool.guesses(9) == ((5, 6), (1, 2))
    assert pool.guesses(8) == ()
    for token, gram in ((0, (1, 2)), (9, (1, 0)), (9, (0, 1))):  # nothing beyond the end of a text
        pool.add(token, gram, 2)
    assert list(pool) == [(9, 1, 2), (9, 5, 6)]
    pool.add(8, (1,), 2)
    pool.add(9, (1, 2), 2)
    pool.add(7, (1,), 2)  # 8 was guessed about longest ago
    assert (pool.guesses(8), pool.guesses(9), pool.guesses(7)) == ((), ((1, 2), (5, 6)), ((1,),))
    assert len(pool) == 3


WRONG: list[Any] = [
    *((0, 3, 3), (3, 1, 3), (3, 3, 0), (7, 5, 7)),
    *((3, 3), (3, 3, 3, 3), "333", 3),
    *((3.0, 3, 3), (True, 3, 3), ("3", 3, 3)),
]


@pytest.mark.parametrize("values", WRONG)
def test_shapes_that_cannot_be(values: Any) -> None:
    with pytest.raises(UsageError, match=r"^lookahead"):
        LookaheadShape.of(values)


def test_the_most_nodes() -> None:
    assert LookaheadShape().nodes == 11
    assert LookaheadShape.of([5, 4, 5]).nodes == 29
    assert LookaheadShape(9, 4, 2).nodes == MAX_NODES
    with pytest.raises(UsageError, match="33 draft tokens a run and 32 are the most"):
        LookaheadShape(15, 3, 2)
