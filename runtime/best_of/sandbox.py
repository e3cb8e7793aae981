"""A sandbox for code that a model wrote, with the tests that it must pass.

What it is for: code that fails in ordinary ways (loops, eats memory, floods its output, forks, deletes files, ends
itself) and answers that cheat in simple ones (an exit before the tests, other built-in functions). What holds:

- everywhere: a process group and session of its own, an environment of three settings, no stdin, no output, Python's
  isolated mode, limits on CPU time, memory (not on macOS), file size, open files and processes, and a clock that ends
  the group;
- on Linux, where the system allows namespaces (`Outcome.walled`): no network, no sight of other processes and no way to
  signal them, every file read-only but for a small /tmp in memory, an empty /run, and nothing that outlives the run;
- run by root: it becomes the user nobody first.

What does not: the kernel is the same one, files that the user can read can be read, services that listen on a socket in
the user's folders can be reached, and without namespaces the code can do to the user's files and processes what the
user can. It is one Python process with its tests, so code that sets out to search Python's memory for the token that
the reports carry can claim to have passed, and so can code that changes a module of which the tests make use. Memory is
bounded for each process, not for all of them together.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any, Final

from specrun.models_cache.errors import ScoreError, UsageError
from specrun.runtime.best_of import sandbox_program, sandbox_walls
from specrun.runtime.best_of.answers import python_program

_MOST_REPORT: Final = 1 << 18
_START_SECONDS: Final = 60.0
_TICK: Final = 0.05
# Of a machine with many cores, libraries would start more threads than there may be processes.
_ENVIRONMENT: Final = {"LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_PARTS: Final = "from __future__ import annotations\n"

_START: Final = """
def _main():
    import json
    given, results = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(given, "rb") as file:
        spec = json.loads(file.read())
    die_with_parent()
    user = os.getuid()
    others = count_processes(user or NOBODY)
    walled = close_off(spec["limits"]["DISK"]) if spec.pop("walls") else False
    outer = os.fork() if walled else 0
    if outer == 0:
        if walled:
            hide_processes()
        drop_rights()
        die_with_parent()
        limits = spec.pop("limits")
        if not (walled and user):  # a user namespace counts its own
            limits["NPROC"] += others
        del limits["DISK"]
        set_limits(limits)
        token = spec["token"].encode("ascii")
        os.write(results, token + (b" 'walled'\\n" if walled else b" 'open'\\n"))
        inner = os.fork()
        if inner == 0:
            die_with_parent()
            run_tests(spec, results)
        os.close(results)
        os.waitpid(inner, 0)
        os._exit(0)
    os.close(results)
    os.waitpid(outer, 0)
    os._exit(0)

def count_processes(user):
    found = 0
    try:
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if os.stat("/proc/" + name).st_uid == user:
                        found += len(os.listdir("/proc/" + name + "/task"))
                except OSError:
                    continue
    except OSError:
        return 4096  # no /proc: whatever the user runs is below this
    return found

_main()
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use.

    seconds by the clock, for everything together; cpu_seconds, memory and file_bytes for each process; disk_bytes for
    all files together, where the sandbox is walled.
    """

    seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 24
    disk_bytes: int = 1 << 26
    processes: int = 32
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise UsageError(f"The limit {name} of the sandbox must be above 0, not {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """passed of `total` tests; `walled`: namespaces held; reason: what the first failure says, None where none is."""

    passed: int
    total: int
    walled: bool
    reason: str | None

    @property
    def share(self) -> float:
        """passed / total."""
        return self.passed / self.total


@dataclass(frozen=True, slots=True)
class UnitTests:
    """Unit tests, taken apart (`read_tests`).

    kind: "check": a function check(candidate), all or nothing; "functions": test_* functions and methods of TestCases;
    "asserts": top-level assert statements, each a test. steps: sources to run in order; tests: for "functions" a name
    or (class, method), for "asserts" the number of each step that is a test, else None.
    """

    kind: str
    steps: tuple[str, ...]
    tests: tuple[Any, ...]
    total: int
    entry_point: str | None = None


def read_tests(source: str, entry_point: str | None = None, *, name: str = "The tests") -> UnitTests:
    """Take Python tests apart, without running them.

    entry_point: the function of the answer that a check(candidate) is called with. Raises UsageError for a source that
    is no Python, holds no tests, or has a check but no entry point.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} are not valid Python ({error}): mend them.") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if any(node.name == "check" for node in functions) and entry_point is not None:
        return UnitTests("check", (source,), (None,), 1, entry_point)
    found: list[Any] = [node.name for node in functions if node.name.startswith("test")]
    for node in tree.body:
        bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
        if isinstance(node, ast.ClassDef) and any("TestCase" in base for base in bases):
            kinds = (
                ast.FunctionDef | ast.AsyncFunctionDef if any("Async" in base for base in bases) else ast.FunctionDef
            )
            methods = [part.name for part in node.body if isinstance(part, kinds)]
            found += [[node.name, method] for method in methods if method.startswith("test")]
    if found:
        return UnitTests("functions", (source,), tuple(found), len(found), entry_point)
    steps, numbers, total = [], [], 0
    for statement in tree.body:
        steps.append(ast.unparse(statement))
        numbers.append(total if isinstance(statement, ast.Assert) else None)
        total += isinstance(statement, ast.Assert)
    if not total:
        raise UsageError(
            f"{name} hold no test: write test_ functions, a unittest.TestCase, assert statements, or check(candidate) "
            "with an entry point."
        )
    return UnitTests("asserts", tuple(steps), tuple(numbers), total, entry_point)


