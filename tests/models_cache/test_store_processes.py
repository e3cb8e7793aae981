"""Bundles against other processes: killed at every step, and two at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specrun.models_cache.integrity import verify_bundle
from specrun.models_cache.layout import find_bundle

# A child is killed at its n-th file operation below the cache root, for n = 1, 2, ... until one child lives through.
KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from conftest import write_files
from specrun.models_cache.errors import ModelNotFoundError
from specrun.models_cache.integrity import verify_bundle
from specrun.models_cache.layout import find_bundle, list_bundles
from specrun.models_cache.store import bundle_or_build
import filelock

root = Path(os.environ["SPECRUN_HOME"])
replacing = sys.argv[1] == "replacing"
left = 0

def count(event, args):
    global left
    file_work = event == "open" or event.startswith(("os.", "shutil.", "fcntl."))
    if left and file_work and event != "os.kill":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
old = bundle_or_build("tiny", write_files).digest if replacing else None
new = None
deaths = 0
while True:
    child = os.fork()
    if child == 0:
        left = deaths + 1
        bundle_or_build("tiny", lambda folder: write_files(folder, b"new " * 99), force=True)
        left = 0
        os._exit(0)
    code = os.waitpid(child, 0)[1]
    try:
        bundle = find_bundle("tiny")
    except ModelNotFoundError:
        assert not replacing, f"the old bundle is gone after {deaths} steps"
    else:
        assert verify_bundle(bundle) == [], f"a broken bundle after {deaths} steps"
        assert replacing or bundle.manifest.files["target.onnx.data"].size == 396
    assert len(list_bundles()) <= 1
    if code == 0:
        break
    assert os.WTERMSIG(code) == signal.SIGKILL
    deaths += 1
    if replacing:
        assert find_bundle("tiny").digest
        bundle_or_build("tiny", write_files, force=True)
    else:
        import shutil
        shutil.rmtree(root / "models", ignore_errors=True)
bundle = bundle_or_build("last", write_files)
assert [p for p in (root / "staging").rglob("*")] == [], "litter"
print(deaths)
"""

BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from conftest import write_files
from specrun.models_cache.store import bundle_or_build

log = Path(sys.argv[1])

def build(folder):
    with log.open("a") as stream:
        stream.write("built\\n")
    time.sleep(0.3)
    return write_files(folder)

print(bundle_or_build("tiny", build).digest)
"""

HANG_WHILE_BUILDING = """
import time
from conftest import write_files
from specrun.models_cache.store import new_bundle

with new_bundle("tiny") as staging:
    write_files(staging.path)
    print("inside", flush=True)
    time.sleep(60)
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


@pytest.mark.skipif(not hasattr(sys, "getswitchinterval") or sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("how", ["first", "replacing"])
def test_killed_at_every_step(home: Path, how: str) -> None:
    deaths = int(finish(start(KILLED_AT_EACH_STEP, how)))
    assert deaths > 20


def test_killed_while_building_and_run_again(home: Path) -> None:
    process = start(HANG_WHILE_BUILDING)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    process.kill()
    process.communicate()
    left = list((home / "staging" / "tiny").iterdir())
    assert len(left) == 1
    assert finish(start(BUILD_SLOWLY, str(home / "log"))) == find_bundle("tiny").digest
    assert list((home / "staging").iterdir()) == []


def test_two_at_once_make_one_bundle(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [start(BUILD_SLOWLY, str(log)) for _ in range(2)]
    digests = {finish(process) for process in both}
    bundle = find_bundle("tiny")
    assert digests == {bundle.digest}
    assert verify_bundle(bundle) == []
    assert log.read_text() == "built\n"
