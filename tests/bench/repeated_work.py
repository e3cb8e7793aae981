"""Tokens a target run where requests return: the same prompts again, and with a word left out.

python tests/bench/repeated_work.py --prompts spec_bench.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from specrun.runtime import Engine
from specrun.runtime.bench import load_prompts


def without_middle_word(text: str) -> str:
    """An edited request."""
    words = text.split(" ")
    del words[len(words) // 2]
    return " ".join(words)


PASSES: dict[str, Callable[[str], str]] = {
    "first": lambda text: text,
    "a word left out": without_middle_word,
    "the first again": lambda text: text,
}


def main() -> None:
    """Print a line for each pass: tokens, target runs, MAT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL as for specrun bench")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--limit", type=int, default=20, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--draft-length", type=int, help="K; by default as many as pay")
    given = parser.parse_args()
    texts = [entry.prompt for entry in load_prompts(given.prompts) if isinstance(entry.prompt, str)]
    texts = [texts[index * len(texts) // given.limit] for index in range(given.limit)]
    with Engine.load(given.model) as engine:
        for name, edit in PASSES.items():
            tokens = rounds = 0
            for text in texts:
                result = engine.generate(
                    edit(text), method=given.method, draft_length=given.draft_length, max_tokens=given.max_tokens
                )
                tokens += result.usage.completion_tokens - 1
                rounds += result.speculation.rounds
            print(f"{name:16} {tokens:6} tokens {rounds:6} runs  MAT {tokens / rounds:.2f}")


if __name__ == "__main__":
    main()
