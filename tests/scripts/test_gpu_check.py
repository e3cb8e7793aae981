"""`scripts/gpu_check`: a dry run through every part, and what is told where there is no GPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_checks import driver, wheels
from gpu_checks.context import DRY
from gpu_checks.driver import DeviceMemory, find_gpu
from gpu_checks.errors import CheckError
from gpu_checks.main import PARTS, main
from gpu_checks.packing import check_sums, write_sums
from gpu_checks.parts.exactness import BASE, COUNT, _pinned
from specrun.runtime.kv_cache import KVCache

from .conftest import SCRIPTS


def check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_check"), *arguments],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=600,
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder that a dry run wrote, and the figures of each part."""
    folder = tmp_path_factory.mktemp("dry") / "out"
    # Far more time than it takes: a busy machine must not fail it.
    done = check("--dry-run", "--threads", "1", "--patience", "20", "--output", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all parts went well" in done.stdout
    return folder, json.loads((folder / "gpu_check.json").read_text())


def figures(dry: tuple[Path, dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(part for part in dry[1]["parts"] if part["name"] == name)["figures"]
    return found


def test_a_dry_run_walks_every_part(dry: tuple[Path, dict[str, Any]]) -> None:
    folder, value = dry
    assert [(part["name"], part["status"]) for part in value["parts"]] == [(part.name, "ok") for part in PARTS]
    assert (value["device"], value["dry_run"], value["finished"], value["errors"]) == ("cpu", True, True, {})
    assert value["environment"]["computes_on"] == "CPUExecutionProvider"
    assert value["environment"]["onnxruntime"]
    table = (folder / "gpu_check.txt").read_text()
    assert all(f"== {part.title}: ok" in table for part in PARTS)


def test_dry_logits(dry: tuple[Path, dict[str, Any]]) -> None:
    rows = figures(dry, "correctness")["logits"]
    assert {row["precision"] for row in rows} == set(DRY.precisions)
    assert all(row["bit_equal"] for row in rows if row["against"].startswith("itself"))
    against = {row["precision"]: row for row in rows if row["against"] == "fp32 on cpu"}
    assert against["fp32"]["logit_rmse"] == 0
    assert 0 < against["int8"]["logit_rmse"] < 0.5
    assert against["int8"]["argmax_agreement"] > 0.8


def test_dry_exactness(dry: tuple[Path, dict[str, Any]]) -> None:
    found = figures(dry, "exactness")
    assert found["exactness"] == dict.fromkeys(DRY.precisions, "bitwise")
    assert found["unequal"] == 0
    # greedy and coupled, K fixed and adaptive, of each method but plain decoding and the one that auto stands for
    assert found["cases"] == len(DRY.precisions) * 4 * (len(DRY.methods) - 2)
    assert [(row["precision"], row["width"]) for row in found["pinned_rows"]] == [
        (precision, width) for precision in DRY.precisions for width in DRY.pinned
    ]
    assert all(row["equal_rows"] == 1 and not row["junk_matters"] for row in found["pinned_rows"])


def test_dry_costs(dry: tuple[Path, dict[str, Any]]) -> None:
    for name, widths, batches in (("costs", DRY.widths, DRY.batches), ("big_costs", DRY.big_widths, DRY.big_batches)):
        found = figures(dry, name)
        assert [row["batch"] for row in found["v"]] == list(batches)
        assert [list(row) for row in found["ms"]] == [["batch", *map(str, widths)]] * len(batches)
        assert found["v"][0]["1"] == 1
        assert found["left_out"] == {}
        for row, inside in zip(found["ms"], found["inside_ms"], strict=True):
            assert all(0 < inside[str(width)] < row[str(width)] for width in widths)


def test_dry_speed(dry: tuple[Path, dict[str, Any]]) -> None:
    rows = figures(dry, "speed")["speed"]
    assert [(row["precision"], row["method"]) for row in rows] == [
        (precision, method) for precision in DRY.precisions for method in ("baseline", *DRY.methods)
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert all(row["equal_texts"] == "1/1" for row in rows if row["method"] != "baseline")
    assert all(row["ratio"] == 1 for row in rows if row["method"] == "baseline")


def test_dry_synthetic(dry: tuple[Path, dict[str, Any]]) -> None:
    found = figures(dry, "synthetic")
    cells = found["cells"]
    assert [(cell["acceptance"], cell["draft_length"]) for cell in cells] == [
        (alpha, k) for k in DRY.draft_lengths for alpha in (0.0, *DRY.acceptances)
    ]
    assert found["all_equal"]
    for cell in cells:
        k, alpha, phi = cell["draft_length"], cell["acceptance"], cell["phi"]
        expected = sum(alpha**place for place in range(k + 1))
        assert cell["expected_tokens"] == pytest.approx(expected)
        assert cell["theorem"] == pytest.approx(expected / (k * phi + 1))
        assert cell["predicted"] == pytest.approx(expected / (k * phi + cell["verify"] + cell["rest"]))
        assert cell["error"] == pytest.approx(cell["predicted"] / cell["speedup"] - 1)


def test_dry_kv_memory(dry: tuple[Path, dict[str, Any]]) -> None:
    found = figures(dry, "kv_memory")
    assert [step["what"] for step in found["steps"]] == [
        "the target, with KV of one row",
        "the draft, with KV of one row",
        "KV of the target",
        "KV of the draft",
    ]
    assert found["batch"] == DRY.kv_batch
    # keys and values of 2 layers, 2 heads of 16 values of 4 bytes; and of 1 layer
    positions = DRY.kv_batch * DRY.kv_positions
    assert found["arithmetic_gb"]["target"] * 1e9 == pytest.approx(2 * 2 * 2 * 16 * 4 * positions)
    assert found["arithmetic_gb"]["draft"] * 1e9 == pytest.approx(2 * 1 * 2 * 16 * 4 * positions)
    assert found["llama_7b_fp16_gb"] == pytest.approx(34.36, abs=0.01)
    assert found["essay_gb"] == [7.73, 16.90]


def test_dry_batches(dry: tuple[Path, dict[str, Any]]) -> None:
    rows = figures(dry, "batches")["throughput"]
    assert [(row["rows"], row["method"]) for row in rows] == [
        (size, method) for size in DRY.batches for method in ("none", "auto")
    ]
    assert all(row["tokens_per_s"] > 0 and row["different_texts"] == 0 for row in rows)


# Where there is no GPU


def test_no_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("Error: There is no NVIDIA GPU that this program can use (no libcuda")
    assert "--device cpu" in error
    assert list(tmp_path.iterdir()) == []


class FakeDriver:
    """The functions of libcuda that are called, over numbers that stand here."""

    def __init__(self, count: int = 1, code: int = 0) -> None:
        self.count, self.code, self.free = count, code, 60 << 30

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.count
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:  # noqa: N802
        device._obj.value = number
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:  # noqa: N802
        name.value = b"Some GPU"
        return 0

    def cuDeviceTotalMem_v2(self, memory: Any, device: Any) -> int:  # noqa: N802
        memory._obj.value = 80 << 30
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 13010
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:  # noqa: N802
        free._obj.value, total._obj.value = self.free, 80 << 30
        return 0


def use(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)


@pytest.mark.parametrize(
    ("fake", "says"), [(FakeDriver(count=0), "the driver shows none"), (FakeDriver(code=100), "driver answers 100")]
)
def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver, says: str) -> None:
    use(monkeypatch, fake)
    with pytest.raises(CheckError, match=says):
        find_gpu()


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    use(monkeypatch, fake)
    gpu = find_gpu()
    assert (gpu.name, gpu.memory, gpu.cuda) == ("Some GPU", 80 << 30, "13.1")
    memory = DeviceMemory("cuda")
    assert memory.read() == (20 << 30, 60 << 30)
    fake.free -= 1 << 30
    assert memory.read() == (21 << 30, 59 << 30)


def test_the_memory_of_a_process() -> None:
    memory = DeviceMemory("cpu")
    before, free = memory.read()
    held = np.ones(1 << 24)
    after, _ = memory.read()
    assert held.nbytes * 0.9 < after - before < held.nbytes * 1.5
    assert free > 0


# The folder


@pytest.mark.parametrize(
    ("files", "says"),
    [([], "holds 0 .gguf files"), (["a.gguf", "b.gguf"], "holds 2 .gguf files")],
)
def test_a_folder_without_the_model(
    tmp_path: Path, files: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"GGUF")
    assert main([str(tmp_path), "--device", "cpu", "--output", str(tmp_path / "out")]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dry-run", "--only", "install", "--output", "FILE"),
        ("--dry-run", "--only", "install", "--output", "FILE/below"),
        ("--dry-run", "--only", "install", "--work", "FILE"),
        ("collect", "FILE"),
        ("join", "FILE", "--parts", "FOLDER"),
        ("pack", "FOLDER", "--parts", "FILE"),
    ],
)
def test_a_path_that_is_something_else(
    tmp_path: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "a file", tmp_path / "folder"
    file.write_text("kept")
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"GGUF")
    places = [word.replace("FILE", str(file)).replace("FOLDER", str(folder)) for word in arguments]
    assert main(places) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"Error: {file}")
    assert error.count("\n") == 1
    assert file.read_text() == "kept"


@pytest.mark.parametrize("option", ["--limit", "--patience"])
@pytest.mark.parametrize("value", ["nan", "0", "-3", "inf", "much"])
def test_numbers_that_cannot_be(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--dry-run", option, value])
    assert ended.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_a_damaged_wheel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    (folder / "wheels").mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF")
    wheel = write_wheel(folder / "wheels")
    write_sums(folder)
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"?")
    assert main([str(folder), "--device", "cpu"]) == 1
    assert f"wheels/{wheel.name} in {folder} is damaged" in capsys.readouterr().err


def write_wheel(folder: Path, name: str = "only_here") -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "VALUE = 7\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_are_unpacked_beside(tmp_path: Path) -> None:
    wheels.install([write_wheel(tmp_path)], tmp_path / "site")
    assert (tmp_path / "site" / "only_here" / "__init__.py").is_file()
    broken = tmp_path / "broken-1.0-py3-none-any.whl"
    broken.write_bytes(b"no zip file")
    with pytest.raises(CheckError, match="could not install"):
        wheels.install([broken], tmp_path / "site")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("onnx-ir>=0.1.12", "onnx-ir"),
        ("onnx_ir-1.1.0-py3-none-any.whl", "onnx-ir"),
        ("onnxruntime_gpu-1.31.1-cp312-cp312-manylinux_2_28_x86_64.whl", "onnxruntime-gpu"),
        ("huggingface_hub>=1.2", "huggingface-hub"),
        ("Jinja2", "jinja2"),
        ("ml_dtypes-0.6.0-cp312-cp312-x.whl", "ml-dtypes"),
    ],
)
def test_names_of_projects(text: str, name: str) -> None:
    assert wheels.project_name(text) == name


