"""Strict decoding of JSON into dataclasses: unknown keys, missing keys and wrong types are errors that say where."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any

_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


class StrictJsonError(ValueError):
    """The JSON text is malformed or does not have the wanted form; the message says where."""


def parse_object(text: str) -> dict[str, Any]:
    """Parse one JSON object, refusing duplicate keys, NaN and infinities.

    Raises StrictJsonError.
    """
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except RecursionError:
        raise StrictJsonError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise StrictJsonError(f"it is not valid JSON ({error})") from None
    except StrictJsonError:
        raise
    except ValueError as error:  # integers of more digits than Python converts
        raise StrictJsonError(str(error)) from None
    if not isinstance(value, dict):
        raise StrictJsonError("it must hold one JSON object")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise StrictJsonError(f"key {next(n for n in names if names.count(n) > 1)!r} is there twice")
    return result


def _no_constants(name: str) -> float:
    raise StrictJsonError(f"{name} is not a number")


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """Turn parsed JSON into `kind`: a dataclass, str, int, float, bool, None, unions, tuple[X, ...] or dict[str, X].

    Raises StrictJsonError naming the place, as in `graphs.target.inputs[0].dtype`.
    """
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(typing.get_args(kind), value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _mismatch(where, "a list", value)
        item = typing.get_args(kind)[0]
        return tuple(decode(item, entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _mismatch(where, "an object", value)
        item = typing.get_args(kind)[1]
        return {key: decode(item, entry, _join(where, key)) for key, entry in value.items()}
    if kind is float and type(value) in (int, float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise StrictJsonError(f"{where} is not a finite number")
        return number
    if type(value) is kind:  # not isinstance: true is no integer
        return value
    raise _mismatch(where, _WORDS[kind], value)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(where or "it", "an object", value)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise StrictJsonError(f"unknown key {_join(where, key)!r}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if name not in value and required:
            raise StrictJsonError(f"key {_join(where, name)!r} is missing")
    return kind(**{key: decode(hints[key], entry, _join(where, key)) for key, entry in value.items()})


def _decode_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    kinds = [choice for choice in choices if choice is not type(None)]
    if len(kinds) == 1:
        return decode(kinds[0], value, where)
    for choice in kinds:
        if type(value) is choice:
            return value
    raise _mismatch(where, " or ".join(_WORDS[choice] for choice in kinds), value)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _mismatch(where: str, wanted: str, value: Any) -> StrictJsonError:
    shown = json.dumps(value, ensure_ascii=False)
    return StrictJsonError(f"{where} must be {wanted}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")
