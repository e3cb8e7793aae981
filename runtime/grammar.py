"""Text that must fit a JSON schema, a regular expression or a grammar: which tokens may come next.

llguidance (extra `grammar`) holds the state of the text and computes a mask over the vocabulary for each position. The
masks are applied to the target's logits where these become a distribution (`sampling`), so what the grammar forbids has
probability 0 in plain decoding and in every row of a verify alike. All rules are bounded: a constraint's text by
`MOST_BYTES`, and compiling, matching and their memory by the library's own limits, counted in steps and not in seconds.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import SpecrunError, UsageError
from specrun.runtime.tokenizer import Tokenizer

__all__ = ["Constraint", "Grammars", "Matcher", "constraint_of", "response_format_options"]

Kind = Literal["json_schema", "regex", "grammar"]
KINDS: Final[tuple[Kind, ...]] = ("json_schema", "regex", "grammar")
NAMES: Final = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}
MOST_BYTES: Final = 1 << 20
KEPT: Final = 8  # compiled constraints that an engine remembers
# Between tokens of JSON: one space, or a line break with some indentation; without a bound a model may go on for ever.
_JSON_SPACE: Final = r"(?: |\n[ \t]{0,32})"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must fit; `text` is the schema as JSON, the expression, or the grammar in llguidance's Lark."""

    kind: Kind
    text: str


def constraint_of(options: Mapping[str, Any]) -> Constraint | None:
    """The constraint among a request's options, checked as far as that needs no vocabulary; UsageError if it cannot be.

    At most one of json_schema (a mapping, True or False, or JSON text), regex and grammar (text).
    """
    given = [kind for kind in KINDS if options.get(kind) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} exclude each other: give one of them.")
    kind, value = given[0], options[given[0]]
    text = _schema_text(value) if kind == "json_schema" else value
    if not isinstance(text, str):
        raise UsageError(f"{kind} must be text, not {value!r:.60}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise UsageError(f"The {NAMES[kind]} is not valid Unicode (a lone surrogate): read it as UTF-8.") from None
    if size > MOST_BYTES:
        raise UsageError(f"The {NAMES[kind]} has {size} bytes and may have {MOST_BYTES}: make it smaller.")
    return Constraint(kind, text)


def _schema_text(value: object) -> str:
    """A schema as JSON text."""
    try:
        if isinstance(value, str):
            if len(value) > MOST_BYTES:
                return value  # the caller says that it is too large
            text, value = value, json.loads(value)
        else:
            text = json.dumps(value)
    except RecursionError:
        raise UsageError("The JSON schema is nested too deeply: flatten it.") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"The JSON schema is not JSON ({error}): mend it.") from None
    if not isinstance(value, (Mapping, bool)):
        raise UsageError(f"A JSON schema is an object such as {{'type': 'object'}}, not {value!r:.60}.")
    return text


def response_format_options(body: object) -> dict[str, Any]:
    """Options of a request for an OpenAI body's `response_format`: {} or {"json_schema": ...}; UsageError if unknown.

    >>> response_format_options({"type": "json_object"})
    {'json_schema': {'type': 'object'}}
    """
    if body is None:
        return {}
    kind = body.get("type") if isinstance(body, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    if kind == "json_schema":
        assert isinstance(body, Mapping)
        inner = body.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, (Mapping, bool)):
            raise UsageError("response_format has no schema: put it at response_format.json_schema.schema.")
        return {"json_schema": schema}
    raise UsageError(f"response_format has type text, json_object or json_schema, not {kind!r:.60}.")


