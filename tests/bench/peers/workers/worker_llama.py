"""llama.cpp through llama-cpp-python: greedy runs of a GGUF file, plain or with its prompt lookup."""

from __future__ import annotations

import functools
import sys
import time
from itertools import islice

from llama_cpp import Llama, __version__, llama_print_system_info
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Answer, generation, serve_peer


def main(path: str, threads: str, context: str) -> None:
    @functools.cache
    def model(lookup: bool) -> Llama:
        # With a draft model it asks for all logits, so plain decoding has a model of its own; the file is shared.
        draft = LlamaPromptLookupDecoding() if lookup else None
        count = int(threads)
        return Llama(path, n_ctx=int(context), n_threads=count, n_threads_batch=count, draft_model=draft, verbose=False)

    def about() -> Answer:
        features = [part.split("=")[0].strip() for part in llama_print_system_info().decode().split("|")]
        avx = [feature for feature in features if feature.startswith("AVX")]
        return {"version": f"llama-cpp-python {__version__} ({' '.join(avx)})"}

    def run(method: str, prompt_ids: list[int], max_tokens: int, draft_length: int) -> Answer:
        llama = model(method == "lookup")
        if method == "lookup":
            llama.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=draft_length)
        llama.reset()  # nothing of earlier prompts is kept
        tokens = islice(llama.generate(prompt_ids, temp=0.0), max_tokens)  # it goes on past an end of text
        token_ids = [next(tokens)]
        start = time.perf_counter()
        token_ids += tokens
        return generation([int(token) for token in token_ids], time.perf_counter() - start)

    serve_peer(about, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
