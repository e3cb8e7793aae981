"""The desktop example under a virtual display: it streams, stops, colours tokens, and is packed into a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specrun.runtime import Engine

from ..conftest import ROOT

pytest.importorskip("tkinter", reason="this Python has no tkinter: install python3-tk", exc_type=ImportError)

DESKTOP = ROOT / "examples" / "desktop"

DRIVER = """
import json, sys, tkinter as tk
sys.path.insert(0, sys.argv[1])
import desktop

root = tk.Tk()
window = desktop.Window(root, desktop.Worker(sys.argv[2]))
ticks, seen = [0], []
write = window._write


def watched(text, tag):
    seen.append((text, tag))
    write(text, tag)
    if tag in desktop.COLOURS and len(window.answers) == 0 and len([1 for _, t in seen if t != "question"]) == 5:
        window.stop_button.invoke()


window._write = watched


def tick():
    ticks[0] += 1
    root.after(1, tick)


def step(asked=0):
    if window.failed:
        window.close()
        return
    if str(window.send_button["state"]) == "normal" and len(window.answers) == asked:
        if asked == 2:
            shown = window.text.get("1.0", "end")
            tags = {tag: len(window.text.tag_ranges(tag)) // 2 for tag in desktop.COLOURS}
            status = window.status["text"]
            window.close()
            print(json.dumps({
                "reasons": [answer.finish_reason for answer in window.answers],
                "texts": [answer.text for answer in window.answers],
                "sources": [[token.source for token in answer.tokens] for answer in window.answers],
                "shown": shown, "tags": tags, "status": status, "ticks": ticks[0],
            }))
            return
        window.entry.insert(0, ("one two one two one two", "again: ababababab")[asked])
        window.ask()
        asked += 1
    root.after(10, step, asked)


tick()
step()
root.after(100_000, window.close)
root.mainloop()
window.worker.join(30)
print("ended", file=sys.stderr)
"""


def environment(display: str) -> dict[str, str]:
    return {**os.environ, "DISPLAY": display, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def ask(display: str, command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *arguments], env=environment(display), capture_output=True, encoding="utf-8", timeout=170
    )


def test_a_question_is_answered(display: str, tiny: str) -> None:
    with Engine.load(tiny) as engine:
        expected = engine.chat().send("Hello", max_tokens=400)
        for _ in expected:
            continue
    done = ask(display, [sys.executable, str(DESKTOP / "desktop.py")], tiny, "--ask", "Hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.result.text + "\n"


def test_stop_button_and_colours(display: str, tiny: str) -> None:
    """The first answer is stopped by the button, the second one comes whole; the window never waited."""
    done = ask(display, [sys.executable, "-c", DRIVER], str(DESKTOP), tiny)
    assert done.returncode == 0, done.stderr
    assert "ended" in done.stderr
    found = json.loads(done.stdout)
    assert found["reasons"][0] == "cancelled"
    assert found["reasons"][1] in ("stop", "length")
    assert len(found["sources"][0]) < 400
    assert all(text in found["shown"] for text in found["texts"])
    sources = {source for answer in found["sources"] for source in answer}
    assert {"prefill", "draft", "bonus"} <= sources
    assert all(found["tags"][source] for source in sources)
    assert "guesses stood" in found["status"]
    assert found["ticks"] > 20


def test_a_model_that_is_not_there(display: str) -> None:
    """One clear sentence, and the window closes."""
    done = ask(display, [sys.executable, str(DESKTOP / "desktop.py")], "no-such-model", "--ask", "Hello")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_packed_by_pyinstaller(display: str, tiny: str, tmp_path: Path) -> None:
    """Built from the spec file in half a minute; the program answers without this Python's packages."""
    pytest.importorskip("PyInstaller")
    build = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN"]
    folders = ["--distpath", str(tmp_path / "dist"), "--workpath", str(tmp_path / "work")]
    done = subprocess.run(
        [*build, *folders, str(DESKTOP / "desktop.spec")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    program = tmp_path / "dist" / "desktop" / "desktop"
    bare = {name: os.environ[name] for name in ("SPECRUN_HOME", "HOME", "LANG") if name in os.environ}
    answered = subprocess.run(
        [str(program), tiny, "--ask", "Hello"],
        env={**bare, "DISPLAY": display, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        encoding="utf-8",
        timeout=170,
    )
    assert answered.returncode == 0, answered.stderr
    expected = ask(display, [sys.executable, str(DESKTOP / "desktop.py")], tiny, "--ask", "Hello")
    assert answered.stdout == expected.stdout
    size = sum(path.stat().st_size for path in (tmp_path / "dist").rglob("*") if path.is_file())
    assert size < 220e6
