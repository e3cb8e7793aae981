"""`specrun chat`: a conversation, on a terminal or from lines of stdin."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.answer import show_answer
from specrun.cli.main import INTERRUPTED
from specrun.cli.opening import open_engine
from specrun.cli.options import engine_values, request_values, writing_options
from specrun.cli.output import echo_json, is_terminal, note, stats_line, use_colour

if TYPE_CHECKING:
    from specrun.runtime import ChatSession, Engine

HELP = """/help    this text
/reset   forget the conversation
/undo    take the last question and its answer back
/quit    leave (so does Ctrl-D)
//TEXT   say /TEXT
Ctrl-C ends an answer where it is; what came so far counts as said."""


@click.command()
@writing_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for each answer.")
def chat(system: str | None, ngrams: str | None, color: bool, stats: bool, as_json: bool, **values: Any) -> None:
    """Talk with a model; each turn costs only what is new in it.

    On a terminal: /help shows the commands, Ctrl-C ends an answer and keeps the conversation, Ctrl-D leaves. Otherwise
    each line of stdin is a turn, and the first failure ends the command.

    \b
    Examples:
      specrun chat
      specrun chat --system "You are terse." --temperature 0.7 --stats
      printf 'My name is Ada.\\nWhat is my name?\\n' | specrun chat
    """
    from specrun.runtime.request import request_options

    request = request_values(values)
    request_options(**request)
    with open_engine(**engine_values(values), methods=(values["method"],)) as engine:
        if ngrams is not None and Path(ngrams).exists():
            engine.load_ngrams(Path(ngrams))
        conversation = _Conversation(engine, system, request, as_json=as_json, colour=use_colour(color), stats=stats)
        try:
            conversation.run()
        finally:
            if ngrams is not None:
                engine.save_ngrams(Path(ngrams))


class _Conversation:
    def __init__(
        self, engine: Engine, system: str | None, request: dict[str, Any], *, as_json: bool, colour: bool, stats: bool
    ) -> None:
        self._engine = engine
        self._system = system
        self._request = request
        self._as_json = as_json
        self._colour = colour
        self._stats = stats
        self._terminal = is_terminal(sys.stdin)
        self._session: ChatSession = engine.chat(system)

    def run(self) -> None:
        """Read turns until the input ends."""
        from specrun.models_cache.errors import SpecrunError

        if self._terminal:
            note(f"{self._engine.bundle.manifest.name}: /help shows the commands, Ctrl-D leaves")
        while True:
            try:
                line = self._read()
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                note("\nCtrl-D leaves")
                continue
            if line is None:
                return
            line = line.strip()
            try:
                if line.startswith("/") and not line.startswith("//"):
                    if not self._command(line):
                        return
                elif line:
                    self._answer(line.removeprefix("/") if line.startswith("//") else line)
            except SpecrunError as error:
                if not self._terminal:
                    raise
                note(f"Error: {error}")

    def _read(self) -> str | None:
        """The next line of stdin; None at its end."""
        if self._terminal and sys.stdout.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            try:
                return input("> ")
            except EOFError:
                note("")
                return None
        if self._terminal:
            click.echo("> ", err=True, nl=False)
        data = sys.stdin.buffer.readline()
        return data.decode("utf-8-sig", "surrogateescape") if data else None

    def _command(self, line: str) -> bool:
        """Carry out a command; False if it ends the conversation."""
        match line:
            case "/quit" | "/exit":
                return False
            case "/help":
                note(HELP)
            case "/reset":
                self._session = self._engine.chat(self._system)
                note("The conversation starts anew.")
            case "/undo":
                self._session.rewind(1)
                note("The last question and its answer are taken back.")
            case _:
                note(f"There is no command {line}; /help shows what there is, and //TEXT says /TEXT.")
        return True

    def _answer(self, text: str) -> None:
        stream = self._session.send(text, **self._request)
        result, interrupted = show_answer(stream, show=not self._as_json, colour=self._colour)
        if self._as_json:
            echo_json(result.to_json())
        if self._stats:
            note(stats_line(result, self._request, self._engine.calibration.cost))
        if interrupted and not self._terminal:
            raise click.exceptions.Exit(INTERRUPTED)
