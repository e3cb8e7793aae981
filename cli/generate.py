"""`specrun generate`: one prompt, one answer (or several samples of it)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from specrun.cli.answer import show_answer
from specrun.cli.constraints import constraint_options, constraint_values
from specrun.cli.opening import open_engine
from specrun.cli.options import engine_values, request_values, writing_options
from specrun.cli.output import echo_json, is_terminal, note, stats_line, use_colour


@click.command()
@click.argument("prompt", required=False, metavar="[PROMPT|-]")
@click.option("--file", "-f", type=click.Path(exists=True, dir_okay=False), help="Read the prompt from this file.")
@writing_options
@constraint_options
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option(
    "--n",
    "samples",
    type=click.IntRange(min=1),
    default=1,
    help="Write so many samples (default 1), each announced on stderr.",
)
@click.option(
    "--logprobs", type=int, metavar="N", help="With --json: log-probabilities of each token and the N likeliest."
)
@click.option("--tokens", is_flag=True, help="With --json: list the tokens and where each came from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when all is written.")
def generate(
    prompt: str | None,
    file: str | None,
    raw: bool,
    system: str | None,
    samples: int,
    logprobs: int | None,
    tokens: bool,
    ngrams: str | None,
    color: bool,
    stats: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Answer PROMPT; the text streams to stdout as it comes.

    PROMPT - reads stdin, and so does no PROMPT when stdin is not a terminal. One newline at the end of stdin or of
    --file is dropped. Ctrl-C ends the text where it is (exit code 130).

    The line of --stats: tokens written, tokens/s of decoding, MAT (tokens committed a target run; plain decoding has
    1), acceptance (the share of the decided draft tokens that stood), method, exactness, memory of weights and caches.

    \b
    Examples:
      specrun generate "Write a haiku about tides."
      specrun generate --file notes.txt --max-tokens 200 --stats
      echo "def add(a, b):" | specrun generate --raw -
      specrun generate --temperature 0.8 --seed 1 --n 3 "Name a colour."
      specrun generate --json --tokens "Say hello." | jq .speculation
      specrun generate --regex "yes|no" "Is the sea salty?"

    With --json and --n above 1 the object is {"samples": [...]}, with one object for each sample.
    """
    from specrun.models_cache.errors import UsageError
    from specrun.runtime.request import request_options

    request = {**request_values(values), **constraint_values(values)}
    request |= {"system": system, "raw": raw, "logprobs": logprobs}
    if not as_json and (tokens or logprobs is not None):
        raise UsageError("--tokens and --logprobs are shown in JSON only: add --json.")
    if request_options(**request).options.sampling.greedy and samples > 1:
        raise UsageError(f"Without sampling all {samples} samples are the same: add --temperature 0.8, say.")
    text = read_prompt(prompt, file, "generate")
    objects = []
    interrupted = False
    with open_engine(**engine_values(values), methods=(values["method"],)) as engine:
        if ngrams is not None and Path(ngrams).exists():
            engine.load_ngrams(Path(ngrams))
        for index in range(samples):
            if samples > 1 and not as_json:
                note(f"--- sample {index + 1} of {samples} ---")
            stream = engine.stream(text, **{**request, "sample_index": index})
            result, interrupted = show_answer(stream, show=not as_json, colour=use_colour(color))
            request["seed"] = result.seed
            if stats:
                note(stats_line(result, request, engine.calibration.cost))
            listed = tokens or logprobs is not None
            texts = [engine.tokenizer.token_text(token.id) for token in result.tokens] if listed else None
            objects.append(result.to_json(texts))
            if interrupted:
                break
        if as_json:
            echo_json(objects[0] if samples == 1 else {"samples": objects})
        if ngrams is not None:
            engine.save_ngrams(Path(ngrams))
    if interrupted:
        raise click.exceptions.Exit(130)


def read_prompt(prompt: str | None, file: str | None, command: str) -> str:
    """The prompt's text, from one of its three places; UsageError names the command."""
    from specrun.models_cache.errors import UsageError

    if prompt is not None and file is not None:
        raise UsageError("Give either PROMPT or --file, not both.")
    if prompt not in (None, "-"):
        return _not_empty(str(prompt), "PROMPT", command)
    if file is None and prompt is None and is_terminal(sys.stdin):
        raise UsageError(f'No prompt: give it as in `specrun {command} "Hello"`, with --file, or on stdin.')
    data = Path(file).read_bytes() if file is not None else sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"The prompt is not UTF-8 text (at byte {error.start}): convert it first.") from None
    return _not_empty(text.removesuffix("\n").removesuffix("\r"), file or "stdin", command)


def _not_empty(text: str, place: str, command: str) -> str:
    from specrun.models_cache.errors import UsageError

    if not text.strip():
        raise UsageError(f'The prompt is empty ({place}): give some text, as in `specrun {command} "Hello"`.')
    return text
