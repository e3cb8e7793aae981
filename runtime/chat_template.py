"""Conversations to token ids, with the chat template that came with the model."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
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
        self._controls = _ControlTokens(tokenizer)
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
        text, and so does text in lists and dicts of `variables` (`tools`); a message's `role` and `type` and plain
        strings of `variables` are the template's business. The text starts with one BOS where the model wants it,
        whether the template writes it or not.

        Raises UsageError as `render` does.
        """
        variables = variables or {}
        sentinel = _unused_character([self._tokenizer.chat_template or "", *_strings(messages), *_strings(variables)])
        guarded = [self._controls.broken(dict(message), sentinel) for message in messages]
        data = {
            key: value if isinstance(value, str) else self._controls.broken(value, sentinel)
            for key, value in variables.items()
        }
        text = self.render(guarded, add_generation_prompt=add_generation_prompt, variables=data)
        if sentinel not in text:
            return self._tokenizer.encode(text, parse_special=True)
        return self._tokenizer.encode_parts(self._controls.parts(text, sentinel))


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


class _ControlTokens:
    """The control tokens of a tokenizer, and how to keep those of the template and those in the messages apart.

    Before rendering, control tokens that are spelt in messages are broken with a sentinel character, and so is the
    beginning of one at the end of a text: neither the template nor the next message must complete it. What is whole in
    the rendered text comes from the template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._added = tokenizer.added_tokens
        spelt = {tokenizer.token_text(token_id): token_id for token_id in tokenizer.control_ids}
        spelt.pop("", None)
        self._ids = spelt
        longest_first = sorted(spelt, key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # else: matches nothing
        self._beginnings = tuple({text[:length] for text in spelt for length in range(1, len(text))})

    def broken(self, value: Any, sentinel: str) -> Any:
        """`value` (a message, or a part of one) with all texts in it broken where they spell a control token."""
        if isinstance(value, str):
            text = self._whole.sub(lambda match: match[0][0] + sentinel + match[0][1:], value)
            tail = text.rstrip()
            return tail + sentinel + text[len(tail) :] if tail.endswith(self._beginnings) else text
        if isinstance(value, Mapping):
            return {key: item if key in _STRUCTURE else self.broken(item, sentinel) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(item, sentinel) for item in value]
        return value

    def parts(self, text: str, sentinel: str) -> Iterator[str | int]:
        """Ordinary runs of a rendered text without their sentinels, and the control tokens between them."""
        at = 0
        strip_next = False
        for match in self._whole.finditer(text):
            token_id = self._ids[match[0]]
            token = self._added[token_id]
            run = text[at : match.start()].replace(sentinel, "")
            run = run.lstrip() if strip_next else run
            run = run.rstrip() if token.lstrip else run
            if run:
                yield run
            yield token_id
            at, strip_next = match.end(), token.rstrip
        run = text[at:].replace(sentinel, "")
        run = run.lstrip() if strip_next else run
        if run:
            yield run


def _unused_character(texts: Sequence[str]) -> str:
    for code in _PRIVATE_USE:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise UsageError("the messages use every private-use character: leave some out")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
