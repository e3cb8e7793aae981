"""The `specrun` command: its group, which loads one command at a time, and the one edge where errors become words."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import sys
import warnings
from typing import Any, NoReturn

import click

COMMANDS = (
    "generate",
    "chat",
    "best-of",
    "batch",
    "export",
    "models",
    "train",
    "verify",
    "check",
    "tune",
    "bench",
    "plan",
)
INTERRUPTED = 130


def _module(command: str) -> str:
    """The module, and what is in it, of a command."""
    return command.replace("-", "_")


class _WrongUsage(click.ClickException):
    """Said as a failure is, without the usage line: the message names the option and the fix."""

    exit_code = 2


class _Specrun(click.Group):
    """Imports the module of the command that runs, and no other."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if importlib.util.find_spec(f"specrun.cli.{_module(name)}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = _module(cmd_name)
        command: click.Command = getattr(importlib.import_module(f"specrun.cli.{module}"), module)
        return command

    def main(self, *args: Any, **extra: Any) -> Any:
        _reopen_closed_streams()
        try:
            return super().main(*args, **extra)
        except SystemExit as end:
            try:
                sys.stdout.flush()
            except OSError as error:  # what is still buffered must not fail a second time when Python ends
                _drop_stdout()
                if not end.code:
                    _say_and_end(error)
            raise
        except OSError as error:  # a help page that cannot be written; commands have their own edge
            _drop_stdout()
            _say_and_end(error)

    def invoke(self, ctx: click.Context) -> Any:
        debug = bool(os.environ.get("SPECRUN_DEBUG"))
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")  # those of other packages say nothing to who runs a command
            _accept_any_text()
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit):
                raise
            except (KeyboardInterrupt, click.Abort) as error:
                # click turns Ctrl-C at a question into Abort, as it does a "no".
                if isinstance(error, click.Abort) and not isinstance(error.__context__, KeyboardInterrupt):
                    raise
                raise click.exceptions.Exit(INTERRUPTED) from None
            except Exception as error:
                if debug:
                    raise
                if isinstance(error, OSError) and error.errno == errno.EPIPE:
                    _drop_stdout()
                    raise click.exceptions.Exit(1) from None
                raise _failure(error) from None


def _say_and_end(error: OSError) -> NoReturn:
    click.echo(f"Error: {_failure(error).message}", err=True)
    sys.exit(1)


def _reopen_closed_streams() -> None:
    """Whoever started us may have closed a standard stream: then there is nothing to read, and nobody reads."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for as long as we run)


def _accept_any_text() -> None:
    """Let a stdout of another encoding than UTF-8 show what it can instead of ending the command."""
    encoding = (sys.stdout.encoding or "").lower().replace("_", "-")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="surrogateescape" if encoding in ("utf-8", "utf8") else "replace")


def _drop_stdout() -> None:
    """The reader has gone: what is still buffered must not fail a second time at exit."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        return


def _failure(error: Exception) -> click.ClickException:
    from specrun.models_cache.errors import SpecrunError

    if isinstance(error, SpecrunError):
        kind = _WrongUsage if error.exit_code == _WrongUsage.exit_code else click.ClickException
        return kind(_sentence(str(error)))
    if isinstance(error, MemoryError):
        return click.ClickException("Not enough memory: choose a smaller model or a smaller --context.")
    if isinstance(error, OSError) and error.strerror:
        return click.ClickException(
            _sentence(": ".join(str(part) for part in (error.filename, error.strerror) if part))
        )
    what = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    return click.ClickException(f"Unexpected {what}. Run again with SPECRUN_DEBUG=1 to see where, and report it.")


def _sentence(text: str) -> str:
    text = text.strip() or "unknown error"
    return text if text.endswith((".", "!", "?")) else f"{text}."


@click.group(cls=_Specrun, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="specrun", prog_name="specrun")
def main() -> None:
    """Run language models on this machine, fast and exact.

    Speculative decoding over compiled ONNX graphs: the text is what plain decoding gives, and it comes faster.

    \b
    Examples:
      specrun generate "Write a haiku about tides."
      specrun chat
      specrun export ./my-model --name mine
      specrun verify --model mine

    Text goes to stdout, everything else to stderr. Exit codes: 0 done, 1 failure, 2 wrong usage, 130 interrupted.
    Models live below SPECRUN_HOME, or else in the user's cache folder.
    """


def run() -> None:
    """The `specrun` command: nothing else runs in its process."""
    from specrun.cli import opening

    opening.OWN_PROCESS = True
    main()
