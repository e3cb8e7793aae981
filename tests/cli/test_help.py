from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from specrun.cli.main import COMMANDS, main


def commands() -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        paths.append((name,))
        if isinstance(command, click.Group):
            paths += [(name, inner) for inner in command.commands]
    return paths


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command | None = main
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name)
    assert command is not None
    return command


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_option_is_explained(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: main {' '.join(path)} ")
    for parameter in command_at(path).params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            for name in parameter.opts:
                assert name in result.stdout


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "models"])
def test_every_command_shows_an_example(name: str) -> None:
    page = CliRunner().invoke(main, [name, "--help"]).stdout
    assert "Example" in page
    assert f"specrun {name}" in page


def test_the_first_page_lists_the_commands_and_the_exit_codes() -> None:
    page = CliRunner().invoke(main, ["--help"]).stdout
    for name in COMMANDS:
        assert f"  {name} " in page
    for group in ([], ["models"]):
        summaries = CliRunner().invoke(main, [*group, "--help"]).stdout.split("Commands:")[1]
        assert "..." not in summaries
    assert "130 interrupted" in " ".join(page.split())


def test_the_limit_of_generate_is_said() -> None:
    page = " ".join(CliRunner().invoke(main, ["generate", "--help"]).stdout.split())
    assert "Write at most so many tokens. [default: 512]" in page


@pytest.mark.parametrize("alias", ["--num-draft-tokens", "--draft-max", "-k", "--draft-model", "-md"])
def test_names_of_other_programs(alias: str) -> None:
    assert alias in CliRunner().invoke(main, ["generate", "--help"]).stdout