def run_in_sandbox(solution: str, tests: UnitTests, limits: Limits | None = None, *, walls: bool = True) -> Outcome:
    """Run `tests` against the Python source `solution` in a sandbox (see the module) and say how many pass.

    walls: try namespaces. A test that the clock or a limit cuts off fails, and so do those after it. Raises UsageError
    on a system without fork and resource limits (Windows), ScoreError where the sandbox itself cannot be started.
    """
    if not hasattr(os, "fork") or sys.platform == "win32":
        raise UsageError("Unit tests as a score need Linux or macOS: score with a command instead.")
    limits = limits or Limits()
    token = secrets.token_hex(16)
    spec = {
        "token": token,
        "walls": walls,
        "solution": solution,
        "kind": tests.kind,
        "steps": tests.steps,
        "tests": tests.tests,
        "entry_point": tests.entry_point,
        "limits": {
            "CPU": limits.cpu_seconds,
            "AS": limits.memory_bytes,
            "FSIZE": limits.file_bytes,
            "NOFILE": limits.open_files,
            "NPROC": limits.processes,
            "CORE": 0,
            "DISK": limits.disk_bytes,
        },
    }
    with tempfile.TemporaryDirectory(prefix="specrun-tests-", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o777)
        report = _run(json.dumps(spec).encode("ascii"), folder, limits.seconds, token.encode("ascii"))
    return _outcome(report, token, tests.total)


def _run(spec: bytes, folder: str, seconds: float, token: bytes) -> tuple[bytes, bool]:
    """What the program reported, and whether it ended in time."""
    results, write_end = os.pipe()
    try:
        with tempfile.TemporaryFile() as given:
            given.write(spec)
            given.flush()
            given.seek(0)
            command = [python_program(), "-I", "-c", _program(), str(given.fileno()), str(write_end)]
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_ENVIRONMENT,
                    cwd=folder,
                    pass_fds=(given.fileno(), write_end),
                    start_new_session=True,
                )
            except OSError as error:
                raise ScoreError(f"The sandbox cannot be started: {error.strerror or error}.") from error
            os.close(write_end)
            write_end = -1
        try:
            return _read(results, process, seconds, token)
        finally:
            _end(process)
    finally:
        os.close(results)
        if write_end >= 0:
            os.close(write_end)


def _read(results: int, process: subprocess.Popen[bytes], seconds: float, token: bytes) -> tuple[bytes, bool]:
    """The clock begins with the first report, and stands still while this process, and so perhaps all, is stopped."""
    report, used, started, last = b"", 0.0, False, time.monotonic()
    while used < (seconds if started else _START_SECONDS):
        ended = process.poll() is not None
        if select.select([results], [], [], 0 if ended else _TICK)[0]:
            block = os.read(results, 1 << 16)
            report += block
            if not block or len(report) > _MOST_REPORT:
                return report, True
        elif ended:  # something that it started may hold the pipe open
            return report, True
        now = time.monotonic()
        used += min(now - last, 5 * _TICK)
        last = now
        if not started and token in report:
            started, used = True, 0.0
    return report, False


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _program() -> str:
    parts = [inspect.getsource(module) for module in (sandbox_walls, sandbox_program)]
    return "\n".join([_PARTS, *(part.replace(_PARTS, "") for part in parts), _START])


def _outcome(found: tuple[bytes, bool], token: str, total: int) -> Outcome:
    report, in_time = found
    passed: set[int] = set()
    walled, started, reason = False, False, None
    for line in report.split(b"\n"):
        mark, _, rest = line.partition(b" ")
        if mark != token.encode("ascii"):
            continue
        words = str(ast.literal_eval(rest.decode("ascii")))
        word, _, more = words.partition(" ")
        number, _, said = more.partition(" ")
        if word in ("walled", "open"):
            walled, started = word == "walled", True
        elif word == "pass" and number.isdigit() and int(number) < total:
            passed.add(int(number))
        elif word in ("fail", "broken") and reason is None:
            reason = said if word == "fail" else more
    if not started:
        why = "Python cannot be run in isolated mode (-I) here" if in_time else "the machine is too busy"
        raise ScoreError(f"The sandbox does not start: {why}.")
    if reason is None and len(passed) < total:
        reason = "it ended before the tests did" if in_time else "it took too long"
    return Outcome(len(passed), total, walled, reason if len(passed) < total else None)
