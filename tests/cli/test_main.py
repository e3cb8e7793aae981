from __future__ import annotations

import errno
import subprocess
import sys
import warnings
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from specrun.cli import check as check_module
from specrun.cli.main import main
from specrun.models_cache import errors


def invoke(monkeypatch: pytest.MonkeyPatch, error: BaseException, **environment: str) -> tuple[int, str, str]:
    def fail(target: str, draft: str, as_json: bool) -> None:
        raise error

    monkeypatch.setattr(check_module.check, "callback", fail)
    result = CliRunner(env=environment).invoke(main, ["check", "a", "b"])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ModelNotFoundError("there is no model 'x'; pull it"), 1),
        (errors.UsageError("that cannot be."), 2),
        (errors.ContextLengthError("too long."), 1),
    ],
)
def test_errors_are_one_sentence(monkeypatch: pytest.MonkeyPatch, error: errors.SpecrunError, code: int) -> None:
    assert invoke(monkeypatch, error) == (code, "", f"Error: {str(error).rstrip('.')}.\n")


def test_errors_of_files_name_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    error = PermissionError(errno.EACCES, "Permission denied", "/models/x")
    assert invoke(monkeypatch, error) == (1, "", "Error: /models/x: Permission denied.\n")


def test_a_fault_is_told_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = invoke(monkeypatch, KeyError("odd"))
    assert (code, out) == (1, "")
    assert "Unexpected KeyError: 'odd'" in err
    assert "SPECRUN_DEBUG=1" in err
    assert "Traceback" not in err


def test_debug_raises_the_error_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(target: str, draft: str, as_json: bool) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(check_module.check, "callback", fail)
    result = CliRunner(env={"SPECRUN_DEBUG": "1"}).invoke(main, ["check", "a", "b"])
    assert isinstance(result.exception, KeyError)


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, KeyboardInterrupt()) == (130, "", "")


def test_ctrl_c_at_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    error = click.Abort()
    error.__context__ = KeyboardInterrupt()
    assert invoke(monkeypatch, error) == (130, "", "")


def test_no_to_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke(monkeypatch, click.Abort())[0] == 1


def test_warnings_of_other_packages_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(target: str, draft: str, as_json: bool) -> None:
        warnings.warn("old", DeprecationWarning, stacklevel=1)

    monkeypatch.setattr(check_module.check, "callback", warn)
    result = CliRunner().invoke(main, ["check", "a", "b"])
    assert (result.exit_code, result.output) == (0, "")


@pytest.mark.parametrize("arguments", [["nothing"], ["generate", "--nothing"], ["generate", "--top-k", "x"], ["check"]])
def test_wrong_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Usage:" in result.stderr


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert CliRunner().invoke(main, ["--version"]).stdout == f"specrun, version {version('specrun')}\n"


def test_starting_imports_no_more_than_click() -> None:
    code = (
        "import sys, click; before = set(sys.modules); import specrun.cli.main; "
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith(('specrun', 'importlib'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(done.stdout.split()) < 10, done.stdout


def test_generate_imports_neither_the_exporter_nor_other_commands(tiny: str) -> None:
    code = (
        "import sys; from specrun.cli.main import main\n"
        "main(['generate', '--model', 'tiny', '--max-tokens', '2', 'x'], standalone_mode=False)\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"torch", "transformers", "onnx", "onnx_ir", "gguf", "huggingface_hub", "specrun.export"}
    assert not loaded & {"specrun.cli.chat", "specrun.cli.export", "specrun.cli.models", "specrun.runtime.bench"}


def test_a_reader_that_goes_away_is_no_traceback(tiny: str) -> None:
    command = "from specrun.cli.main import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", command, "generate", "--model", "tiny", "--max-tokens", "3000", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(4)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_stdout_of_another_encoding_shows_what_it_can(tiny: str, run) -> None:
    done = run("generate", "--model", tiny, "--max-tokens", "30", "x", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert "?" in done.stdout
    done = run("generate", "--model", tiny, "--json", "x", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("specrun models list >&-", 0, ""),
        ("specrun generate <&-", 2, "The prompt is empty"),
        ("specrun --help >/dev/full", 1, "No space left on device"),
        ("specrun models --help 2>&- >/dev/full", 1, ""),
    ],
)
def test_closed_and_full_standard_streams(line: str, code: int, said: str) -> None:
    if "/dev/full" in line and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    command = line.replace("specrun", f"'{sys.executable}' -c 'from specrun.cli.main import main; main()'", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
