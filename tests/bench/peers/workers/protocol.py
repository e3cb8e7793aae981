"""The loop of a worker: answers requests, one JSON object a line, and sleeps in a read between them.

Only the standard library is used, since every worker runs in an environment of its own. What a worker uses of a core
while it waits is counted, so that a spinning one shows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def generation(token_ids: list[int], decode_s: float, first: int = 1) -> Answer:
    """What a run answers. decode_s: seconds from when `first` of the tokens were there to when the last one was."""
    return {"token_ids": token_ids, "decode_s": decode_s, "first": first}


def serve_peer(about: Callable[[], Answer], run: Callable[..., Answer]) -> None:
    """Serve a peer: `run(method, prompt_ids, max_tokens, draft_length)` gives a `generation`, greedily.

    method: "plain" or a speculation of the peer. Of an end-of-text token nothing is to be made.
    """

    def next_token(prompt_ids: list[int]) -> Answer:
        return {"token_id": run("plain", prompt_ids, 1, 0)["token_ids"][0]}

    serve({"about": about, "run": run, "next": next_token})


def serve(commands: dict[str, Callable[..., Answer]]) -> None:
    """Answer requests from stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    idle_s = idle_cpu_s = 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle_s += time.perf_counter() - wall
        idle_cpu_s += time.process_time() - cpu
        request = json.loads(line)
        command = request.pop("command")
        try:
            answer = commands[command](**request)
        except Exception as error:
            answer = {"error": str(error).strip() or type(error).__name__}
        answer |= {"idle_s": idle_s, "idle_cpu_s": idle_cpu_s}
        wall, cpu = time.perf_counter(), time.process_time()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
