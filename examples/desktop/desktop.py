"""A window that answers: streaming, a stop button, and a colour for where each token came from.

    python examples/desktop/desktop.py [MODEL]
    python examples/desktop/desktop.py MODEL --ask "Hello" --seconds 60    # one answer to stdout, then it closes

Tk belongs to the main thread and the engine to a worker. The worker puts what happens into a queue; the window looks
there a few times a second. Neither ever waits for the other.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import tkinter as tk
from tkinter import scrolledtext

from specrun.models_cache.errors import SpecrunError
from specrun.runtime import ChatSession, Engine, Piece, Result, Stream

COLOURS = {"draft": "#1a7f37", "correction": "#9a3412", "bonus": "#1f2328", "prefill": "#1f2328"}
LOOK_MS = 30


class Worker(threading.Thread):
    """Loads the model and answers one question after another; `events` tells what happens.

    Events: ("ready", name), ("piece", Piece), ("done", Result), ("error", text).
    """

    def __init__(self, model: str) -> None:
        super().__init__(daemon=True)
        self.events: queue.Queue[tuple[str, str | Piece | Result]] = queue.Queue()
        self._questions: queue.Queue[str | None] = queue.Queue()
        self._model = model
        self._stream: Stream | None = None
        self._stopped = threading.Event()

    def ask(self, question: str) -> None:
        """Answer this next."""
        self._stopped.clear()
        self._questions.put(question)

    def stop(self) -> None:
        """End the answer after the round that runs; what came counts as said."""
        self._stopped.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._questions.put(None)

    def run(self) -> None:
        """What the thread does."""
        try:
            with Engine.load(self._model) as engine:
                self.events.put(("ready", engine.bundle.manifest.name))
                chat = engine.chat()
                while (question := self._questions.get()) is not None:
                    self._answer(chat, question)
        except SpecrunError as error:
            self.events.put(("error", str(error)))

    def _answer(self, chat: ChatSession, question: str) -> None:
        try:
            stream = self._stream = chat.send(question, max_tokens=400)
            if self._stopped.is_set():  # the button came before the stream
                stream.cancel()
            for piece in stream:
                self.events.put(("piece", piece))
            self.events.put(("done", stream.result))
        except SpecrunError as error:
            self.events.put(("error", str(error)))
        finally:
            self._stream = None


class Window:
    """The window: a text, an entry, two buttons and a line of figures."""

    def __init__(self, root: tk.Tk, worker: Worker) -> None:
        self.root, self.worker = root, worker
        self.answers: list[Result] = []
        self.failed = ""
        root.title("specrun")
        self.text = scrolledtext.ScrolledText(root, wrap="word", width=80, height=24, state="disabled")
        self.text.pack(fill="both", expand=True, padx=8, pady=8)
        for source, colour in COLOURS.items():
            self.text.tag_configure(source, foreground=colour)
        self.text.tag_configure("question", foreground="#0550ae")
        row = tk.Frame(root)
        row.pack(fill="x", padx=8, pady=(0, 8))
        self.entry = tk.Entry(row)
        self.entry.pack(side="left", fill="x", expand=True)
        self.entry.bind("<Return>", lambda event: self.ask())
        self.send_button = tk.Button(row, text="Send", command=self.ask, state="disabled")
        self.send_button.pack(side="left", padx=(8, 0))
        self.stop_button = tk.Button(row, text="Stop", command=worker.stop, state="disabled")
        self.stop_button.pack(side="left", padx=(8, 0))
        self.status = tk.Label(root, text="loading the model ...", anchor="w")
        self.status.pack(fill="x", padx=8, pady=(0, 8))
        root.protocol("WM_DELETE_WINDOW", self.close)
        worker.start()
        self._look()

    def ask(self) -> None:
        """Send what stands in the entry."""
        question = self.entry.get().strip()
        if not question or str(self.send_button["state"]) == "disabled":
            return
        self.entry.delete(0, "end")
        self._write(f"{question}\n", "question")
        self._busy(True)
        self.status["text"] = "reading ..."
        self.worker.ask(question)

    def close(self) -> None:
        """Close the window; the worker ends by itself."""
        self.worker.close()
        self.root.destroy()

    def _look(self) -> None:
        """Show what happened since the last look."""
        try:
            while True:
                self._show(*self.worker.events.get_nowait())
        except queue.Empty:
            self.root.after(LOOK_MS, self._look)

    def _show(self, kind: str, what: str | Piece | Result) -> None:
        if isinstance(what, Piece):
            self._write(what.text, what.tokens[-1].source if what.tokens else "bonus")
        elif isinstance(what, Result):
            self.answers.append(what)
            self._write("\n\n", "bonus")
            self._busy(False)
            self.status["text"] = figures(what)
        elif kind == "ready":
            self._busy(False)
            self.status["text"] = f"{what}: green tokens were guessed and stood, red ones were corrected"
            self.entry.focus_set()
        else:
            self.failed = what
            self._busy(False)
            self.status["text"] = what

    def _busy(self, busy: bool) -> None:
        self.send_button["state"] = "disabled" if busy else "normal"
        self.stop_button["state"] = "normal" if busy else "disabled"

    def _write(self, text: str, tag: str) -> None:
        self.text["state"] = "normal"
        self.text.insert("end", text, tag)
        self.text["state"] = "disabled"
        self.text.see("end")


def figures(result: Result) -> str:
    """One line about an answer."""
    tokens, seconds = result.usage.completion_tokens, result.timings.decode_s
    speed = f", {(tokens - 1) / seconds:.0f} tokens/s" if seconds > 0 else ""
    ended = " (stopped)" if result.finish_reason == "cancelled" else ""
    return f"{tokens} tokens{ended}{speed}, {result.speculation.acceptance_rate:.0%} of the guesses stood"


def main(arguments: list[str] | None = None) -> int:
    """Open the window; with --ask, print one answer and close it."""
    parser = argparse.ArgumentParser(description="A window that answers.")
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="a model's name, or its folder")
    parser.add_argument("--ask", help="ask this, print the answer, close")
    parser.add_argument("--seconds", type=float, default=60.0, help="give up --ask after so many seconds")
    given = parser.parse_args(arguments)
    root = tk.Tk()
    window = Window(root, Worker(given.model))
    if given.ask is not None:
        _ask_once(window, given.ask, given.seconds)
    root.mainloop()
    window.worker.join(60)
    if given.ask is None:
        return 0
    if not window.answers:
        print(window.failed or "no answer came in time", file=sys.stderr)
        return 1
    print(window.answers[0].text)
    return 0


def _ask_once(window: Window, question: str, seconds: float) -> None:
    def step(asked: bool = False) -> None:
        if window.answers or window.failed:
            window.close()
            return
        if not asked and str(window.send_button["state"]) == "normal":
            window.entry.insert(0, question)
            window.ask()
            asked = True
        window.root.after(LOOK_MS, step, asked)

    step()
    window.root.after(int(seconds * 1000), window.close)


if __name__ == "__main__":
    sys.exit(main())