class Matcher:
    """Where a text stands in its grammar; for one request and one thread.

    The committed tokens are the truth; draft tokens behind them are pushed and taken off as masks are asked for.
    """

    def __init__(self, inner: Any, tokens: int, name: str) -> None:
        self._inner = inner
        self._tokens = tokens
        self._name = name
        self._committed: list[int] = []
        self._held: list[int] = []  # what the library's matcher has consumed
        self._mask: NDArray[np.bool_] | None = None  # of the state behind `_held`

    def __len__(self) -> int:
        """The number of committed tokens."""
        return len(self._committed)

    def commit(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        self._committed += tokens

    def allowed(self, drafts: Sequence[int] = ()) -> NDArray[np.bool_] | None:
        """Which tokens may follow the committed ones and `drafts`: bool [vocabulary], read-only; at least one may.

        None where `drafts` are no beginning of a text of the grammar, or have ended it. Errors: UsageError where the
        grammar turns out to be too complex.
        """
        wanted = [*self._committed, *drafts]
        if wanted == self._held and self._mask is not None:
            return self._mask
        shared = next(
            (place for place, (a, b) in enumerate(zip(self._held, wanted, strict=False)) if a != b),
            min(len(self._held), len(wanted)),
        )
        if shared < len(self._held):
            self._inner.rollback(len(self._held) - shared)
            del self._held[shared:]
        self._mask = None
        new = wanted[shared:]
        taken = self._inner.try_consume_tokens(new) if new else 0
        self._held += new[:taken]
        self._require_sound()
        if taken < len(new) or self._inner.stop_reason() == "EndOfSentence":
            return None
        bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        self._require_sound()
        mask = np.unpackbits(bits, bitorder="little")[: self._tokens].view(np.bool_)
        if not mask.any():
            raise UsageError(f"The {self._name} leaves no token to choose from: loosen it.")
        mask.setflags(write=False)
        self._mask = mask
        return mask

    def fitting(self, drafts: Sequence[int]) -> int:
        """How many of `drafts`, from the first on, may follow the committed tokens; cheap, as no mask is computed."""
        if self._held != self._committed and self.allowed() is None:
            return 0
        known = [*takewhile(lambda token: token < self._tokens, drafts)]
        fits: int = self._inner.validate_tokens(known)
        self._require_sound()
        return fits

    def _require_sound(self) -> None:
        if self._inner.is_error():
            reason = _reason(self._inner.get_error())
            raise UsageError(f"The {self._name} cannot be followed ({reason}): simplify it.")


class Grammars:
    """Compiles the constraints of one engine's requests. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint | None) -> Matcher | None:
        """A matcher at the beginning of a text; None without a constraint.

        Errors: UsageError for a constraint that cannot be compiled or that no text fits, SpecrunError without
        llguidance.
        """
        if constraint is None:
            return None
        with self._lock:
            inner = self._compiled.get(constraint)
            if inner is None:
                inner = self._compile(constraint)
            self._compiled[constraint] = inner
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            inner = inner.deep_copy()
        return Matcher(inner, self._tokenizer.tokens, NAMES[constraint.kind])

    def _compile(self, constraint: Constraint) -> Any:
        try:
            import llguidance
        except ImportError:
            raise SpecrunError(
                f"A {NAMES[constraint.kind]} needs llguidance: install it with pip install llguidance."
            ) from None
        library = llguidance.LLMatcher
        if self._vocabulary is None:
            wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
            eos = list(self._tokenizer.special_ids.eos)
            self._vocabulary = llguidance.LLTokenizer(wrapped, n_vocab=self._tokenizer.tokens, eos_token=eos)
        name, text = NAMES[constraint.kind], constraint.text
        limits = llguidance.LLParserLimits(verbose_errors=False)
        try:
            if constraint.kind == "json_schema":
                compiled = library.grammar_from_json_schema(text, defaults={"whitespace_pattern": _JSON_SPACE})
            elif constraint.kind == "regex":
                compiled = library.grammar_from_regex(text)
            else:
                compiled = library.grammar_from_lark(text)
        except ValueError as error:
            raise UsageError(f"The {name} cannot be used ({_reason(str(error))}): mend it.") from None
        inner = library(self._vocabulary, compiled, log_level=0, limits=limits)
        if inner.is_error():
            raise UsageError(f"The {name} cannot be used ({_reason(inner.get_error())}): mend it.")
        if not np.frombuffer(inner.compute_bitmask(), np.uint8).any() or inner.is_error():
            reason = _reason(inner.get_error()) or "no text fits it"
            raise UsageError(f"The {name} cannot be used ({reason}): mend it.")
        return inner


class _Vocabulary:
    """The tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.special_ids.eos[0]
        self.bos_token_id = tokenizer.special_ids.bos
        self.special_token_ids = sorted(tokenizer.control_ids)
        texts = (
            tokenizer.token_text(token).encode() if token in tokenizer.control_ids else tokenizer.token_bytes(token)
            for token in range(tokenizer.tokens)
        )
        self.tokens = [*texts]

    def __call__(self, text: str | bytes) -> list[int]:
        decoded = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(decoded, add_bos=False)


def _reason(message: str) -> str:
    """The one line of the library's message that says what is wrong."""
    head = message.split("<state>", 1)[0].strip()
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    telling = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    return (telling or (lines[0] if lines else "")).rstrip(".")[:200]
