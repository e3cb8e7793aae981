"""Shows one stream on stdout as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrun.cli.interrupt import cancel_on_interrupt
from specrun.cli.output import coloured, end_text, waiting, write_text

if TYPE_CHECKING:
    from specrun.runtime import Result, Stream


def show_answer(stream: Stream, *, show: bool = True, colour: bool = False) -> tuple[Result, bool]:
    """Read a stream to its end; its result, and whether Ctrl-C ended it. Nothing is printed unless `show`."""
    with cancel_on_interrupt(stream) as interrupt:
        with waiting(f"reading the prompt ({len(stream.prompt_tokens)} tokens)"):
            piece = next(stream, None)
        while piece is not None:
            if show and piece.text:
                write_text(coloured(piece) if colour else piece.text)
            piece = next(stream, None)
    if show:
        end_text(stream.result.text)
    return stream.result, interrupt.came
