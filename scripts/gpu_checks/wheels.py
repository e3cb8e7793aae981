"""The folder that the check runs from: wheels for a machine without a network, and the default model's weights."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpu_checks.errors import CheckError
from gpu_checks.packing import write_sums

ROOT: Final = Path(__file__).resolve().parents[2]
PLATFORMS: Final = (*(f"manylinux_2_{minor}_x86_64" for minor in range(34, 16, -1)), "manylinux2014_x86_64")
CUDA_EXTRA: Final = "[cuda,cudnn]"


def needs() -> list[str]:
    """The requirements of specrun on a GPU, as pyproject.toml names them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["gpu"]]


def project_name(requirement: str) -> str:
    """The name in a requirement or a wheel's file name, as package indexes compare it: "onnx-ir>=0.1" is "onnx-ir"."""
    found = re.match(r"[A-Za-z0-9._]+(-(?!\d)[A-Za-z0-9._]+)*", requirement)
    return re.sub(r"[-_.]+", "-", found[0] if found else requirement).lower()


def collect(folder: Path, *, python_version: str, without: Sequence[str] = (), cuda: bool = False) -> list[str]:
    """Download into FOLDER/wheels what specrun needs there, and copy the default model's weights beside them.

    python_version: of the machine that will run the check ("3.12"). without: packages that it has already. cuda: also
    NVIDIA's libraries (2 GB), for a machine that has only the driver. Returns the names of the wheels. The weights
    come from the cache, or from wherever `specrun models pull` takes them. Raises CheckError if pip finds no wheels.
    """
    left_out = {project_name(name) for name in without}
    wanted = [name for name in needs() if project_name(name) not in left_out]
    if cuda:
        wanted = [re.sub(r"^(onnxruntime-gpu)", rf"\1{CUDA_EXTRA}", name) for name in wanted]
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(wheels)]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python_version]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    if subprocess.run([*command, *wanted]).returncode != 0:
        raise CheckError("pip could not download the wheels: check the network and the Python version.")
    for wheel in wheels.glob("*.whl"):
        if project_name(wheel.name) in left_out:
            wheel.unlink()
    _copy_weights(folder)
    write_sums(folder)
    return sorted(wheel.name for wheel in wheels.glob("*.whl"))


def _copy_weights(folder: Path) -> None:
    if next(folder.glob("*.gguf"), None) is not None:
        return
    from specrun.models_cache.errors import SpecrunError
    from specrun.models_cache.sources import fetch_source

    try:
        fetched = fetch_source("smollm2-135m")
    except SpecrunError as error:
        raise CheckError(f"The default model's weights are not to be had ({error}): put a .gguf file there.") from error
    shutil.copyfile(fetched.path, folder / "smollm2-135m.gguf")


def install(wheels: Sequence[Path], site: Path) -> None:
    """Unpack wheels into the folder `site`, without a network and without touching the installed packages.

    Raises CheckError with pip's reason.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        raise CheckError(f"pip could not install the wheels: {lines[-1]}")


def link_checkout(folder: Path) -> None:
    """Make `folder` an import path for specrun as it stands in this checkout."""
    package = folder / "specrun"
    package.mkdir(parents=True, exist_ok=True)
    for part in ("cli", "export", "models_cache", "runtime"):
        if not (package / part).exists():
            (package / part).symlink_to(ROOT / part, target_is_directory=True)
