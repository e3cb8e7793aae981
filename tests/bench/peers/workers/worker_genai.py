"""onnxruntime-genai: greedy runs of one of its model folders, plain or with its n-gram speculation."""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import onnxruntime_genai as og
from protocol import Answer, generation, serve_peer

NGRAM_SIZE = 3


def main(folder: str, threads: str, context: str) -> None:
    with open(f"{folder}/genai_config.json", encoding="utf-8") as file:
        vocabulary = int(json.load(file)["model"]["vocab_size"])
    config = og.Config(folder)
    # Texts go on past their end: an id that hardly ever comes stands for the end. All other settings are its own.
    changes = {
        "model": {
            "eos_token_id": vocabulary - 1,
            "decoder": {"session_options": {"intra_op_num_threads": int(threads)}},
        }
    }
    config.overlay(json.dumps(changes))
    model = og.Model(config)

    def about() -> Answer:
        return {"version": f"onnxruntime-genai {version('onnxruntime-genai')}, onnxruntime {version('onnxruntime')}"}

    def run(method: str, prompt_ids: list[int], max_tokens: int, draft_length: int) -> Answer:
        params = og.GeneratorParams(model)
        params.set_search_options(do_sample=False, batch_size=1, max_length=len(prompt_ids) + max_tokens)
        if method == "ngram":
            params.set_speculative_options(max_draft_tokens=draft_length, ngram_size=NGRAM_SIZE)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array(prompt_ids, np.int32))
        generator.generate_next_token()  # picks from the logits of the prefill
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        decode_s = time.perf_counter() - start
        return generation([int(token) for token in generator.get_sequence(0)][len(prompt_ids) :], decode_s)

    serve_peer(about, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
