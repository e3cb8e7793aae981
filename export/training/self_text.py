"""Dialogues that the target writes with itself: its user turns sampled, its answers greedy or sampled.

Many dialogues are written at once, one token of each a run. Given text (the chat template, the words that a prompt
begins with) is fed the same way, so there is no prefill, and every run delivers the features of the tokens it was fed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specrun.export.training.dialogue_form import DialogueForm
from specrun.export.training.prompt_seeds import FIRST, FOLLOW_UP, Seed
from specrun.runtime.session import ModelSession
from specrun.runtime.tokenizer import Tokenizer

MAX_DIALOGUE = 720  # tokens
MAX_ANSWER = 200
GREEDY_SHARE = 0.6  # of the answers; the others have a temperature of
TEMPERATURES = (0.7, 1.0)
MIN_P = 0.02  # sampling leaves out what is less probable than this share of the most probable token
FOLLOW_UP_SHARE = 0.5
FOLLOW_UP_UNTIL = 400  # tokens; a longer dialogue gets no further turn
_HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """One dialogue and what the target computed on the way; the end-of-text id of its last answer is left out.

    tokens    i32 [n]
    answer    bool [n]: the token is one of the target's answers
    features  f16 [n, taps * hidden]
    """

    tokens: NDArray[np.int32]
    answer: NDArray[np.bool_]
    features: NDArray[np.float16]


def half_precision(features: NDArray[np.float32]) -> NDArray[np.float16]:
    """Features as they are kept; what is too large is cut."""
    return np.clip(features, -_HALF_MAX, _HALF_MAX).astype(np.float16)


Writing = Generator[int, NDArray[np.float32], None]  # yields the token to run, is sent the logits after it


class SelfWriter:
    """Writes dialogues over `session`, as many at a time as it has rows.

    start: number of the first dialogue; each has random numbers of its own, keyed on `seed` and its number.
    prompts: whole prompts (token ids, the chat template included), each to be answered once, instead of self-written
    ones.
    """

    def __init__(
        self,
        session: ModelSession,
        tokenizer: Tokenizer,
        form: DialogueForm,
        *,
        seed: Sequence[int],
        start: int = 0,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._form = form
        self._seed = seed
        self._number = start
        self._prompts = prompts
        self._limit = min(MAX_DIALOGUE, session.sizes.context - 1)
        self._ends = np.array(sorted(form.ends), np.int64)

    def dialogues(self) -> Iterator[Dialogue]:
        """Dialogues as they are finished, without end, or until every prompt is answered."""
        session = self._session
        session.reserve(self._limit + 2)
        rows = [self._begin() for _ in range(session.cache.batch)]
        fed = [[] if row is None else [next(row.writing)] for row in rows]
        while any(fed):
            logits = np.asarray(session.run_batch(fed, rows=1))[:, 0, : session.sizes.tokens]
            features = half_precision(session.batch_features[:, 0])
            for index, row in enumerate(rows):
                if row is None:
                    continue
                row.features.append(features[index])
                try:
                    fed[index] = [row.writing.send(logits[index])]
                except StopIteration:
                    yield row.finished()
                    rows[index] = row = self._begin()
                    session.cache.rewind_to(0, index)
                    fed[index] = [] if row is None else [next(row.writing)]

    def _begin(self) -> _Row | None:
        if self._prompts is None:
            return self._row(self._converse)
        if self._number >= len(self._prompts):
            return None
        prompt = self._prompts[self._number]
        return self._row(lambda row: self._answer_to(row, prompt))

    def _row(self, write: Callable[[_Row], Writing]) -> _Row:
        row = _Row(np.random.default_rng([*self._seed, self._number]), self._session.sizes.context - 1)
        self._number += 1
        row.writing = _until_full(write(row))
        return row

    def _answer_to(self, row: _Row, prompt: Sequence[int]) -> Writing:
        logits = yield from row.feed(prompt)
        yield from self._write(row, logits, 1, MAX_ANSWER, self._answer_temperature(row), answer=True)

    def _converse(self, row: _Row) -> Writing:
        """The user turns are the target's own; a model without a chat template writes plain text."""
        logits = yield from row.feed(self._form.opening or [int(row.random.integers(self._session.sizes.tokens))])
        shares, kinds = zip(*FIRST, strict=True)
        seeds: Sequence[Seed] = kinds[row.random.choice(len(kinds), p=np.array(shares) / sum(shares))]
        while self._form.asking:
            for part in seeds[int(row.random.integers(len(seeds)))].parts:
                given = self._tokenizer.encode(part.text.rstrip(" "), add_bos=False) if part.text else []
                if given:
                    logits = yield from row.feed(given)
                _, logits = yield from self._write(row, logits, part.least, part.most, 1.0, answer=False)
            logits = yield from row.feed(self._form.asking)
            end, logits = yield from self._write(row, logits, 1, MAX_ANSWER, self._answer_temperature(row), answer=True)
            goes_on = len(row.tokens) < FOLLOW_UP_UNTIL and row.random.random() < FOLLOW_UP_SHARE
            if end is None or self._form.turning is None or not goes_on:
                return
            logits = yield from row.feed([end], answer=True)
            if self._form.turning:
                logits = yield from row.feed(self._form.turning)
            seeds = FOLLOW_UP
        yield from self._write(row, logits, 1, self._limit, self._answer_temperature(row), answer=True)

    def _answer_temperature(self, row: _Row) -> float:
        return 0.0 if row.random.random() < GREEDY_SHARE else float(row.random.uniform(*TEMPERATURES))

    def _write(
        self, row: _Row, logits: NDArray[np.float32], least: int, most: int, temperature: float, *, answer: bool
    ) -> Generator[int, NDArray[np.float32], tuple[int | None, NDArray[np.float32]]]:
        """Write `least` to `most` tokens; (the id that ended the text, which is not run, or None; the logits then)."""
        for written in range(most):
            token = self._choose(logits, temperature, row.random, may_end=written >= least)
            if token in self._form.ends:
                return token, logits
            if len(row.tokens) >= self._limit:
                break
            logits = yield from row.feed([token], answer=answer)
        return None, logits

    def _choose(
        self, logits: NDArray[np.float32], temperature: float, random: np.random.Generator, *, may_end: bool
    ) -> int:
        best = int(logits.argmax())
        if not may_end and best in self._form.ends:
            logits = logits.copy()
            logits[self._ends] = -np.inf
            best = int(logits.argmax())
        if temperature == 0.0:
            return best
        ids = np.flatnonzero(logits >= logits[best] + temperature * np.log(MIN_P))
        if not may_end:
            ids = np.setdiff1d(ids, self._ends)
        weights = np.exp((logits[ids].astype(np.float64) - logits[best]) / temperature)
        return int(random.choice(ids, p=weights / weights.sum()))


class _Full(Exception):  # noqa: N818  (it ends a dialogue and is no error)
    """A dialogue has no room for what comes next."""


class _Row:
    """A dialogue being written."""

    writing: Writing

    def __init__(self, random: np.random.Generator, room: int) -> None:
        self.random = random
        self.tokens: list[int] = []
        self.features: list[NDArray[np.float16]] = []
        self._answer: list[bool] = []
        self._room = room

    def feed(
        self, tokens: Sequence[int], *, answer: bool = False
    ) -> Generator[int, NDArray[np.float32], NDArray[np.float32]]:
        """Run tokens, at least one, one by one; the logits after the last. Raises _Full where no more fits."""
        for token in tokens:
            if len(self.tokens) >= self._room:
                raise _Full
            self.tokens.append(token)
            self._answer.append(answer)
            logits = yield token
        return logits

    def finished(self) -> Dialogue:
        """What was written."""
        return Dialogue(np.array(self.tokens, np.int32), np.array(self._answer), np.stack(self.features))


def _until_full(writing: Writing) -> Writing:
    try:
        yield from writing
    except _Full:
        return
