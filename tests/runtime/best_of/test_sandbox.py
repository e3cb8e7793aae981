"""The sandbox against code that misbehaves, with and without the walls of Linux, and against code that cheats."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specrun.models_cache.errors import UsageError
from specrun.runtime.best_of import sandbox
from specrun.runtime.best_of.sandbox import Limits, Outcome, UnitTests, read_tests, run_in_sandbox

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the sandbox needs fork")

CHECK = read_tests("def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 3\n", "f")
GOOD = "def f(x):\n    return x + 1\n"
LIMITS = Limits(seconds=30.0, cpu_seconds=1, memory_bytes=1 << 28, processes=16)


def run(solution: str, tests: UnitTests = CHECK, *, walls: bool = True, limits: Limits = LIMITS) -> Outcome:
    return run_in_sandbox(solution, tests, limits, walls=walls)


@pytest.fixture(scope="module")
def walls_here() -> bool:
    return run(GOOD).walled


@pytest.fixture(params=[True, False], ids=["walled", "open"])
def walls(request: pytest.FixtureRequest, walls_here: bool) -> bool:
    if request.param and not walls_here:
        pytest.skip("this system allows no namespaces")
    return bool(request.param)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of ours outlives a test, and this one was not hit."""
    handler = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    before = children()
    yield
    assert children() <= before
    signal.signal(signal.SIGUSR1, handler)


