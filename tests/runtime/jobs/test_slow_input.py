"""Lines that come now and then: what has come is answered, whether or not more follows."""

from __future__ import annotations

import io
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from specrun.models_cache.errors import JobError
from specrun.runtime.jobs import LineStream, lines, read_lines

from ...conftest import INTERRUPTIBLE

SECONDS = 100.0


@pytest.fixture
def pipe() -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The reading and the writing end; what is written is there at once."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reading, os.fdopen(write, "wb", buffering=0) as writing:
        yield reading, writing


def eventually(done: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.002)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    code = f"{INTERRUPTIBLE}from specrun.cli.main import run; run()"
    command = [sys.executable, "-c", code, "batch", "-", "-", "--model", "tiny", "--threads", "1", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next line of a process that may not keep us waiting."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], SECONDS)[0]:
        process.kill()
        pytest.fail("no answer came")
    record: dict[str, Any] = json.loads(process.stdout.readline())
    return record


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("arguments", [(), ("--order", "completion"), ("--batch-size", "4"), ("--batch-size", "1")])
def test_whoever_waits_for_each_answer_gets_it(arguments: tuple[str, ...]) -> None:
    """A program writes a request, with a blank line behind it, and reads the answer before it writes the next one."""
    process = start("--max-tokens", "8", *arguments)
    assert process.stdin is not None
    for number in range(4):
        process.stdin.write(json.dumps({"id": number, "prompt": f"Hello {number}"}).encode() + b"\n\n")
        process.stdin.flush()
        record = answer(process)
        assert (record["custom_id"], record["error"]) == (number, None)
    said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode == 0, said
    assert b"4 lines: 4 right, 0 failed" in said


@pytest.mark.usefixtures("tiny")
def test_a_request_that_comes_later_joins_those_that_run() -> None:
    """Its short answer is there before the long one of the request that was first."""
    process = start("--order", "completion", "--batch-size", "4")
    assert process.stdin is not None
    process.stdin.write(b'{"id": "long", "prompt": "a", "max_tokens": 8000, "ignore_eos": true}\n')
    process.stdin.flush()
    time.sleep(1.0)
    process.stdin.write(b'{"id": "short", "prompt": "b", "max_tokens": 2}\n')
    process.stdin.flush()
    assert answer(process)["custom_id"] == "short"
    process.kill()
    process.communicate()


@pytest.mark.usefixtures("tiny")
def test_ctrl_c_while_nothing_comes() -> None:
    process = start("--max-tokens", "2")
    assert process.stdin is not None
    process.stdin.write(b'{"prompt": "a"}\n')
    process.stdin.flush()
    answer(process)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    assert process.wait(SECONDS) == 130, said
    assert "Interrupted, 1 lines are done." in said
    assert "Traceback" not in said
    assert "Fatal" not in said
    process.communicate()


def test_lines_are_those_of_the_bytes(pipe: tuple[BinaryIO, BinaryIO]) -> None:
    """However they come in pieces."""
    reading, writing = pipe
    rng = random.Random(4)
    data = b"\xef\xbb\xbf" + b"".join(
        rng.choice((b"x" * rng.randrange(300), b"", b"  ", "é\u2028".encode())) + rng.choice((b"\n", b"\r\n"))
        for _ in range(900)
    )
    data += b"last"
    found = []
    stream = LineStream(reading, "pipe")
    got = stream.lines()
    at = 0
    while at < len(data):
        size = rng.randrange(1, 2000)
        writing.write(data[at : at + size])
        at += size
        while stream.ready():
            found.append(next(got))
        time.sleep(rng.random() * 0.002)
    writing.close()
    found += got
    assert found == list(read_lines(io.BytesIO(data)))


def test_ready_is_told_of_whole_lines_and_of_the_end(pipe: tuple[BinaryIO, BinaryIO]) -> None:
    reading, writing = pipe
    stream = LineStream(reading, "pipe")
    got = stream.lines()
    for part in (b"", b"\n\r\n  \n", b"a", b"b"):
        writing.write(part)
        time.sleep(0.05)
        assert not stream.ready()
    writing.write(b"c\nd")
    eventually(stream.ready)
    assert next(got).data == b"abc"
    assert not stream.ready()
    writing.close()
    eventually(stream.ready)
    assert next(got).data == b"d"
    assert stream.ready()
    assert list(got) == []
    assert stream.ready()


def test_an_over_long_line_does_not_fill_the_memory(
    pipe: tuple[BinaryIO, BinaryIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MOST_BYTES", 1000)
    reading, writing = pipe
    stream = LineStream(reading, "pipe")
    writing.write(b"x" * 5000)
    eventually(stream.ready)
    writing.write(b"x" * 5000 + b"\nnext\n")
    writing.close()
    assert [(line.number, line.size, len(line.data)) for line in stream.lines()] == [(1, 10_000, 1002), (2, 4, 4)]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)  # a folder
    with os.fdopen(os.dup(os.open(os.devnull, os.O_RDONLY)), "rb") as stream:
        os.dup2(handle, stream.fileno())
        source = LineStream(stream, "stdin")
        with pytest.raises(JobError, match=r"stdin cannot be read \(Is a directory\)"):
            list(source.lines())
    os.close(handle)


@pytest.mark.skipif(os.name == "nt", reason="limits of file sizes are those of Unix")
def test_a_stream_that_has_no_room_is_said(tmp_path: Path) -> None:
    """What goes to a file is kept first, so that it can be gone on with."""
    code = (
        "import io, resource\nfrom specrun.models_cache.errors import JobError\n"
        "from specrun.runtime.jobs.lines import kept\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n    with kept(io.BytesIO(b'x' * 20_000)): pass\n"
        "except JobError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "(File too large): set TMPDIR to one with room" in done.stdout
