"""Self-written dialogues: what is stored is what was run, and answers are marked as such."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.export.bundle import export_bundle
from specrun.export.training.dialogue_form import DialogueForm, dialogue_form
from specrun.export.training.self_text import MAX_ANSWER, MAX_DIALOGUE, Dialogue, SelfWriter
from specrun.models_cache.errors import UsageError
from specrun.models_cache.layout import Bundle
from specrun.runtime.session import ModelSession, WidthRule, session_opener
from specrun.runtime.tokenizer import Tokenizer

from ...conftest import write_tiny_source

END = 257  # <|end|>


def session_of(bundle: Bundle, rows: int) -> ModelSession:
    return session_opener(bundle, 1)(rows, WidthRule(padded=False))


def writer_of(bundle: Bundle, rows: int = 8, form: DialogueForm | None = None, **options: Any) -> SelfWriter:
    tokenizer = Tokenizer.from_bundle(bundle)
    return SelfWriter(
        session_of(bundle, rows), tokenizer, form or dialogue_form(tokenizer), **({"seed": [1, 0]} | options)
    )


@pytest.fixture(scope="module")
def written(tiny_fp32: Bundle) -> list[Dialogue]:
    return list(itertools.islice(writer_of(tiny_fp32).dialogues(), 40))


def places_of(part: Sequence[int], tokens: Sequence[int]) -> list[int]:
    return [at for at in range(len(tokens)) if tuple(tokens[at : at + len(part)]) == tuple(part)]


def test_features_and_tokens_belong_together(tiny_fp32: Bundle, written: list[Dialogue]) -> None:
    """As a plain run over the whole dialogue gives them."""
    session = session_of(tiny_fp32, 1)
    greedy = 0
    for dialogue in written[:12]:
        session.rewind_to(0)
        tokens = dialogue.tokens.tolist()
        features, best = [], []
        for at in range(0, len(tokens), 200):
            part = tokens[at : at + 200]
            logits = session.run_batch([part], rows=len(part))[0]
            best += logits[:, : session.sizes.tokens].argmax(-1).tolist()
            features.append(session.features.copy())
        np.testing.assert_allclose(dialogue.features, np.concatenate(features), atol=2e-3, rtol=2e-3)
        answers = [at for at in range(1, len(tokens)) if dialogue.answer[at]]
        if answers and all(best[at - 1] == tokens[at] for at in answers):
            greedy += 1
    assert greedy >= 3  # about 60 % are; that the others are sampled needs no more than this


def test_answers_are_marked(tiny_fp32: Bundle, written: list[Dialogue]) -> None:
    form = dialogue_form(Tokenizer.from_bundle(tiny_fp32))
    assert form.ends == {END}
    assert form.turning is not None
    turns = 0
    for dialogue in written:
        tokens = dialogue.tokens.tolist()
        assert tuple(tokens[: len(form.opening)]) == form.opening
        expected = np.zeros(len(tokens), bool)
        for at in places_of(form.asking, tokens):
            start = at + len(form.asking)
            end = tokens.index(END, start) + 1 if END in tokens[start:] else len(tokens)
            assert end - start <= MAX_ANSWER + 1
            expected[start:end] = True
            turns += 1
        np.testing.assert_array_equal(dialogue.answer, expected)
        assert tokens[-1] != END
    assert turns > len(written)  # some have a second


def test_lengths_and_numbers(tiny_fp32: Bundle, written: list[Dialogue]) -> None:
    assert all(len(dialogue.tokens) < MAX_DIALOGUE + 60 for dialogue in written)
    again = list(itertools.islice(writer_of(tiny_fp32).dialogues(), 5))
    for old, new in zip(written, again, strict=False):
        np.testing.assert_array_equal(old.tokens, new.tokens)
    others = {dialogue.tokens.tobytes() for dialogue in itertools.islice(writer_of(tiny_fp32, start=50).dialogues(), 5)}
    assert not others & {dialogue.tokens.tobytes() for dialogue in written}


@pytest.mark.parametrize("context", [24, 64])
def test_a_short_context(tmp_path: Path, context: int) -> None:
    bundle = export_bundle(str(write_tiny_source(tmp_path / "short", context=context)), precision="fp32")
    for dialogue in itertools.islice(writer_of(bundle).dialogues(), 40):
        assert 0 < len(dialogue.tokens) < context
        assert len(dialogue.features) == len(dialogue.answer) == len(dialogue.tokens)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_every_prompt_is_answered_once(tiny_fp32: Bundle, rows: int) -> None:
    prompts = [[256, 84, 40 + index, *range(10, 10 + index)] for index in range(5)]
    found = list(writer_of(tiny_fp32, rows, prompts=prompts).dialogues())
    assert len(found) == 5
    for prompt in prompts:
        (dialogue,) = [d for d in found if d.tokens[: len(prompt)].tolist() == prompt]
        assert not dialogue.answer[: len(prompt)].any()
        assert dialogue.answer[len(prompt) :].all()
        assert 0 < len(dialogue.tokens) - len(prompt) <= MAX_ANSWER
        assert len(dialogue.features) == len(dialogue.tokens)


def with_template(bundle: Bundle, template: str | None, folder: Path) -> Tokenizer:
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((bundle.path / "tokenizer.json").read_bytes())
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    manifest = bundle.manifest
    return Tokenizer.from_folder(folder, manifest.special_ids, manifest.sizes.tokens)


def test_no_chat_template(tiny_fp32: Bundle, tmp_path: Path) -> None:
    """Plain text that begins with any token; all that the target adds counts as its answer."""
    form = dialogue_form(with_template(tiny_fp32, None, tmp_path / "tokenizer"))
    assert form == DialogueForm((), (), None, frozenset({END}))
    found = list(itertools.islice(writer_of(tiny_fp32, form=form).dialogues(), 12))
    assert len({int(dialogue.tokens[0]) for dialogue in found}) > 4
    for dialogue in found:
        assert not dialogue.answer[0]
        assert dialogue.answer[1:].all()
        assert len(dialogue.tokens) <= MAX_DIALOGUE


CLOSED = (
    "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>{% endif %}"
)
CHANGED = CLOSED.replace("m['content']", "m['content'] | trim | upper if m['role'] == 'assistant' else m['content']")


def test_a_turn_that_only_the_answers_end_separates(tiny_fp32: Bundle, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}<|start|>{% else %}"
        "{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    form = dialogue_form(with_template(tiny_fp32, template, tmp_path / "tokenizer"))
    assert form == DialogueForm((), (256,), (), frozenset({END}))
    found = list(itertools.islice(writer_of(tiny_fp32, form=form).dialogues(), 60))
    assert any(END in dialogue.tokens for dialogue in found)  # a second turn came


def test_a_template_that_cannot_be_cut(tiny_fp32: Bundle, tmp_path: Path) -> None:
    form = dialogue_form(with_template(tiny_fp32, CHANGED, tmp_path / "tokenizer"))
    assert form.turning is None
    assert form.asking == (END, 256)
    found = list(itertools.islice(writer_of(tiny_fp32, form=form).dialogues(), 30))
    assert all(len(places_of(form.asking, dialogue.tokens.tolist())) == 1 for dialogue in found)


@pytest.mark.parametrize("template", ["<|start|>", "{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}"])
def test_a_template_without_the_users_text(tiny_fp32: Bundle, tmp_path: Path, template: str) -> None:
    with pytest.raises(UsageError, match="does not show the user's text once: give prompts with --prompts"):
        dialogue_form(with_template(tiny_fp32, template, tmp_path / "tokenizer"))