def children() -> set[int]:
    """Processes that this one started and that are still there, as far as the system tells."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            found.add(int(path.parent.name))
    return found


def test_right_and_wrong(walls: bool) -> None:
    assert run(GOOD, walls=walls) == Outcome(1, 1, walls, None)
    assert run("def f(x):\n    return 2\n", walls=walls) == Outcome(0, 1, walls, "AssertionError: ")
    assert run("def f(x):\n    return y\n", walls=walls).reason == "NameError: name 'y' is not defined"


@pytest.mark.parametrize(
    ("solution", "reason"),
    [
        ("def f(x:\n", "SyntaxError"),
        ("def g(x):\n    return 1\n", "there is no f in the answer"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("import no_such_module\n", "ModuleNotFoundError"),
        ("input()\n" + GOOD, "EOFError"),
        ("f = 3\n", "'int' object is not callable"),
        ("x = '\\0'\n\0", "null bytes"),
    ],
)
def test_answers_that_are_no_code(solution: str, reason: str) -> None:
    outcome = run(solution)
    assert outcome.passed == 0
    assert reason in (outcome.reason or "")


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(0)", "raise SystemExit", "os._exit(0)", "os.kill(os.getpid(), 9)", "os.abort()", "exit()", "quit(0)"],
)
@pytest.mark.parametrize("place", ["before", "inside"])
def test_an_end_before_the_tests_is_no_pass(ending: str, place: str, walls: bool) -> None:
    solution = "import os, sys\n"
    solution += f"{ending}\n{GOOD}" if place == "before" else f"def f(x):\n    {ending}\n"
    assert run(solution, walls=walls).passed == 0


def test_a_loop_runs_into_the_limit_of_processor_time(walls: bool) -> None:
    started = time.monotonic()
    outcome = run("def f(x):\n    while True:\n        pass\n", walls=walls)
    assert (outcome.passed, outcome.reason) == (0, "it ended before the tests did")
    assert time.monotonic() - started < LIMITS.seconds


def test_a_sleep_runs_into_the_clock(walls: bool) -> None:
    solution = "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)\n"
    outcome = run(solution, walls=walls, limits=Limits(seconds=1.0))
    assert (outcome.passed, outcome.reason) == (0, "it took too long")


def test_memory_is_bounded(walls: bool) -> None:
    outcome = run("def f(x):\n    return len(bytearray(1 << 29)) and 2\n", walls=walls)
    assert (outcome.passed, outcome.reason) == (0, "MemoryError: ")
    hungry = "def f(x):\n    kept = []\n    while True:\n        kept.append(bytearray(1 << 20))\n"
    assert run(hungry, walls=walls).passed == 0


def test_output_goes_nowhere(walls: bool) -> None:
    loud = "import sys\n" + "for _ in range(200):\n    print('x' * 10**6)\n    sys.stderr.write('y' * 10**6)\n" + GOOD
    assert run(loud, walls=walls).passed == 1


def test_a_fork_bomb_is_bounded(walls: bool) -> None:
    solution = "import os\ndef f(x):\n    while True:\n        os.fork()\n"
    started = time.monotonic()
    outcome = run(solution, walls=walls, limits=Limits(seconds=20.0, cpu_seconds=2, processes=16))
    assert outcome.passed == 0
    assert time.monotonic() - started < 60
    assert run(GOOD, limits=Limits(seconds=20.0, processes=64)).passed == 1


def test_killing_around_hits_nobody_else(walls: bool) -> None:
    solution = (
        "import os, signal\ndef f(x):\n"
        "    for pid in (os.getppid(), 0, -1):\n"
        "        try:\n            os.kill(pid, signal.SIGUSR1)\n            os.kill(pid, signal.SIGKILL)\n"
        "        except OSError:\n            continue\n"
        "    return x + 1\n"
    )
    if not walls and os.getuid() != 0:
        solution = solution.replace(", -1)", ")")  # that would be this process too: without walls it is not held
    run(solution, walls=walls)
    assert run(GOOD).passed == 1


def test_a_killed_parent_ends_the_run_without_a_pass_or_changes_nothing(walls: bool) -> None:
    solution = "import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(1)\n" + GOOD
    assert run(solution, walls=walls).passed == (1 if walls else 0)


def test_nothing_is_written_outside(tmp_path: Path, walls_here: bool) -> None:
    if not walls_here:
        pytest.skip("this system allows no namespaces")
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o666)
    solution = (
        f"import os\nplaces = [{str(victim)!r}, {str(tmp_path / 'new')!r}]\n"
        "places += ['/var/tmp/specrun-sandbox-test', '/run/x', '/dev/shm/x']\n"
        "written = 0\nfor place in places:\n    try:\n        open(place, 'w').write('hit')\n        written += 1\n"
        "    except OSError:\n        continue\n"
        f"try:\n    os.remove({str(victim)!r})\n    written += 1\nexcept OSError:\n    written += 0\n"
        "import tempfile\nopen('inside', 'w').write('fine')\n"
        "tempfile.NamedTemporaryFile('w').write('fine')\n"
        "def f(x):\n    assert written == 0, written\n    assert open('inside').read() == 'fine'\n    return x + 1\n"
    )
    assert run(solution).reason is None
    assert victim.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [victim]
    assert not Path("/var/tmp/specrun-sandbox-test").exists()


def test_the_walls_cannot_be_taken_down(walls_here: bool) -> None:
    if not walls_here:
        pytest.skip("this system allows no namespaces")
    solution = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "tried = [libc.mount(None, b'/', None, 32, None), libc.umount2(os.getcwd().encode(), 2), libc.setuid(0)]\n"
        "libc.unshare(0x10000000 | 0x20000)\n"
        "tried.append(libc.mount(None, b'/', None, 32 | 4096, None))\n"
        "def f(x):\n    assert tried[:2] == [-1, -1] and tried[3] == -1, tried\n"
        "    try:\n        open('/var/tmp/specrun-sandbox-test', 'w')\n    except OSError:\n        return x + 1\n"
    )
    assert run(solution).reason is None


def test_the_disk_is_bounded(walls: bool) -> None:
    solution = "data = b'x' * (1 << 20)\nwith open('big', 'wb') as file:\n    while True:\n        file.write(data)\n"
    outcome = run(solution, walls=walls, limits=Limits(seconds=20.0, file_bytes=1 << 22))
    assert "File too large" in (outcome.reason or "")
    if walls:
        many = f"for i in range(1000):\n    open(f'f{{i}}', 'wb').write(b'x' * (1 << 20))\n{GOOD}"
        outcome = run(many, limits=Limits(seconds=20.0, disk_bytes=1 << 23))
        assert "No space left" in (outcome.reason or "")


def test_there_is_no_network(walls_here: bool) -> None:
    if not walls_here:
        pytest.skip("this system allows no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        solution = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)\n{GOOD}"
        assert "OSError" in (run(solution).reason or "") or "Connection" in (run(solution).reason or "")
        server.settimeout(0.2)
        with pytest.raises(TimeoutError):
            server.accept()


def test_other_processes_are_not_seen(walls_here: bool) -> None:
    if not walls_here:
        pytest.skip("this system allows no namespaces")
    solution = (
        "import os\nseen = [n for n in os.listdir('/proc') if n.isdigit()]\n"
        "def f(x):\n    assert len(seen) <= 3, seen\n    return x + 1\n"
    )
    assert run(solution).reason is None


def test_the_environment_is_empty_and_stdin_is_closed(monkeypatch: pytest.MonkeyPatch, walls: bool) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    solution = (
        "import os, sys\ndef f(x):\n    assert not {'SECRET_TOKEN', 'PATH', 'HOME'} & set(os.environ)\n"
        "    assert len(os.environ) <= 4\n"
        "    assert sys.stdin.read() == ''\n    assert not [a for a in sys.argv[1:] if not a.isdigit()]\n"
        "    return x + 1\n"
    )
    assert run(solution, walls=walls).reason is None


@pytest.mark.parametrize(
    "cheat",
    [
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\n",
        "import builtins\nbuiltins.AssertionError = builtins.BaseException = KeyError\n",
        "import builtins\nbuiltins.all = builtins.any = builtins.isinstance = lambda *a: True\n",
        "import builtins\nbuiltins.dict = builtins.str = builtins.repr = builtins.zip = lambda *a, **k: {}\n",
        "import sys\nsys.modules['unittest'].TestResult.wasSuccessful = lambda self: True\n",
        "import sys\nfor m in list(sys.modules):\n    if m != 'sys':\n        del sys.modules[m]\n",
        "import atexit, os\natexit.register(os._exit, 0)\n",
        "import sys, threading\nthreading.excepthook = sys.excepthook = lambda *a: None\n",
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'0' * 32 + b\" 'pass 0'\\n\")\n"
        "    except OSError:\n        pass\n",
        "def check(candidate):\n    pass\n",
        "abs = lambda x: 0\nAssertionError = None\n",
    ],
)
def test_cheats_do_not_pass(cheat: str) -> None:
    tests = "def check(candidate):\n    assert abs(candidate(1) - 2) < 1e-6\n    assert all([candidate(2) == 3])\n"
    assert run(cheat + "def f(x):\n    return 7\n", read_tests(tests, "f")).passed == 0


@pytest.mark.parametrize(
    "cheat",
    [
        "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\n",
        "import unittest\nunittest.TestCase.run = unittest.TestCase.__call__ = lambda self, found: found\n",
        "import unittest\nunittest.TestResult.wasSuccessful = lambda self: True\n",
        "import sys, types\nfake = types.ModuleType('unittest')\n"
        "class TestCase:\n    def __init__(self, name): pass\n"
        "    def run(self, found): found.testsRun = 1\n"
        "fake.TestCase = TestCase\nsys.modules['unittest'] = fake\n",
        "import unittest\ndef find(self, name):\n"
        "    return (lambda *a: None) if name == 'assertEqual' else object.__getattribute__(self, name)\n"
        "unittest.TestCase.__getattribute__ = find\n",
        "import unittest.case, contextlib\n@contextlib.contextmanager\ndef quiet(self, *a, **k):\n"
        "    try:\n        yield\n    except AssertionError:\n        pass\n"
        "unittest.case._Outcome.testPartExecutor = quiet\n",
        "import unittest.case\nclass Deaf(unittest.case._Outcome):\n"
        "    def __setattr__(self, name, value): object.__setattr__(self, name, True if name == 'success' else value)\n"
        "unittest.case._Outcome = Deaf\nunittest.case._addError = lambda *a: None\n",
        "import builtins, unittest\nunittest.TestCase.assertEqual = lambda *a: None\n"
        "builtins.setattr = builtins.delattr = lambda *a: None\n",
    ],
)
def test_cheats_with_unittest_do_not_pass(cheat: str) -> None:
    tests = (
        "import unittest\nclass FTest(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(f(1), 2)\n"
    )
    assert run(cheat + "def f(x):\n    return 7\n", read_tests(tests)).passed == 0
    assert run(cheat + GOOD, read_tests(tests)).passed == 1


def test_classes_are_set_up_and_methods_awaited() -> None:
    cases = (
        "import unittest\n\nclass One(unittest.TestCase):\n"
        "    @classmethod\n    def setUpClass(cls):\n        cls.two = 2\n\n"
        "    def test_it(self):\n        self.assertEqual(f(1), self.two)\n\n"
        "class Two(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_right(self):\n        self.assertEqual(f(2), 3)\n\n"
        "    async def test_wrong(self):\n        self.assertEqual(f(2), 4)\n\n"
        "class Three(unittest.TestCase):\n"
        "    @classmethod\n    def setUpClass(cls):\n        raise KeyError('gone')\n\n"
        "    def test_it(self):\n        pass\n"
    )
    outcome = run(GOOD, read_tests(cases))
    assert (outcome.passed, outcome.total, outcome.reason) == (2, 4, "AssertionError: 3 != 4")


def test_a_flood_of_reports_is_cut() -> None:
    solution = (
        "import os\nfor fd in range(3, 64):\n    try:\n"
        "        for _ in range(100000):\n            os.write(fd, b'x' * 4096)\n"
        "    except OSError:\n        continue\n" + GOOD
    )
    assert run(solution).passed == 0


def test_shares_of_functions_methods_and_asserts() -> None:
    solution = "def add(a, b):\n    return a + b if a < 5 else 0\n"
    functions = (
        "import solution\nfrom solution import add as plus\n\n"
        "def test_small():\n    assert add(1, 2) == plus(1, 2) == solution.add(1, 2) == 3\n\n"
        "def test_large():\n    assert add(6, 1) == 7\n\ndef helper():\n    raise KeyError\n"
    )
    outcome = run(solution, read_tests(functions))
    assert (outcome.passed, outcome.total, outcome.reason) == (1, 2, "AssertionError: ")
    cases = (
        "import unittest\n\nclass AddTest(unittest.TestCase):\n    def setUp(self):\n        self.one = 1\n\n"
        "    def test_a(self):\n        self.assertEqual(add(self.one, 1), 2)\n\n"
        "    def test_b(self):\n        self.assertEqual(add(9, 1), 10)\n\n"
        "    @unittest.skip('no')\n    def test_c(self):\n        pass\n"
    )
    outcome = run(solution, read_tests(cases))
    assert (outcome.passed, outcome.total) == (1, 3)
    assert "AssertionError: 0 != 10" in (outcome.reason or "")
    asserts = "x = add(1, 1)\nassert x == 2\nassert x == 3, 'three'\nx = 4\nassert x == 4\n"
    outcome = run(solution, read_tests(asserts))
    assert (outcome.passed, outcome.total, outcome.reason) == (2, 3, "AssertionError: three")
    outcome = run(solution, read_tests("assert add(1, 1) == 2\nx = add(1)\nassert x\n"))
    assert (outcome.passed, outcome.total) == (1, 2)


def test_tests_passed_before_a_loop_count() -> None:
    solution = "def f(x):\n    while x > 2:\n        pass\n    return x + 1\n"
    outcome = run(solution, read_tests("assert f(1) == 2\nassert f(2) == 3\nassert f(3) == 4\nassert f(1) == 2\n"))
    assert (outcome.passed, outcome.total) == (2, 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "hold no test"),
        ("", "hold no test"),
        ("def check(candidate):\n    assert candidate(1)", "an entry point"),
        ("def f(:", "not valid Python"),
        ("x = '\0'", "not valid Python"),
    ],
)
def test_tests_that_are_none(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_tests(source)


def test_limits_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="limit processes of the sandbox must be above 0"):
        Limits(processes=0)


def test_a_system_without_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "win32")
    with pytest.raises(UsageError, match="need Linux or macOS"):
        run_in_sandbox(GOOD, CHECK)


def test_python_files_of_the_sandbox_import_only_pythons_own() -> None:
    """Its program is these files' text, run alone: one import of ours in them would end it at the start."""
    text = sandbox._program()
    assert "specrun" not in "\n".join(line for line in text.splitlines() if line.startswith(("import", "from")))
    assert run(GOOD).passed == 1
