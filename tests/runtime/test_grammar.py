"""Constrained text: masks follow the text forth and back, and no method changes what comes out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime import Engine
from specrun.runtime.chooser import Chooser
from specrun.runtime.grammar import KEPT, MOST_BYTES, Constraint, Matcher, constraint_of, response_format_options
from specrun.runtime.options import GenerationOptions, SamplingOptions
from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import distribution, greedy_tokens

from .checks import read, same_output
from .conftest import TinyModels
from .tiny_bundles import PROMPT, token_id
from .tree_proposers import SHAPES, TreeProposer, proposing

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LIST = 'start: item ("," " " item)*\nitem: /[a-z]{1,6}/ | "(" start ")"'
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": PERSON},
    "regex": {"regex": r"(the|and|ring) ([a-f]{2,5} ){3,9}end\."},
    "grammar": {"grammar": LIST},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 2, "top_k": 7, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
}


def fits(kind: str, text: str) -> bool:
    """Whether a whole text fits the constraint of that name."""
    if kind == "regex":
        return re.fullmatch(CONSTRAINTS["regex"]["regex"], text) is not None
    if kind == "grammar":
        return re.fullmatch(r"[a-z(][a-z(), ]*", text) is not None and text.count("(") == text.count(")")
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 12
        and isinstance(found["age"], int)
        and 0 <= found["age"] <= 150
        and 1 <= len(found["tags"]) <= 3
        and {*found["tags"]} <= {"red", "green"}
    )


def matcher(engine: Engine, **options: Any) -> Matcher:
    made = engine.grammars.matcher(constraint_of(options))
    assert made is not None
    return made


def spell(engine: Engine, mask: np.ndarray) -> set[str]:
    return {engine.tokenizer.token_text(int(token)) for token in np.flatnonzero(mask)}


# Masks


def test_masks_follow_the_text(models: TinyModels) -> None:
    engine = models.engine("tgt")
    state = matcher(engine, regex="(ab|ac)d?")
    a, b, c, d = (token_id(letter) for letter in "abcd")
    ends = set(engine.tokenizer.special_ids.eos)

    def ids(*drafts: int) -> set[int]:
        mask = state.allowed(drafts)
        assert mask is not None
        assert mask.dtype == np.bool_
        assert mask.shape == (engine.tokenizer.tokens,)
        return set(np.flatnonzero(mask).tolist())

    assert ids() == {a}
    assert ids(a) == {b, c}
    assert ids(a, b) == {d} | ends
    assert ids(a, c, d) == ends
    assert ids(a) == {b, c}
    assert state.allowed([b]) is None  # not of the grammar
    assert state.allowed([a, b, min(ends)]) is None  # the text has ended
    assert ids(a, b) == {d} | ends
    state.commit([a])
    assert ids() == {b, c}
    assert ids(c) == {d} | ends
    assert len(state) == 1


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_masks_after_any_detour_are_those_of_a_fresh_matcher(
    models: TinyModels, kind: str, rng: np.random.Generator
) -> None:
    """Random walks through drafts that are taken back, forbidden ones and ends of text included."""
    engine = models.engine("tgt")
    constraint = constraint_of(CONSTRAINTS[kind])
    tokens = engine.tokenizer.tokens
    for _ in range(6):
        state = matcher(engine, **CONSTRAINTS[kind])
        committed: list[int] = []
        for _ in range(25):
            for _ in range(int(rng.integers(0, 4))):  # detours
                drafts: list[int] = []
                for _ in range(int(rng.integers(0, 6))):
                    mask = state.allowed(drafts)
                    if mask is None or rng.random() < 0.1:
                        drafts.append(int(rng.integers(tokens)))
                    else:
                        drafts.append(int(rng.choice(np.flatnonzero(mask))))
                state.allowed(drafts)
            fresh = engine.grammars.matcher(constraint)
            assert fresh is not None
            fresh.commit(committed)
            ours, theirs = state.allowed(), fresh.allowed()
            assert ours is not None
            assert theirs is not None
            assert np.array_equal(ours, theirs)
            token = int(rng.choice(np.flatnonzero(ours)))
            if token in engine.tokenizer.special_ids.eos:
                break
            committed.append(token)
            state.commit([token])


def test_a_mask_is_part_of_the_distribution() -> None:
    logits = np.array([5.0, 4.0, 3.0, 2.0, 1.0, 9.0], np.float32)
    allowed = np.array([False, True, False, True, True])
    assert greedy_tokens(logits[None], 5, allowed=allowed).tolist() == [1]
    for options in (SamplingOptions(temperature=1.0), SamplingOptions(temperature=1.0, top_k=4, top_p=0.999)):
        p = distribution(logits, None, options, tokens=5, allowed=allowed)
        assert p.ids.tolist() == [1, 3, 4]
        assert p.probs == pytest.approx(np.exp([4.0, 2.0, 1.0]) / np.exp([4.0, 2.0, 1.0]).sum())
    only = distribution(logits, None, SamplingOptions(temperature=1.0, top_k=1), tokens=5, allowed=allowed)
    assert only.ids.tolist() == [1]
    assert logits[0] == 5.0
    with pytest.raises(UsageError, match="No token is left"):
        distribution(logits, None, SamplingOptions(), tokens=5, allowed=np.zeros(5, np.bool_))


# Texts


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_no_method_changes_a_text(models: TinyModels, kind: str, sampling: str) -> None:
    """Every proposer, several K: equal to plain; what ended by itself fits."""
    heads, drafts = models.engine("heads"), models.engine("tgt", "mix")
    options = {**CONSTRAINTS[kind], **SAMPLING[sampling], "raw": True, "max_tokens": 90}
    plain = heads.generate(PROMPT, method="none", **options)
    assert plain.finish_reason == "length" or fits(kind, plain.text)
    accepted = 0
    for engine, method, draft_length in (
        (heads, "ngram", 3),
        (heads, "lookahead", None),
        (heads, "eagle", 4),
        (heads, "eagle+ngram", None),
        (heads, "medusa", 3),
        (drafts, "draft", 4),
        (drafts, "draft+ngram", None),
    ):
        _, result = read(engine.stream(PROMPT, method=method, draft_length=draft_length, **options))
        same_output(result, plain)
        accepted += result.speculation.accepted
    assert accepted


def test_texts_end_and_fit(models: TinyModels) -> None:
    """Random weights, many seeds: whatever ended by itself fits, with every kind."""
    engine = models.engine("tgt", "self")
    for kind, options in CONSTRAINTS.items():
        ended = 0
        for seed in range(8):
            result = engine.generate(
                PROMPT, method="draft", temperature=1.0, seed=seed, max_tokens=150, raw=True, **options
            )
            ended += result.finish_reason == "stop"
            assert result.finish_reason == "length" or fits(kind, result.text), result.text
        assert ended, kind


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_the_rejection_rule_stays_in_the_grammar(models: TinyModels, kind: str) -> None:
    heads, drafts = models.engine("heads"), models.engine("tgt", "mix")
    ended = 0
    for seed in range(4):
        for engine, method in ((heads, "eagle"), (heads, "medusa"), (drafts, "draft"), (heads, "ngram")):
            result = engine.generate(
                PROMPT,
                method=method,
                draft_length=4,
                temperature=1.0,
                seed=seed,
                sampling="rejection",
                max_tokens=150,
                raw=True,
                **CONSTRAINTS[kind],
            )
            if result.finish_reason == "stop":
                ended += 1
                assert fits(kind, result.text)
            else:
                state = matcher(engine, **CONSTRAINTS[kind])
                assert state.allowed(result.token_ids) is not None
    assert ended


@pytest.mark.parametrize("margin", [1e-3, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_token_trees_and_side_branches(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, shape: str, margin: float | None
) -> None:
    """Trees around the text that plain decoding writes, on exact and inexact rows: the same text."""
    engine = models.engine("tgt")
    for kind in CONSTRAINTS:
        for sampling in ({}, {"temperature": 1.0, "seed": 4}):
            options: dict[str, Any] = {**CONSTRAINTS[kind], **sampling, "raw": True, "max_tokens": 60}
            plain = engine.generate(PROMPT, method="none", **options)
            proposer = TreeProposer(plain.token_ids, SHAPES[shape], depth=6, seed=1)
            with proposing(monkeypatch, proposer, margin):
                _, result = read(engine.stream(PROMPT, method="ngram", **options))
            same_output(result, plain)


def test_what_is_forbidden_is_never_accepted(models: TinyModels) -> None:
    """A draft of the unconstrained text, which logits favour: refused at the first forbidden token, at every place."""
    engine = models.engine("tgt")
    a, b, c = (token_id(letter) for letter in "abc")
    eos = engine.tokenizer.special_ids.eos
    rows = np.zeros((4, 288), np.float32)
    rows[:, c] = 50.0  # what the model wants
    rows[:, b] = 1.0
    for sampling in (SamplingOptions(), SamplingOptions(temperature=1.0, seed=1)):
        for drafts in ((c, c, c), (b, c, c), (b, b, c)):
            state = matcher(engine, regex="[ab]{30}")
            made = Chooser(
                GenerationOptions(sampling=sampling), prompt=[1], tokens=276, eos=eos, margin=None, grammar=state
            ).decide(Proposal(drafts, "deterministic"), rows, 1)
            assert c not in made.tokens
            assert set(made.tokens) <= {a, b}


def test_the_end_of_the_text_is_allowed_exactly_where_the_grammar_says(models: TinyModels) -> None:
    """`table-eos` wants "!" as its end of text after each letter; it comes when the text is complete, never before."""
    engine = models.engine("table")
    for method in ("none", "ngram"):
        result = engine.generate("a", method=method, regex="[a-z]{40}", raw=True, max_tokens=100)
        assert len(result.text) == 40
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] in engine.tokenizer.special_ids.eos
        assert result.usage.completion_tokens == 41
    # min_tokens holds the end off as long as the grammar goes on, and no longer.
    result = engine.generate("y", regex="[a-z]{1,8}", min_tokens=5, raw=True)
    assert 5 <= len(result.text) <= 8
    result = engine.generate("y", regex="[a-z]{3}", min_tokens=20, raw=True)
    assert len(result.text) == 3
    assert result.finish_reason == "stop"


def test_a_cancelled_constrained_text_leaves_nothing(models: TinyModels) -> None:
    engine = models.engine("tgt", "mix")
    whole = engine.generate(PROMPT, json_schema=PERSON, max_tokens=60, raw=True)
    free = engine.generate(PROMPT, max_tokens=30, raw=True)
    for count in range(0, 12, 3):
        stream = engine.stream(PROMPT, json_schema=PERSON, max_tokens=60, raw=True)
        for _ in range(count):
            next(stream)
        stream.close()
        same_output(engine.generate(PROMPT, json_schema=PERSON, max_tokens=60, raw=True), whole)
    same_output(engine.generate(PROMPT, max_tokens=30, raw=True), free)


def test_two_engines_and_many_constraints(models: TinyModels) -> None:
    """What is compiled is kept for each engine, and not for ever."""
    engines = [models.engine("tgt"), models.engine("rnd")]
    for number in range(KEPT + 3):
        texts = {engine.generate("x", regex=f"a{{{number + 1}}}", raw=True).text for engine in engines}
        assert texts == {"a" * (number + 1)}
    assert all(len(engine.grammars._compiled) == KEPT for engine in engines)


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": {"type": "nope"}}, "JSON schema cannot be used"),
        ({"json_schema": "{"}, "is not JSON"),
        ({"json_schema": "[1]"}, "is an object"),
        ({"json_schema": 5}, "is an object"),
        ({"json_schema": {"a": object()}}, "is not JSON"),
        ({"json_schema": False}, "cannot be used"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "cannot be used"),
        ({"json_schema": {"$ref": "http://127.0.0.1:1/x.json"}}, "cannot be used"),
        ({"json_schema": {"$ref": "#"}}, "cannot be used"),
        ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented"),
        ({"json_schema": '{"items":' * 5000 + "{}" + "}" * 5000}, "deeply"),
        ({"json_schema": {"enum": [str(number) for number in range(200_000)]}}, "may have"),
        ({"json_schema": {"type": "array", "items": {"enum": list(range(100_000))}}}, "too big|too large"),
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, "cannot be used"),
        ({"regex": 5}, "regex must be text"),
        ({"regex": "a\ud800"}, "lone surrogate"),
        ({"regex": "a" * (MOST_BYTES + 1)}, "may have"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": "nothing"}, "cannot be used"),
        ({"regex": "a", "grammar": 'start: "a"'}, "exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "exclude each other"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_at_once(models: TinyModels, options: dict[str, Any], message: str) -> None:
    """One clear sentence, before anything runs and within seconds; the engine stays usable."""
    engine = models.engine("tgt")
    start = time.monotonic()
    with pytest.raises(UsageError, match=message) as error:
        engine.stream("x", raw=True, **options)
    assert time.monotonic() - start < 20
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert error.value.exit_code == 2
    assert engine.generate("x", max_tokens=2, raw=True).usage.completion_tokens


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "(a{1,1000}){1,1000}"},
        {"regex": "(?:(?:(?:a{0,300}){0,300}){0,300}){0,300}b"},
        {"regex": "(.*a.{18}|.*b.{17}c.{9}).{50}"},
        {"grammar": "start: /(.*a){12}/ | B\nB: /(.*[bc]){13}/ & ~/.*x.{16}.*/"},
        {"grammar": 'start: start start | "a" | ""'},
        {"grammar": 'start: a*\na: b*\nb: start | "x" | "xx" | "xxx"'},
        {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 10_000_000}},
        {"json_schema": {"type": "string", "minLength": 10_000_000}},
        {"json_schema": {"type": "object", "properties": {f"p{n}": {"pattern": "^(a|b|ab)*c$"} for n in range(3000)}}},
    ],
)
def test_hostile_constraints_are_bounded(models: TinyModels, options: dict[str, Any]) -> None:
    """What explodes elsewhere is written from or refused, in seconds."""
    engine = models.engine("tgt")
    start, refused = time.monotonic(), ""
    try:
        engine.generate("x", raw=True, max_tokens=40, temperature=2.0, seed=3, **options)
    except UsageError as error:
        refused = str(error)
    assert not refused or refused.endswith((": simplify it.", ": mend it."))
    assert time.monotonic() - start < 30
    assert engine.generate("x", max_tokens=2, raw=True).usage.completion_tokens


def test_without_llguidance(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(models.bundle("tgt"), threads=1)
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(SpecrunError, match="pip install llguidance"):
        engine.stream("x", regex="a")
    engine.close()


# OpenAI bodies


def test_response_formats() -> None:
    assert response_format_options(None) == response_format_options({"type": "text"}) == {}
    assert response_format_options({"type": "json_object"}) == {"json_schema": {"type": "object"}}
    body: Mapping[str, Any] = {
        "type": "json_schema",
        "json_schema": {"name": "person", "strict": True, "schema": PERSON},
    }
    assert response_format_options(body) == {"json_schema": PERSON}
    assert constraint_of(response_format_options(body)) == Constraint("json_schema", json.dumps(PERSON))
    for bad in (
        {"type": "xml"},
        {},
        [],
        "json_object",
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
    ):
        with pytest.raises(UsageError, match="response_format"):
            response_format_options(bad)
