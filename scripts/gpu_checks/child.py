"""The process of one part: python -m gpu_checks.child MODULE CONTEXT.json RESULT.json"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.context import Context
from gpu_checks.files import write_json


class Report:
    """The figures of a part, written at once so that a part that is ended later keeps them."""

    def __init__(self, path: Path) -> None:
        self.figures: dict[str, Any] = {}
        self._path = path
        self.write()

    def add(self, **figures: Any) -> None:
        """Add figures, JSON values, or replace those of the same name."""
        self.figures |= figures
        self.write()

    def write(self, error: str | None = None) -> None:
        """Write what there is."""
        write_json(self._path, {"figures": self.figures, "error": error})


def for_each(names: Sequence[str], report: Report, work: Callable[[str], None]) -> None:
    """Do the work for each name, whatever becomes of the others; raises RuntimeError at the end if one failed."""
    failed: dict[str, str] = {}
    for name in names:
        try:
            work(name)
        except Exception as error:  # as with parts
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
            report.add(failed=failed)
    if failed:
        raise RuntimeError(f"It failed for {', '.join(failed)}: {next(iter(failed.values()))}")


def main(module: str, context: str, result: str) -> int:
    """Run a part; 1 if it raised."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    report = Report(Path(result))
    try:
        importlib.import_module(module).run(Context.from_json(Path(context).read_text(encoding="utf-8")), report)
    except Exception as error:  # whatever it is, the other parts go on
        traceback.print_exc()
        report.write(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _end_with_parent() -> None:
    """Standard input ends when the check does, even if it is killed: then nothing of this part stays on the device."""
    while os.read(0, 1):  # not through sys.stdin, whose lock would be held when Python ends
        continue
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