def test_what_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requirements of pyproject.toml for the asked Python, without what the machine has, with sums of all files."""
    commands: list[list[str]] = []

    def download(command: list[str]) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        for name in ("onnxruntime_gpu-1.31.1-cp312-cp312-x", "numpy-2.4.0-cp312-cp312-x", "onnx-1.23.2-cp312-abi3-x"):
            (tmp_path / "wheels" / f"{name}.whl").write_bytes(name.encode())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", download)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    kept = wheels.collect(tmp_path, python_version="3.12", without=["numpy", "click"], cuda=True)
    assert kept == ["onnx-1.23.2-cp312-abi3-x.whl", "onnxruntime_gpu-1.31.1-cp312-cp312-x.whl"]
    (command,) = commands
    assert command[command.index("--python-version") + 1] == "3.12"
    assert "--only-binary" in command
    wanted = {wheels.project_name(item) for item in command[command.index(wheels.PLATFORMS[-1]) + 1 :]}
    assert {"onnx", "onnx-ir", "gguf", "onnxruntime-gpu"} <= wanted
    assert not {"numpy", "click"} & wanted
    assert any(item.startswith("onnxruntime-gpu[cuda,cudnn]") for item in command)
    check_sums(tmp_path)
    assert "m.gguf" in (tmp_path / "SHA256SUMS").read_text()


# A part's own arithmetic


class Place:
    """A session whose logits depend on the place in the run by `slot`, and on the token before by `neighbour`."""

    def __init__(self, slot: float, neighbour: float = 0.0) -> None:
        self.cache = KVCache(layers=1, kv_heads=1, head_dim=8, capacity=1, limit=4096)
        self.sizes = type("Sizes", (), {"tokens": 50})
        self._slot, self._neighbour = slot, neighbour

    def rewind_to(self, length: int) -> None:
        self.cache.rewind_to(min(length, self.cache.lengths[0]))

    def run(self, tokens: list[int], *, rows: int) -> np.ndarray:
        start = self.cache.lengths[0]
        self.cache.lengths[0] += len(tokens)
        logits = np.zeros((len(tokens), 50), np.float32)
        for place in range(len(tokens)):
            logits[place] = np.sin(np.arange(50) * (1 + start + place))
            logits[place, 3] += self._slot * place + self._neighbour * sum(tokens[place + 1 :])
        return logits[len(tokens) - rows :]


def test_pinned_rows_are_told_apart() -> None:
    ids = [int(token) for token in np.random.default_rng(0).integers(0, 50, BASE + COUNT + 8)]
    even: Any = Place(0.0)
    assert _pinned(even, ids, 4) == {
        "width": 4,
        "junk_matters": False,
        "equal_rows": 1.0,
        "largest": 0.0,
        "argmax_flips": 0,
        "undecided": 0.0,
    }
    sloped: Any = Place(0.25)
    found = _pinned(sloped, ids, 4)
    assert found["equal_rows"] == 0.25  # the first place of each run
    assert found["largest"] == pytest.approx(0.75, abs=1e-6)
    assert not found["junk_matters"]
    assert found["undecided"] > 0
    leaking: Any = Place(0.0, 1e-3)
    assert _pinned(leaking, ids, 4)["junk_matters"]
