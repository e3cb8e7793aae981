"""What importing and using the runtime pulls in."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from .conftest import TinyModels

FORBIDDEN = (
    "torch",
    "onnx",
    "onnx_ir",
    "click",
    "transformers",
    "gguf",
    "safetensors",
    "specrun.export",
    "specrun.cli",
)


def modules(code: str) -> dict[str, Any]:
    program = f"import json, sys, time\nstart = time.perf_counter()\n{code}\n"
    program += "print(json.dumps({'s': time.perf_counter() - start, 'modules': sorted(sys.modules)}))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_importing_the_runtime_is_light() -> None:
    """No torch, onnx, click or exporter; ONNX Runtime and Jinja only when they are used."""
    found = modules("import specrun.runtime")
    loaded = set(found["modules"])
    assert not loaded & {*FORBIDDEN, "onnxruntime", "jinja2", "huggingface_hub", "scipy"}
    assert not loaded & {"asyncio", "concurrent.futures", "llguidance"}
    assert found["s"] < 3.0
    everything = modules(
        "import importlib, pkgutil, specrun.runtime\n"
        "for m in pkgutil.walk_packages(specrun.runtime.__path__, 'specrun.runtime.'): importlib.import_module(m.name)"
    )
    assert "specrun.runtime.verify" in everything["modules"]
    assert not set(everything["modules"]) & {*FORBIDDEN, "onnxruntime"}


@pytest.mark.parametrize("name", ["specrun.runtime", "specrun.models_cache.layout"])
def test_importing_has_no_side_effects(name: str) -> None:
    found = modules(
        f"import os, threading\nbefore = dict(os.environ), threading.active_count()\nimport {name}\n"
        "assert before == (dict(os.environ), threading.active_count())"
    )
    assert name in found["modules"]


def test_generating_pulls_in_no_more(models: TinyModels) -> None:
    """A whole chat turn with a draft: still no torch, onnx, click or exporter."""
    models.bundle("tgt"), models.bundle("mix")
    found = modules(
        "from specrun.runtime import Engine\n"
        "with Engine.load('tgt', draft='mix', threads=1) as engine:\n"
        "    assert engine.generate('hello', max_tokens=8).usage.completion_tokens\n"
        "    assert list(engine.chat().send('hello', max_tokens=8, method='ngram', temperature=1.0))"
    )
    loaded = set(found["modules"])
    assert "onnxruntime" in loaded
    assert not loaded & set(FORBIDDEN)
