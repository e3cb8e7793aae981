"""transformers on torch: greedy runs of a model folder in fp32 or bf16, plain or with its prompt lookup."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from protocol import Answer, generation, serve_peer
from transformers import AutoModelForCausalLM


class Clock:
    """A streamer that notes when tokens come, and how many; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        return


def main(folder: str, dtype: str, threads: str, context: str) -> None:
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # texts go on past their end
    model.generation_config.pad_token_id = 0
    model.config.eos_token_id = None

    def about() -> Answer:
        return {"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}

    def run(method: str, prompt_ids: list[int], max_tokens: int, draft_length: int) -> Answer:
        ids = torch.tensor([prompt_ids])
        clock = Clock()
        options: dict[str, Any] = {"prompt_lookup_num_tokens": draft_length} if method == "lookup" else {}
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            streamer=clock,
            **options,
        )
        token_ids = output[0, len(prompt_ids) :].tolist()
        return generation(token_ids, clock.times[-1] - clock.times[1], clock.counts[1])

    serve_peer(about, run)


if __name__ == "__main__":
    main(*sys.argv[1:])
