from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main
from specrun.runtime import Engine

from ..conftest import INTERRUPTIBLE

pytestmark = pytest.mark.usefixtures("tiny")


def chat(lines: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["chat", "--model", "tiny", "--max-tokens", "12", *arguments], input=lines)


def answers(*turns: str, system: str | None = None) -> list[str]:
    with Engine.load("tiny") as engine:
        session = engine.chat(system)
        found = []
        for turn in turns:
            stream = session.send(turn, max_tokens=12)
            list(stream)
            found.append(stream.result.text)
        return found


def shown(*texts: str) -> str:
    return "".join(text if text.endswith("\n") else text + "\n" for text in texts)


def test_each_line_is_a_turn() -> None:
    result = chat("Hello\n\nAnd now?\n")
    assert result.exit_code == 0
    assert result.stdout == shown(*answers("Hello", "And now?"))
    assert result.stderr == ""


def test_a_last_line_without_an_end() -> None:
    assert chat("Hello").stdout == shown(*answers("Hello"))


def test_system() -> None:
    assert chat("Hello\n", "--system", "Be terse.").stdout == shown(*answers("Hello", system="Be terse."))


def test_undo_and_reset() -> None:
    result = chat("Hello\nNo!\n/undo\nAnd now?\n/reset\nHello\n")
    assert result.stdout == shown(*answers("Hello", "No!"), answers("Hello", "And now?")[1], *answers("Hello"))
    assert "taken back" in result.stderr


def test_commands_are_not_said() -> None:
    result = chat("/help\n/what\n/quit\nHello\n")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "/undo" in result.stderr
    assert "/what" in result.stderr


def test_two_slashes_say_one() -> None:
    assert chat("//help\n").stdout == shown(*answers("/help"))


def test_undo_of_nothing_fails_where_nobody_can_mend_it() -> None:
    result = chat("/undo\nHello\n")
    assert (result.exit_code, result.stdout) == (2, "")


def test_json_lines_reuse_the_turns_before() -> None:
    first, second = map(json.loads, chat("Hello\nAnd now?\n", "--json", "--stats").stdout.splitlines())
    assert [first["text"], second["text"]] == answers("Hello", "And now?")
    assert second["usage"]["cached_tokens"] >= first["usage"]["prompt_tokens"]


def test_ngrams_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "table"
    chat("Hello\n", "--ngrams", str(path))
    assert path.stat().st_size > 0


def test_options_are_checked_at_once() -> None:
    assert chat("Hello\n", "--temperature", "-1").exit_code == 2


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_on_a_terminal() -> None:
    import pty

    ours, theirs = pty.openpty()
    code = "from specrun.cli.main import main; main()"
    arguments = ["chat", "--model", "tiny", "--max-tokens", "15000", "--min-tokens", "15000"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE + code, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def wait_for(text: bytes, seconds: float = 20) -> None:
        nonlocal seen
        end = time.monotonic() + seconds
        while text not in seen:
            ready, _, _ = select.select([ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{text!r} did not come, but {seen!r}"
            seen += os.read(ours, 65536)
        seen = seen[seen.index(text) + len(text) :]

    try:
        wait_for(b"> ")
        time.sleep(0.3)  # a signal between the prompt and the wait for keys is seen with the next key only
        process.send_signal(signal.SIGINT)
        wait_for(b"Ctrl-D leaves")
        wait_for(b"> ")
        os.write(ours, b"Hello\n")
        wait_for(b"Hello\r\n")
        wait_for(b"w2")  # some of the answer
        process.send_signal(signal.SIGINT)
        wait_for(b"> ")
        os.write(ours, b"/undo\n")
        wait_for(b"taken back")
        os.write(ours, b"/undo\n")
        wait_for(b"Error: ")
        wait_for(b"> ")
        os.write(ours, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
