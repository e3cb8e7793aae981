"""From a line to a request: the OpenAI batch form, or a short one; or the error of this line alone."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from specrun.models_cache.errors import UsageError
from specrun.models_cache.strictjson import StrictJsonError, parse_object
from specrun.runtime.best_of.limits import MOST_SAMPLES, TEMPERATURE
from specrun.runtime.engine import Prompt
from specrun.runtime.grammar import response_format_options
from specrun.runtime.jobs.lines import MOST_BYTES, Line
from specrun.runtime.request import request_options

LineId = str | int | None

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_AS_THEY_ARE: Final = (
    "draft_length",
    "lookahead",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "sampling",
    "json_schema",
    "regex",
    "grammar",
)
PARAMETERS: Final = (
    *_AS_THEY_ARE,
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "logprobs",
    "top_logprobs",
    "speculation_method",
    "ignore_eos",
    "response_format",
    "prediction",
    "system",
    "raw",
    "model",
    "n",
    "best_of",
    "stream",
    "user",
    "metadata",
    "store",
)
"""What a line may hold beside its prompt; the last three mean nothing here."""

_PROMPTS: Final = ("prompt", "messages")
SHORT_FORM: Final = ("id", "custom_id", *_PROMPTS, *PARAMETERS)
"""The keys of a line in the short form."""
_BATCH: Final = ("custom_id", "method", "url", "body")


class LineError(Exception):
    """A line that is no request. code: a word for programs; custom_id: the line's own, where it could be read."""

    def __init__(self, code: str, message: str, custom_id: LineId = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for lines that do not say otherwise.

    options: as `RequestOptions`; seed: what sampled lines without a seed count theirs from; models: the names that
    lines may give the model, None for any.
    """

    options: Mapping[str, Any]
    seed: int = 0
    models: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class LineRequest:
    """A request as `Engine.generate` takes it. listed: whether the answer lists the tokens.

    samples: so many are written, as `Engine.best_of` does, and the `choices` best are the answer.
    """

    number: int
    custom_id: LineId
    prompt: Prompt
    options: dict[str, Any]
    listed: bool
    samples: int = 1
    choices: int = 1


def parse_line(line: Line, defaults: Defaults) -> LineRequest:
    """The request of a line. Raises LineError, which says what is wrong with it and how to mend it."""
    record = _record(line)
    custom_id = record.get("custom_id", None if "body" in record else record.get("id"))
    if isinstance(custom_id, bool) or not isinstance(custom_id, str | int | None):
        raise LineError("invalid_id", f"The id must be text or a whole number, not {_shown(custom_id)}.")
    try:
        return _request(line.number, custom_id, record, defaults)
    except LineError as error:
        error.custom_id = custom_id
        raise
    except UsageError as error:
        raise LineError("invalid_request", str(error), custom_id) from None


def _record(line: Line) -> dict[str, Any]:
    if line.size > MOST_BYTES:
        raise LineError(
            "line_too_long", f"The line has {line.size} bytes and a line may have {MOST_BYTES}: shorten it."
        )
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise LineError(
            "invalid_utf8", f"The line is not UTF-8 text (at byte {error.start + 1}): convert it."
        ) from None
    try:
        record = parse_object(text)
        if "\\u" in text:
            json.dumps(record, ensure_ascii=False).encode()
    except StrictJsonError as error:
        what = str(error)
        if what == "it must hold one JSON object":
            raise LineError("not_an_object", f"The line must hold one JSON object, not {text.strip():.40}.") from None
        raise LineError("invalid_json", f"The line is no JSON object: {what}.") from None
    except UnicodeEncodeError:
        raise LineError("invalid_text", "The line holds half a surrogate pair (\\ud800 to \\udfff): mend it.") from None
    except RecursionError:
        raise LineError("invalid_json", "The line is no JSON object: it is nested too deeply.") from None
    return record


def _request(number: int, custom_id: LineId, record: dict[str, Any], defaults: Defaults) -> LineRequest:
    raw = False
    body: Any = record
    if "body" in record:
        _known(record, _BATCH, "the line")
        body = record["body"]
        if not isinstance(body, dict):
            raise LineError("invalid_request", f"body must be an object, not {_shown(body)}.")
        raw = _endpoint(record, body)
    _known(body, SHORT_FORM if body is record else (*_PROMPTS, *PARAMETERS), "a request")
    given = {key: value for key, value in body.items() if value is not None}
    prompt = _prompt(given)
    _model(given, defaults)
    options = _options(given, defaults)
    choices, samples = _samples(given, options)
    options["raw"] = _checked(given, "raw", bool, raw or options.get("raw", False))
    led = isinstance(prompt, list) and prompt[0]["role"] in ("system", "developer")
    if "system" not in given and (led or options["raw"]):  # the job's is for prompts that bring none and take one
        options["system"] = None
    request = request_options(**options)
    sampling = request.options.sampling
    if not sampling.greedy and options.get("seed") is None:
        options["seed"] = (defaults.seed + number) % 2**64
    return LineRequest(number, custom_id, prompt, options, options.get("logprobs") is not None, samples, choices)


def _endpoint(record: dict[str, Any], body: dict[str, Any]) -> bool:
    """Whether the prompt is raw text by the address of the request."""
    verb, url = record.get("method"), record.get("url")
    if verb not in (None, "POST"):
        raise LineError("invalid_request", f"method must be POST, not {_shown(verb)}.")
    if url not in (None, CHAT, COMPLETIONS):
        raise LineError("invalid_request", f"url must be {CHAT} or {COMPLETIONS}, not {_shown(url)}.")
    if url == COMPLETIONS and "messages" in body:
        raise LineError("invalid_request", f"{COMPLETIONS} takes a prompt: send messages to {CHAT}.")
    return bool(url == COMPLETIONS)


def _known(values: Mapping[str, Any], names: Sequence[str], place: str) -> None:
    for name, value in values.items():
        if name in names or (value is None and place != "the line"):
            continue
        if name == "method":
            hint = "the way to draft is speculation_method."
        else:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean '{near[0]}'?" if near else f"known ones are {', '.join(names)}."
        raise LineError("unknown_parameter", f"There is no {_shown(name)} in {place}: {hint}")


def _prompt(given: Mapping[str, Any]) -> Prompt:
    prompt, messages = given.get("prompt"), given.get("messages")
    if prompt is not None and messages is not None:
        raise LineError("invalid_request", "There are a prompt and messages: give one of them.")
    if messages is not None:
        if not isinstance(messages, list) or not messages:
            raise LineError("no_prompt", f"messages must be a list of messages, not {_shown(messages)}.")
        return [_message(message) for message in messages]
    if prompt is None:
        raise LineError("no_prompt", "The line has no prompt: give prompt or messages.")
    if not isinstance(prompt, str):
        raise LineError("no_prompt", f"prompt must be text, not {_shown(prompt)}.")
    if not prompt.strip():
        raise LineError("no_prompt", "The prompt is empty: give some text.")
    return prompt


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise LineError("invalid_request", f"A message is an object with role and content, not {_shown(message)}.")
    content = message.get("content")
    if isinstance(content, list):  # the parts of the chat API
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if texts and all(isinstance(text, str) for text in texts):
            content = "".join(map(str, texts))
    if not isinstance(content, str):
        raise LineError("invalid_request", f"The content of a message must be text, not {_shown(content)}.")
    return {**message, "content": content}


def _model(given: Mapping[str, Any], defaults: Defaults) -> None:
    model = _checked(given, "model", str, None)
    if model is not None and defaults.models is not None and model not in defaults.models:
        runs = min(defaults.models, default="")
        raise LineError(
            "other_model", f"The line asks for model {_shown(model)} and this job runs '{runs}': see --ignore-model."
        )


def _options(given: Mapping[str, Any], defaults: Defaults) -> dict[str, Any]:
    """The options as `RequestOptions`, checked but for what `request_options` checks."""
    if given.get("stream", False) is not False:
        raise LineError("invalid_request", "stream must be false: the answers of a job are written whole.")
    options = dict(defaults.options)
    options |= {name: given[name] for name in _AS_THEY_ARE if name in given}
    limits = [given[name] for name in ("max_completion_tokens", "max_tokens") if name in given]
    if limits:
        if any(limit != limits[0] for limit in limits):
            raise LineError("invalid_request", "max_tokens and max_completion_tokens differ: give one of them.")
        options["max_tokens"] = limits[0]
    if "stop" in given:
        stop = given["stop"]
        if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(text, str) for text in stop)):
            raise LineError("invalid_request", f"stop must be text or a list of texts, not {_shown(stop)}.")
        options["stop"] = stop
    options["ignore_eos"] = _checked(given, "ignore_eos", bool, options.get("ignore_eos", False))
    options["system"] = _checked(given, "system", str, options.get("system"))
    if (method := _checked(given, "speculation_method", str, None)) is not None:
        options["method"] = method
        if "lookahead" not in given and method != "lookahead":
            options["lookahead"] = None
    options["logprobs"] = _logprobs(given)
    options |= response_format_options(given.get("response_format"))
    if "prediction" in given:
        options["prediction"] = _prediction(given["prediction"])
    return options


def _samples(given: Mapping[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """(answers that are wanted, samples that are written); more than one need a temperature."""
    for name in ("n", "best_of"):
        count = given.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_SAMPLES:
            raise LineError(
                "invalid_request", f"{name} must be a whole number from 1 to {MOST_SAMPLES}, not {_shown(count)}."
            )
    choices: int = given.get("n", 1)
    samples: int = given.get("best_of", choices)
    if samples < choices:
        raise LineError("invalid_request", f"best_of must be n or more, not {samples} for an n of {choices}.")
    if samples > 1 and not options.get("temperature"):
        if "temperature" in given:
            raise LineError("invalid_request", f"All {samples} samples are the same at temperature 0: raise it.")
        options["temperature"] = TEMPERATURE
    return choices, samples


def _prediction(prediction: object) -> str:
    """Text, or the chat API's object around it."""
    content = prediction
    if isinstance(prediction, dict) and prediction.get("type") == "content":
        content = _message({"role": "assistant", "content": prediction.get("content")})["content"]
    if not isinstance(content, str):
        raise LineError(
            "invalid_request", f'prediction must be text or {{"type": "content", ...}}, not {_shown(prediction)}.'
        )
    return content


def _logprobs(given: Mapping[str, Any]) -> int | None:
    """Either API's way to ask: a number, or true and top_logprobs."""
    wanted, most = given.get("logprobs"), given.get("top_logprobs")
    if most is not None and wanted is not True:
        raise LineError("invalid_request", "top_logprobs needs logprobs true.")
    if wanted is None or wanted is False:
        return None
    if isinstance(most, bool) or not isinstance(most, int | None):
        raise LineError("invalid_request", f"top_logprobs must be a whole number, not {_shown(most)}.")
    return (most or 0) if wanted is True else wanted


def _checked(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if name in given and not isinstance(value, kind):
        wanted = {str: "text", bool: "true or false"}[kind]
        raise LineError("invalid_request", f"{name} must be {wanted}, not {_shown(value)}.")
    return value


def _shown(value: object) -> str:
    try:
        shown = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        shown = "something nested deeply"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
