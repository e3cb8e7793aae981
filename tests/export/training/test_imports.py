"""Who may import what: only training uses the runtime, and what writes text needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys


def loaded(code: str) -> set[str]:
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_rest_of_export_does_without_the_runtime() -> None:
    modules = loaded(
        "import importlib, pkgutil, specrun.export\n"
        "for m in pkgutil.iter_modules(specrun.export.__path__, 'specrun.export.'):\n"
        "    if not m.ispkg: importlib.import_module(m.name)"
    )
    assert "specrun.export.speculators" in modules
    assert not {name for name in modules if name.startswith(("specrun.runtime", "specrun.cli"))}
    assert "torch" not in modules


def test_writing_text_needs_no_torch() -> None:
    modules = loaded("import specrun.export.training.text_writer")
    assert "specrun.runtime.session" in modules
    assert not modules & {"torch", "click", "specrun.cli"}


def test_the_command_says_what_is_missing_before_anything_is_loaded() -> None:
    modules = loaded("import specrun.cli.train")
    assert not modules & {"torch", "onnx_ir", "onnxruntime"}
