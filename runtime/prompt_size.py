"""Prompts that no context could hold are refused before they become tokens, which takes 500 bytes of memory a byte."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from specrun.models_cache.errors import ContextLengthError
from specrun.runtime.tokenizer import Tokenizer

AT_ONCE: Final = 1 << 20
"""Characters that are made tokens in any case, so that the error can tell their number."""


_LONG_TOKEN: Final = 32  # characters


def require_possible(
    prompt: str | Iterable[Mapping[str, object]], system: object, tokenizer: Tokenizer, context: int
) -> None:
    """Raise ContextLengthError where a prompt has more characters than `context` tokens of the longest kind.

    What is no text in it is left to whoever reads it.
    """
    texts = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    characters = sum(len(text) for text in (*texts, system) if isinstance(text, str))
    if characters <= AT_ONCE:
        return
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.tokens))
    if characters > context * max(1, longest):
        raise ContextLengthError(
            f"The prompt has {characters} characters, more than the {context} tokens of the context can hold: "
            "shorten it."
        )


def beginning(text: str, context: int) -> str:
    """As much of a text as `context` tokens need, unless they are uncommonly long."""
    return text[: context * _LONG_TOKEN]
