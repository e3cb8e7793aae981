"""The program inside the sandbox: runs a solution and its tests, and tells which passed.

It runs alone, behind `sandbox_walls.py`, as `python -I -c`: so it imports nothing but Python's own. Whatever the
solution does to Python (other built-in functions, an exit, a thread) happens after everything that the tests and the
reports need was put aside. A line counts only with the token, which stands in no file and in no variable of a module.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
import unittest
from collections.abc import Callable
from typing import Any

_MOST_REASON = 300


def run_tests(spec: dict[str, Any], results: int) -> None:
    """Run what `spec` says in this process, write a line for each test that passes to the file `results`, and end.

    Lines are "TOKEN pass INDEX", "TOKEN fail INDEX REASON" and "TOKEN broken REASON".
    """
    leave, write, run, compiled = os._exit, os.write, exec, compile
    token = spec.pop("token")
    kind, tests, entry = spec["kind"], spec["tests"], spec["entry_point"]
    case_result, suite, modules = unittest.TestResult, unittest.TestSuite, dict(sys.modules)
    owners: list[Any] = [unittest, unittest.case, unittest.result, unittest.suite]
    for module in owners[:4]:
        owners += [part for part in vars(module).values() if getattr(part, "__module__", "") == module.__name__]
    kept = [(owner, dict(vars(owner))) for owner in owners if isinstance(owner, (type, types.ModuleType))]
    built_in, pristine = vars(builtins), dict(vars(builtins))

    def say(line: str, write: Callable[[int, bytes], int] = write) -> None:
        write(results, f"{token} {line[:_MOST_REASON]!a}\n".encode("ascii"))

    try:
        steps = [compiled(source, "tests.py", "exec", dont_inherit=True) for source in spec["steps"]]
        solution = types.ModuleType("solution")
        sys.modules["solution"] = solution
        space: dict[str, Any] = {"__builtins__": pristine, "__name__": "tests"}
        sys.path.insert(0, ".")
        # From here on nothing can be trusted but the names of this function.
        run(compiled(spec["solution"], "solution.py", "exec", dont_inherit=True), vars(solution))
        built_in.update(pristine)
        for name, value in list(vars(solution).items()):
            if name not in pristine and not (name.startswith("__") and name.endswith("__")):
                space[name] = value
        if entry is not None:
            if entry not in vars(solution):
                say(f"broken there is no {entry} in the answer")
                leave(0)
            space[entry] = vars(solution)[entry]
    except BaseException as error:
        say(f"broken {type(error).__name__}: {error}")
        leave(0)

    sys.modules.update(modules)
    for owner, parts in kept:
        for name in set(vars(owner)).difference(parts):
            delattr(owner, name)
        for name, part in parts.items():
            if name not in ("__dict__", "__weakref__"):
                setattr(owner, name, part)
    if kind == "asserts":
        for source, step in zip(tests, steps, strict=True):
            try:
                run(step, space)
            except BaseException as error:
                say(f"fail {source} {type(error).__name__}: {error}")
                if source is None:
                    leave(0)
                continue
            if source is not None:
                say(f"pass {source}")
        leave(0)

    try:
        for step in steps:
            run(step, space)
    except BaseException as error:
        say(f"broken {type(error).__name__}: {error}")
        leave(0)
    for index, test in enumerate(tests):
        try:
            if kind == "check":
                space["check"](space[entry])
            elif isinstance(test, str):
                space[test]()
            else:
                owner, method = test
                found = case_result()
                suite([space[owner](method)]).run(found)  # which sets the class up too
                if found.testsRun != 1 or not found.wasSuccessful() or found.skipped:
                    problems = [*found.failures, *found.errors]
                    say(f"fail {index} {problems[0][1].strip().splitlines()[-1] if problems else 'skipped'}")
                    continue
        except BaseException as error:
            say(f"fail {index} {type(error).__name__}: {error}")
            continue
        say(f"pass {index}")
    leave(0)
