"""Text from tokens as they come: whole characters only, and cut exactly before a stop string."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.models_cache.errors import UsageError
from specrun.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What a token adds: the text that is sure now, and whether a stop string ended it (`stop` names it).

    `kept_tokens` counts the pushed tokens that belong to the text so far: all of them, or, after a stop, those of
    which at least one byte was delivered (and the ones before these).
    """

    text: str
    stopped: bool
    kept_tokens: int
    stop: str | None = None


class TextStream:
    """Turns token ids into text, piece by piece.

    The pieces, joined, are `Tokenizer.decode` of all ids (with the same `prompt`), up to the stop.

    - A character whose bytes are spread over several tokens is delivered with its last byte. Bytes that can be no
      UTF-8 any more become U+FFFD at once.
    - Text that may be the start of a stop string is held back until it is clear that it is none.
    - The stop string that is complete first ends the text, wherever its ends fall in the tokens; of two that are
      complete with the same character the longer one does. Nothing of it is delivered. This does not depend on how
      the text is spread over tokens, nor on how many are pushed at a time.
    - A control token has no text, but a stop string that spells it stops there.
    - `finish` delivers what is held back: the text ended without the stop string it seemed to begin. Bytes of a
      character that was never completed become one U+FFFD.

    `prompt`: the ids before the first pushed one; they decide whether SentencePiece's first space is text. The cost of
    a push does not grow with the text. One stream serves one text and one thread.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), *, prompt: Sequence[int] = ()) -> None:
        if isinstance(stop_strings, str) or not all(stop_strings):
            raise UsageError("a stop string is empty: leave it out, or give at least one character")
        self._tokenizer = tokenizer
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._longest = max(map(len, self._stops), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = tokenizer.drops_first_space(prompt)
        self._held = ""
        self._delivered = 0  # characters
        self._pushed = 0
        self._kept = 0
        # Of each token that is not delivered in full: its number (from 1) and the character its first byte is in.
        self._waiting: deque[tuple[int, int]] = deque()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stopped

    @property
    def kept_tokens(self) -> int:
        """See StreamDelta: the tokens that ids, log probabilities and usage should show."""
        return self._kept if self._stopped else self._pushed

    @property
    def settled_tokens(self) -> int:
        """The pushed tokens that belong to the text whatever comes next: it grows up to `kept_tokens`."""
        return self._kept

    def push(self, token_id: int, *, may_stop: bool = True) -> StreamDelta:
        """Add a token. After a stop, tokens are ignored.

        `may_stop`: whether a stop string that this token completes ends the text. One that does not is ordinary text;
        a later stop may still begin inside it.
        """
        if self._stopped:
            return StreamDelta("", True, self._kept)
        self._pushed += 1
        if may_stop and self._stops and token_id in self._tokenizer.control_ids:
            spelt = self._tokenizer.token_text(token_id)
            if spelt in self._stops:
                self._held += self._utf8.decode(b"", final=True)
                return self._stop(len(self._held), spelt)
        data = self._tokenizer.token_bytes(token_id)
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        if data:
            searched = len(self._held)
            self._decode(data)
            found = self._find_stop(searched) if may_stop else None
            if found is not None:
                return self._stop(*found)
        return StreamDelta(self._deliver(len(self._held) - self._may_become_stop()), False, self._pushed)

    def finish(self) -> str:
        """The text that was held back, now that no more tokens come."""
        if self._stopped:
            return ""
        self._held += self._utf8.decode(b"", final=True)
        text = self._deliver(len(self._held))
        self._kept = self._pushed
        return text

    def _decode(self, data: bytes) -> None:
        pending = self._utf8.getstate()[0]
        first = self._delivered + len(self._held)
        if pending and not _continues(pending, data[0]):
            first += 1  # the unfinished character before becomes U+FFFD
        self._waiting.append((self._pushed, first))
        self._held += self._utf8.decode(data)

    def _find_stop(self, searched: int) -> tuple[int, str] | None:
        """Where in the held text a stop string begins, and which, of those that end after `searched` characters."""
        found = []
        for stop in self._stops:
            at = self._held.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at, stop))
        if not found:
            return None
        _, at, stop = min(found)
        return at, stop

    def _may_become_stop(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _deliver(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._delivered += length
        while self._waiting and self._waiting[0][1] < self._delivered:
            self._kept = self._waiting.popleft()[0]
        return text

    def _stop(self, at: int, stop: str) -> StreamDelta:
        text = self._deliver(at)
        self._held = ""
        self._stopped = True
        return StreamDelta(text, True, self._kept, stop)


def _continues(pending: bytes, byte: int) -> bool:
    """Whether `byte` goes on with the unfinished character `pending` (a valid start of one)."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        decoder.decode(pending + bytes([byte]))
    except UnicodeDecodeError:
        return False
    return True
