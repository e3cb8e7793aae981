"""OpenVINO GenAI: greedy runs of a GGUF file, plain or with its prompt lookup."""

from __future__ import annotations

import functools
import sys

import numpy as np
import openvino as ov
import openvino_genai as ov_genai
from protocol import Answer, generation, serve_peer

NGRAM_SIZE = 3


def main(path: str, threads: str, context: str) -> None:
    @functools.cache
    def pipeline(lookup: bool) -> ov_genai.LLMPipeline:
        options = {"prompt_lookup": True} if lookup else {}
        return ov_genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=int(threads), **options)

    def about() -> Answer:
        return {"version": f"openvino-genai {ov_genai.__version__.split('-')[0]}"}

    def run(method: str, prompt_ids: list[int], max_tokens: int, draft_length: int) -> Answer:
        config = ov_genai.GenerationConfig()
        config.do_sample = False
        config.ignore_eos = True
        config.max_new_tokens = max_tokens
        if method == "lookup":
            config.num_assistant_tokens = draft_length
            config.max_ngram_size = NGRAM_SIZE
        ids = np.array([prompt_ids], np.int64)
        inputs = ov_genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        result = pipeline(method == "lookup").generate(inputs, config)
        metrics = result.perf_metrics.raw_metrics  # the end of each of its steps, in ms, and how many tokens it gave
        times, counts = metrics.m_new_token_times, metrics.m_batch_sizes
        return generation(list(result.tokens[0]), (times[-1] - times[0]) / 1e3, counts[0])

    serve_peer(about, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
