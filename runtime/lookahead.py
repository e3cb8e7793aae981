"""The window of lookahead decoding: trajectories of a Jacobi iteration, side by side (Fu et al. 2024, section 3.1).

With W columns of N - 1 levels the token at level l of column i is a guess for the position i + l behind the newest
committed one, which itself is column 0 of level 0. The input of a target run, with the guesses before it:

    current | best guess | other guesses | level 0: columns 1 .. W - 1 | level 1: columns 0 .. W - 1 | .. | level N - 2

Level l of column i sees what was committed, level 0 up to column i, and its own column up to level l; so the whole is
a token tree: level 0 is a branch, and each of its columns, the root included, has the rest of the column hanging from
it. What the target takes for most probable after the last level of a column completes an n-gram, and is the last level
of the column in the next round, whose levels all move up by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specrun.models_cache.errors import UsageError
from specrun.runtime.ngram_pool import Gram
from specrun.runtime.proposal import MAX_NODES, Proposal

__all__ = ["LookaheadShape", "TokenTree", "Window"]


@dataclass(frozen=True, slots=True)
class LookaheadShape:
    """How much lookahead decoding guesses: W columns, n-grams of N tokens, G guesses a token.

    A target run has up to (W + G)(N - 1) - 1 draft tokens, at most `MAX_NODES`. Errors: UsageError for what cannot be.
    """

    window: int = 3
    ngram: int = 3
    guesses: int = 3

    def __post_init__(self) -> None:
        least = {"window": 1, "ngram": 2, "guesses": 1}
        for name, value in ((name, getattr(self, name)) for name in least):
            if isinstance(value, bool) or not isinstance(value, int) or value < least[name]:
                raise UsageError(f"lookahead: {name} must be a whole number from {least[name]} on, not {value!r}.")
        if self.nodes > MAX_NODES:
            raise UsageError(
                f"lookahead {self.window},{self.ngram},{self.guesses} makes up to {self.nodes} draft tokens a run and "
                f"{MAX_NODES} are the most: lower one of the numbers."
            )

    @classmethod
    def of(cls, values: object) -> LookaheadShape:
        """The shape of three numbers W, N, G; UsageError for anything else."""
        if not isinstance(values, (tuple, list)) or len(values) != 3:
            raise UsageError(f"lookahead must be three whole numbers W, N, G, such as 3, 3, 3, not {values!r}.")
        return cls(*values)

    @property
    def nodes(self) -> int:
        """The most draft tokens of a target run."""
        return (self.window + self.guesses) * (self.ngram - 1) - 1


class TokenTree:
    """Grows a deterministic proposal branch by branch; what is there already is not added twice.

    depth: how deep nodes may stand; a child of the newest committed token has depth 1.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """Nodes so far."""
        return len(self._tokens)

    def add(self, parent: int | None, token: int) -> int | None:
        """The node of a token below a node (-1: the newest committed token); None if that is too deep or missing."""
        if parent is None:
            return None
        node = self._places.get((parent, token))
        if node is None:
            depth = 1 if parent < 0 else self._depths[parent] + 1
            if depth > self._depth:
                return None
            node = self._places[parent, token] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(depth)
        return node

    def add_chain(self, tokens: Sequence[int]) -> None:
        """A branch from the newest committed token on."""
        node: int | None = -1
        for token in tokens:
            node = self.add(node, token)

    def proposal(self) -> Proposal:
        """The nodes in the order in which they came."""
        return Proposal(tuple(self._tokens), "deterministic", parents=tuple(self._parents))


class Window:
    """W columns of N - 1 levels; to begin with each holds an n-gram of `text`, from evenly spread places."""

    def __init__(self, shape: LookaheadShape, text: Sequence[int]) -> None:
        starts = [column * len(text) // shape.window for column in range(shape.window)]
        levels = range(shape.ngram - 1)
        self.columns = [[text[(start + level) % len(text)] for level in levels] for start in starts]

    def place(self, tree: TokenTree, current: int) -> list[int | None]:
        """Add the window to a tree whose root is the token `current`; the node of each column's last level."""
        self.columns[0][0] = current
        ends: list[int | None] = [-1]
        for column in self.columns[1:]:
            ends.append(tree.add(ends[-1], column[0]))
        for level in range(1, len(self.columns[0])):
            ends = [tree.add(end, column[level]) for end, column in zip(ends, self.columns, strict=True)]
        return ends

    def advance(self, number: int, token: int) -> Gram:
        """Let column `number` go on with the target's token after its last level; the n-gram that this completes."""
        column = self.columns[number]
        column.append(token)
        gram = tuple(column)
        del column[0]
        return gram
