"""Options that several commands share, declared once; their names are those of `Engine.load` and `Engine.stream`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specrun.cli.types import lookahead_shape

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_MAX_TOKENS = 512

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_ENGINE: tuple[Decorator, ...] = (
    click.option("-m", "--model", default=DEFAULT_MODEL, show_default=True, help="A model's name, or its folder."),
    click.option(
        "--draft",
        "--draft-model",
        "-md",
        metavar="NAME|PATH",
        help="What drafts: a speculator of the model by its name, or a smaller model with the same tokenizer.",
    ),
    click.option("--threads", type=int, help="Processor threads; by default one for each core."),
    click.option(
        "--device",
        default="auto",
        show_default=True,
        metavar="auto|cpu|cuda|cuda:N",
        help="Where the model runs. auto: on an NVIDIA GPU if the model was exported for one (specrun export --device "
        "cuda) and there is one, else on the CPU.",
    ),
    click.option(
        "--draft-device",
        metavar="auto|cpu|cuda|cuda:N",
        help="Where a draft model of --draft runs; by default where the model does, or on the CPU if it was exported "
        "for that.",
    ),
    click.option("--context", type=int, help="Use at most so many positions of the model's context."),
    click.option("--yes", is_flag=True, help=f"Get {DEFAULT_MODEL} without asking if it is not here yet."),
)

LOOKAHEAD: Decorator = click.option(
    "--lookahead",
    type=lookahead_shape,
    metavar="W,N,G",
    help="For --method lookahead: columns of its window, length of its n-grams, guesses a token; by default 3,3,3.",
)

_MODELS = click.option(
    "-m",
    "--model",
    "models",
    multiple=True,
    default=(DEFAULT_MODEL,),
    show_default=True,
    help="A model's name, or its folder; given several times, one after another.",
)

_SPECULATION: tuple[Decorator, ...] = (
    click.option(
        "--method",
        help="How to draft: auto (what is fastest here, by `specrun tune`, or what --draft names), none, ngram "
        "(repeats of what was read or written), lookahead (the model's own guesses, made beside the text), draft (a "
        "small model), medusa or eagle (heads on top of the model), or two in turn: eagle+ngram, medusa+ngram, "
        "draft+ngram. By default auto. The text is the same with each, unless --sampling is rejection.",
    ),
    click.option(
        "--draft-length",
        "-k",
        "--num-draft-tokens",
        "--draft-max",
        "draft_length",
        type=int,
        metavar="K",
        help="Draft tokens a round; by default as many as pay.",
    ),
    LOOKAHEAD,
    click.option(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, show_default=True, help="Write at most so many tokens."
    ),
    click.option("--min-tokens", type=int, default=0, show_default=True, help="Do not end before so many tokens."),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End before this text; may be given several times. Bash: $'\\n'."
    ),
)

_SAMPLING: tuple[Decorator, ...] = (
    click.option(
        "--temperature", type=float, default=0.0, show_default=True, help="0 takes the most probable token (greedy)."
    ),
    click.option("--top-k", type=int, default=0, help="Keep the k most probable tokens; 0 is off (default)."),
    click.option("--top-p", type=float, default=1.0, help="Keep the fewest tokens that reach p; 1 is off (default)."),
    click.option(
        "--min-p", type=float, default=0.0, help="Keep tokens with p times the largest probability; 0 is off."
    ),
    click.option("--repetition-penalty", type=float, default=1.0, help="Of prompt and output; 1 is off (default)."),
    click.option("--presence-penalty", type=float, default=0.0, help="Of the output, -2 to 2; 0 is off (default)."),
    click.option("--frequency-penalty", type=float, default=0.0, help="Of the output, -2 to 2; 0 is off (default)."),
    click.option("--seed", type=int, help="Same seed, same text; by default drawn anew and shown by --stats."),
    click.option(
        "--sampling",
        type=click.Choice(["coupled", "rejection"]),
        default="coupled",
        show_default=True,
        help="coupled: the seed decides the text whatever the method. rejection: the rule of the papers; the text then "
        "depends on the method, though its distribution does not.",
    ),
)

_SYSTEM: tuple[Decorator, ...] = (click.option("--system", metavar="TEXT", help="System message."),)


def _in_a_folder(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    """Said at once, not after the answer."""
    if value is not None and not Path(value).absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {Path(value).parent}: make it first.")
    return value


_SHOWING: tuple[Decorator, ...] = (
    click.option(
        "--ngrams",
        type=click.Path(dir_okay=False),
        callback=_in_a_folder,
        metavar="FILE",
        help="Draft from the texts kept in this file too, and keep this run's text there, so that a second run of a "
        "similar prompt drafts from the first one's.",
    ),
    click.option("--color", is_flag=True, help="Show accepted draft tokens in green, on a terminal without NO_COLOR."),
    click.option(
        "--stats",
        is_flag=True,
        help="Print a line of figures to stderr: tokens/s, MAT (tokens committed a target run), acceptance, memory.",
    ),
)

_ENGINE_NAMES = ("model", "draft", "threads", "device", "draft_device", "context", "yes")
_REQUEST_NAMES = (
    "method",
    "draft_length",
    "lookahead",
    "max_tokens",
    "min_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "sampling",
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--model, --draft, --threads, --device, --draft-device, --context, --yes."""
    return _decorated(command, _ENGINE)


def engines_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `engine_options`, with --model for any number of `models`."""
    return _decorated(command, (_MODELS, *_ENGINE[1:]))


def writing_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Everything that `generate` and `chat` share."""
    return _decorated(command, _ENGINE[:2] + _SPECULATION + _SAMPLING + _SYSTEM + _SHOWING + _ENGINE[2:])


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `writing_options`, without what only shows one answer."""
    return _decorated(command, _ENGINE[:2] + _SPECULATION + _SAMPLING + _SYSTEM + _ENGINE[2:])


def sampled_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """As `job_options`, where each request has several samples."""
    warm = click.option(
        "--temperature", type=float, default=0.8, show_default=True, help="How far samples stray; above 0."
    )
    return _decorated(command, _ENGINE[:2] + _SPECULATION + (warm,) + _SAMPLING[1:] + _SYSTEM + _ENGINE[2:])


def engine_values(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that `open_engine` takes."""
    return {name: values[name] for name in _ENGINE_NAMES if name in values}


def request_values(values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that `Engine.stream` and `ChatSession.send` take."""
    return {name: values[name] for name in _REQUEST_NAMES}


def _decorated(command: Callable[..., Any], decorators: tuple[Decorator, ...]) -> Callable[..., Any]:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
