"""Conversations: the history as messages; the engine's KV prefix makes each turn cost only what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime.request import RequestOptions, request_options
from specrun.runtime.session_file import read_session, save_session
from specrun.runtime.stream import Stream

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine


class ChatSession:
    """Turns of one conversation. What counts as said is what was delivered, also when an answer was cut short.

    Each turn reads only what the engine does not hold yet: the turns before, as long as no other request came between.
    """

    def __init__(self, engine: Engine, system: str | None = None) -> None:
        self._engine = engine
        self._messages: list[Mapping[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._stream: Stream | None = None

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation so far, the delivered part of the newest answer included."""
        self._settle()
        return tuple(self._messages)

    def send(self, text: str, **options: Unpack[RequestOptions]) -> Stream:
        """Say `text` and stream the answer; options as in `Engine.stream`, except `system` and `raw`."""
        if "system" in options or "raw" in options:
            raise UsageError("A chat fixes its system message when it starts: pass it to Engine.chat.")
        self._settle()
        message = {"role": "user", "content": text}
        stream = Stream(self._engine, [*self._messages, message], request_options(**options))
        self._messages.append(message)
        self._stream = stream
        return stream

    def rewind(self, turns: int = 1) -> None:
        """Take the last `turns` questions and their answers back."""
        self._settle()
        users = [index for index, message in enumerate(self._messages) if message["role"] == "user"]
        if not 0 <= turns <= len(users):
            raise UsageError(f"The conversation has {len(users)} turns: {turns} cannot be taken back.")
        if turns:
            del self._messages[users[-turns] :]

    def fork(self) -> ChatSession:
        """A second conversation that begins as this one; both go their own way and share what the engine holds."""
        self._settle()
        return ChatSession._of(self._engine, self._messages)

    def save(self, path: Path | str) -> None:
        """Write the conversation, and what the engine holds of its KV, to an .npz file, whole or not at all.

        `Engine.load_session` reads it. Errors: CacheError if the folder refuses.
        """
        self._settle()
        save_session(self._engine, self._messages, Path(path))

    @classmethod
    def load(cls, engine: Engine, path: Path | str) -> ChatSession:
        """A conversation that `save` wrote, as `Engine.load_session`."""
        return cls._of(engine, read_session(engine, Path(path)))

    @classmethod
    def _of(cls, engine: Engine, messages: Iterable[Mapping[str, Any]]) -> ChatSession:
        session = cls(engine)
        session._messages = list(messages)
        return session

    def _settle(self) -> None:
        """Write the newest answer into the history."""
        if self._stream is None:
            return
        if not self._stream.done:
            raise SpecrunError("The answer is still being written: read the stream to its end, or close it, first.")
        self._messages.append({"role": "assistant", "content": self._stream.result.text})
        self._stream = None
