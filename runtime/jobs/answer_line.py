"""The lines of an output: the OpenAI batch form, with the JSON of `generate` as body."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specrun.models_cache.errors import ContextLengthError, SpecrunError, UsageError
from specrun.runtime.jobs.line_request import LineError, LineId

_PREFIX = "line-"


def result_line(number: int, custom_id: LineId, body: dict[str, Any]) -> bytes:
    """The line of an answer, its line feed included."""
    name = f"{_PREFIX}{number}"
    response = {"status_code": 200, "request_id": name, "body": body}
    return _encoded({"id": name, "custom_id": custom_id, "response": response, "error": None})


def error_line(number: int, custom_id: LineId, code: str, message: str) -> bytes:
    """The line of a request that failed, its line feed included."""
    message = message if message.endswith((".", "!", "?")) else f"{message}."
    error = {"code": code, "message": message}
    return _encoded({"id": f"{_PREFIX}{number}", "custom_id": custom_id, "response": None, "error": error})


def error_code(error: SpecrunError | LineError) -> str:
    """The word for programs of an error."""
    if isinstance(error, LineError):
        return error.code
    if isinstance(error, ContextLengthError):
        return "context_length_exceeded"
    return "invalid_request" if isinstance(error, UsageError) else "failed"


@dataclass(frozen=True, slots=True)
class Written:
    """What a whole line of an output tells: whose answer it is, whether that is an error, and its code."""

    number: int
    failed: bool
    code: str | None = None


def read_written(data: bytes) -> Written | None:
    """What a line of an output tells; None unless it is a whole line as `result_line` or `error_line` gives it."""
    if not data.endswith(b"\n"):
        return None
    try:
        record = json.loads(data)
        prefix, number = record["id"][: len(_PREFIX)], record["id"][len(_PREFIX) :]
        failed = record["error"] is not None
        if prefix != _PREFIX or failed == (record["response"] is not None):
            return None
        return Written(int(number), failed, str(record["error"]["code"]) if failed else None)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _encoded(record: dict[str, Any]) -> bytes:
    # In ASCII, so that no reader takes U+2028 and its like for the end of a line.
    return json.dumps(record).encode() + b"\n"
