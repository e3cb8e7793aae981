"""An engine and os.fork: the child gets one clear error, never a hang; the parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .conftest import TinyModels

PROGRAM = """
import gc, os, sys, threading, time, warnings
warnings.simplefilter("ignore")  # Python 3.12 and newer warn of every fork with threads
from specrun.models_cache.errors import SpecrunError
from specrun.runtime import Engine

engine = Engine.load(sys.argv[1], threads=2)
expected = engine.generate("hello", max_tokens=8).text
chat = engine.chat()
half = engine.stream("hello", max_tokens=8)
next(half)  # holds the engine while forking
held = threading.Thread(target=lambda: engine.generate("x", max_tokens=1))
held.start()


def child():
    def refused(use):
        try:
            use()
        except SpecrunError as error:
            return "forked from" in str(error)
        return False

    uses = {
        "generate": lambda: engine.generate("hello", max_tokens=2),
        "stream": lambda: engine.stream("hello"),
        "astream": lambda: engine.astream("hello"),
        "chat": lambda: list(chat.send("hello")),
        "half": lambda: next(half),
        "logits": lambda: engine.logits([5]),
        "reset": engine.reset,
        "encode": lambda: engine.encode("hello"),
    }
    for name, use in uses.items():
        if not refused(use):
            return name
    engine.close()
    own = Engine.load(sys.argv[1], threads=2)
    if own.generate("hello", max_tokens=8).text != expected:
        return "own"
    own.close()
    return ""


pid = os.fork()
if pid == 0:
    failed = child()
    for name in ("engine", "chat", "half"):
        globals().pop(name)
    gc.collect()
    os.write(1, ("failed: " + failed if failed else "child done ").encode())
    os._exit(1 if failed else 0)
deadline = time.monotonic() + 60
while os.waitpid(pid, os.WNOHANG) == (0, 0):
    if time.monotonic() > deadline:
        os.kill(pid, 9)
        sys.exit("the child hangs")
    time.sleep(0.05)
text = half.result.text if half.done else "".join(piece.text for piece in half)
half.close()
held.join(30)
assert engine.generate("hello", max_tokens=8).text == expected
engine.close()
print("parent done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
def test_a_forked_child_is_refused(models: TinyModels) -> None:
    """Every way to use it, a stream that was open and a lock that was held while forking included."""
    path = str(models.bundle("tgt").path)
    done = subprocess.run([sys.executable, "-c", PROGRAM, path], capture_output=True, text=True, timeout=120)
    assert done.stdout == "child done parent done\n", done.stderr
    assert done.returncode == 0
