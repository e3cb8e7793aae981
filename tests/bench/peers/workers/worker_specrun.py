"""The specrun side: greedy runs of one bundle, by any of its methods or as the inexact, unpadded "baseline"."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from protocol import Answer, generation, serve

from specrun.models_cache import load_bundle
from specrun.runtime import Engine, share_threads
from specrun.runtime.backend import onnxruntime
from specrun.runtime.engine import Prompt
from specrun.runtime.session import WidthRule


def main(folder: str, threads: str) -> None:
    share_threads()  # as the specrun command does
    engine = Engine(load_bundle(Path(folder)), threads=int(threads))

    def about() -> Answer:
        return {"version": f"onnxruntime {onnxruntime().__version__}, exactness {engine.calibration.exactness}"}

    def encode(prompt: Prompt) -> Answer:
        return {"prompt_ids": engine.encode(prompt), "context": engine.context}

    def run(method: str, prompt: Prompt, prompt_ids: list[int], max_tokens: int, draft_length: int) -> Answer:
        engine.reset()
        rule = engine.target.width_rule
        if method == "baseline":
            method = "none"
            engine.target.width_rule = WidthRule(padded=False, exact=False)
        try:
            stream = engine.stream(
                prompt, method=method, draft_length=draft_length or None, max_tokens=max_tokens, ignore_eos=True
            )
            if stream.prompt_tokens != prompt_ids:
                raise ValueError("the prompt has other token ids than before")
            for _ in stream:
                continue
        finally:
            engine.target.width_rule = rule
        result = stream.result
        return generation(list(result.token_ids), result.timings.decode_s)

    def next_token(prompt_ids: list[int]) -> Answer:
        return {"token_id": int(np.argmax(engine.logits(prompt_ids)))}

    serve({"about": about, "encode": encode, "run": run, "next": next_token})


if __name__ == "__main__":
    main(*sys.argv[1:])
