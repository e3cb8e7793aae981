"""One pool of threads for all sessions of a process: same text, no threads of their own, one number of them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from specrun.runtime import Engine

PROMPT = "one two three four"


def run(code: str) -> Any:
    """What a process of its own prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_text_is_that_of_threads_of_ones_own(tiny: str) -> None:
    shared = run(
        "import json, os\n"
        "from specrun.runtime import Engine, share_threads\n"
        "share_threads()\n"
        f"engine = Engine.load({tiny!r}, threads=2)\n"
        "before = len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 0\n"
        f"other = Engine.load({tiny!r}, threads=2)\n"
        "after = len(os.listdir('/proc/self/task')) if os.path.isdir('/proc/self/task') else 0\n"
        f"texts = [one.generate({PROMPT!r}, max_tokens=24).token_ids for one in (engine, other)]\n"
        "print(json.dumps([texts, after - before]))"
    )
    with Engine.load(tiny, threads=2) as engine:
        own = list(engine.generate(PROMPT, max_tokens=24).token_ids)
    assert shared == [[own, own], 0]


def test_another_number_of_threads_is_refused(tiny: str) -> None:
    said = run(
        "import json\n"
        "from specrun.runtime import Engine, share_threads\n"
        "from specrun.models_cache.errors import BackendError\n"
        "share_threads()\n"
        f"engine = Engine.load({tiny!r}, threads=2)\n"
        "try:\n"
        f"    Engine.load({tiny!r}, threads=1)\n"
        "except BackendError as error:\n"
        "    print(json.dumps(str(error)))"
    )
    assert said == "This process shares 2 threads: an engine with 1 has no place in it."
