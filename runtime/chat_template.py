"""Conversations to token ids, with the chat template that came with the model."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from specrun.models_cache.errors import UsageError
from specrun.runtime.tokenizer import Tokenizer

# Fields of a message that the template turns into structure, not into text that a user wrote.
_STRUCTURE = frozenset({"role", "type"})
_PRIVATE_USE = range(0xE000, 0xF900)


Message = Mapping[str, Any]
"""One turn of a conversation: {"role": ..., "content": ...}, and whatever else the template understands."""


class ChatTemplate:
    """The chat template of a tokenizer (Jinja, in a sandbox with bounds on time and memory). Safe for several threads.

    Raises UsageError where the model has none, or one that is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise UsageError("the model has no chat template: give the prompt as raw text")
        # Jinja takes longer to import than to render: whoever needs no chat does not pay for it.
        from specrun.runtime import chat_template_sandbox as sandbox

        self._tokenizer = tokenizer
        self._specials = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.control_ids}
        self._sandbox = sandbox
        self._environment = sandbox.SandboxedEnvironment()
        self._lock = threading.Lock()
        try:
            self._template = self._environment.from_string(tokenizer.chat_template)
        except Exception as error:
            raise UsageError(
                f"the model's chat template is not valid ({error}): give the prompt as raw text"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text. `variables` are further names that the template sees (`tools`, ...).

        Raises UsageError where the template refuses the conversation (with its own message), fails on it, or takes too
        much time or memory.
        """
        values: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        values |= _token_names(self._tokenizer) | dict(variables or {})
        try:
            with self._lock:
                return self._environment.render(self._template, values)
        except self._sandbox.TemplateRefusal as error:
            raise UsageError(f"the model's chat template refuses the conversation: {error}") from error
        except self._sandbox.TemplateTooCostly as error:
            raise UsageError(f"the model's chat template is stopped, {error}: give the prompt as raw text") from error
        except Exception as error:  # whatever a template's expressions can raise
            raise UsageError(
                f"the model's chat template fails on the conversation ({error}): "
                "check the roles and contents, or give the prompt as raw text"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Control tokens come from the template alone. Text in the messages that spells one ("<|im_end|>") stays ordinary
        text; only a message's `role` and `type` are the template's business. The text starts with one BOS where the
        model wants it, whether the template writes it or not.

        Raises UsageError as `render` does.
        """
        source = self._tokenizer.chat_template or ""
        guard = _ContentGuard(self._specials, source, messages)
        text = self.render(guard.messages(messages), add_generation_prompt=add_generation_prompt, variables=variables)
        if not guard.used:
            return self._tokenizer.encode(text, parse_special=True)
        return self._tokenizer.encode_parts(_parts(self._tokenizer, self._specials, text, guard.sentinel))


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """`ChatTemplate(tokenizer).encode_chat(...)`, for a single conversation."""
    return ChatTemplate(tokenizer).encode_chat(
        messages, add_generation_prompt=add_generation_prompt, variables=variables
    )


def _token_names(tokenizer: Tokenizer) -> dict[str, str]:
    ids = tokenizer.special_ids
    named = {"bos_token": ids.bos, "eos_token": ids.eos[0] if ids.eos else None, "pad_token": ids.pad}
    return {name: "" if token_id is None else tokenizer.token_text(token_id) for name, token_id in named.items()}


class _ContentGuard:
    """Breaks control tokens that are spelt in messages with a sentinel character, so that rendering keeps them apart.

    A text that ends with the beginning of a control token is broken there too: the template, or the next message,
    must not complete it.
    """

    def __init__(self, specials: Mapping[str, int], source: str, messages: Sequence[Message]) -> None:
        present = {character for text in (source, *_strings(messages)) for character in text if character >= "\ue000"}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in present)
        try:
            self.sentinel = next(free)
        except StopIteration:
            raise UsageError("the messages use every private-use character: leave some out") from None
        self.used = False
        spelt = [text for text in specials if text]
        self._whole = _alternatives(spelt)
        beginnings = {text[:length] for text in spelt for length in range(1, len(text))}
        self._beginning = re.compile(f"(?:{_alternatives(beginnings).pattern})\\Z")
        self._reach = max(map(len, beginnings), default=0)

    def messages(self, messages: Sequence[Message]) -> list[Any]:
        return [self._value(dict(message)) for message in messages]

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            return {key: item if key in _STRUCTURE else self._value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(item) for item in value]
        return value

    def _text(self, text: str) -> str:
        broken = self._whole.sub(lambda match: match[0][0] + self.sentinel + match[0][1:], text)
        tail = broken.rstrip()
        if self._beginning.search(tail, max(0, len(tail) - self._reach)):
            broken = tail + self.sentinel + broken[len(tail) :]
        self.used |= broken != text
        return broken


def _alternatives(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first; nothing at all where there are none."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _parts(tokenizer: Tokenizer, specials: Mapping[str, int], text: str, sentinel: str) -> Iterator[str | int]:
    """Ordinary runs without their sentinels, and the control tokens between them."""
    at = 0
    strip_next = False
    for match in _alternatives(text_of for text_of in specials if text_of).finditer(text):
        token_id = specials[match[0]]
        run = text[at : match.start()]
        added = tokenizer.added_tokens[token_id]
        run = run.lstrip() if strip_next else run
        run = run.rstrip() if added.lstrip else run
        if run:
            yield run.replace(sentinel, "")
        yield token_id
        at, strip_next = match.end(), added.rstrip
    run = text[at:].lstrip() if strip_next else text[at:]
    if run:
        yield run.replace(sentinel, "")
