"""Each peer's virtual environment: made where it is missing, kept for the next call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .processes import call, child_environment

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"

Note = Callable[[str], None]


def peer_python(folder: Path, requirements: Sequence[str], variables: Mapping[str, str], note: Note) -> Path:
    """The Python of `folder`/venv, with `requirements` installed. Raises BenchError where that fails.

    variables: of the environment, for packages that are built from source.
    """
    venv = folder / "venv"
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    constraints = ["--constraint", os.fspath(CONSTRAINTS)] if CONSTRAINTS.exists() else []
    pinned = CONSTRAINTS.read_text(encoding="utf-8") if constraints else ""
    content = "\n".join([sys.version, *requirements, *(f"{key}={value}" for key, value in variables.items()), pinned])
    stamp = venv / ".installed"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == content:
        return python
    built = "; it is compiled here, which takes some minutes" if variables else ""
    note(f"Making {venv} and installing {', '.join(requirements)}{built} ...")
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "install.log"
    call([sys.executable, "-m", "venv", "--clear", os.fspath(venv)], log, "the virtual environment was not made")
    install = [os.fspath(python), "-m", "pip", "install", "--disable-pip-version-check", *constraints, *requirements]
    call(install, log, f"{requirements[0]} was not installed", variables)
    stamp.write_text(content, encoding="utf-8")
    return python


def installed_version(python: Path, package: str) -> str:
    """The version of a package in another environment."""
    command = [os.fspath(python), "-c", f"from importlib.metadata import version; print(version({package!r}))"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=child_environment(), check=True)
    return done.stdout.strip()
