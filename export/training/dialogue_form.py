"""The parts of a model's chat template between which dialogues are written token by token."""

from __future__ import annotations

from dataclasses import dataclass

from specrun.models_cache.errors import UsageError
from specrun.runtime.chat_template import ChatTemplate
from specrun.runtime.tokenizer import Tokenizer

_MARKS = ("AlphaMarkOne", "BetaMarkTwo", "GammaMarkThree")


@dataclass(frozen=True, slots=True)
class DialogueForm:
    """Token ids around the turns: opening USER asking ANSWER turning USER asking ANSWER ...

    opening  before the first user turn; asking: between a user turn and its answer; turning: between an answer and the
             next user turn, None where the template cannot be cut so
    ends     ids that end an answer
    """

    opening: tuple[int, ...]
    asking: tuple[int, ...]
    turning: tuple[int, ...] | None
    ends: frozenset[int]


def dialogue_form(tokenizer: Tokenizer) -> DialogueForm:
    """Cut the chat template at the texts of the turns; without a template a dialogue is plain text without turns.

    Raises UsageError where the template fails on a plain conversation.
    """
    ends = frozenset(tokenizer.special_ids.eos)
    if tokenizer.chat_template is None:
        return DialogueForm(tuple(tokenizer.encode("")), (), None, ends)
    template = ChatTemplate(tokenizer)
    first, second, third = _MARKS
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": second},
        {"role": "user", "content": third},
    ]
    one, three = template.render(turns[:1]), template.render(turns)
    if one.count(first) != 1:
        raise UsageError("the chat template does not show the user's text once: give prompts with --prompts")
    opening, asking = one.split(first)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_bos=False, parse_special=True))

    turning = None
    if three.startswith(one + second) and three.endswith(third + asking):
        turning = ids(three[len(one + second) : len(three) - len(third + asking)])
        # The answer's own end-of-text id is written by the target.
        turning = turning[1:] if turning and turning[0] in ends else None
    return DialogueForm(tuple(tokenizer.encode(opening, parse_special=True)), ids(asking), turning, ends)
