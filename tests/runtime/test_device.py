"""Which device a model runs on, and what is said where it cannot."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specrun.models_cache.errors import BackendError, UsageError
from specrun.runtime import Engine, backend, cuda_runtime, device, session
from specrun.runtime.backend import create_session
from specrun.runtime.calibration import probe
from specrun.runtime.device import CPU, Device, cuda_problem, draft_device, find_device, made_for, require_memory
from specrun.runtime.device_buffers import DeviceBuffers
from specrun.runtime.device_graphs import greedy_graph
from specrun.runtime.session import ModelSession, WidthRule, session_opener

from .conftest import TinyModels


class FakeRuntime:
    """The CUDA runtime library of a machine with one GPU, as far as specrun calls it."""

    def __init__(self, *, gpus: int = 1, error: int = 0, free: int = 10 << 30) -> None:
        self.gpus, self.error, self.free = gpus, error, free
        self.selected = -1

        def error_string(number: int) -> bytes:
            return b"no CUDA-capable device is detected" if number == 100 else b"invalid device ordinal"

        self.cudaGetErrorString = error_string

    def cudaGetDeviceCount(self, count: Any) -> int:  # noqa: N802 - NVIDIA's name
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self.gpus
        return self.error

    def cudaSetDevice(self, index: int) -> int:  # noqa: N802
        self.selected = index
        return 0 if index < self.gpus else 101

    def cudaMemGetInfo(self, free: Any, total: Any) -> int:  # noqa: N802
        ctypes.cast(free, ctypes.POINTER(ctypes.c_size_t))[0] = self.free
        ctypes.cast(total, ctypes.POINTER(ctypes.c_size_t))[0] = 16 << 30
        return 0

    def cudaDeviceGetAttribute(self, value: Any, number: int, index: int) -> int:  # noqa: N802
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = {75: 9, 76: 0, 16: 132}[number]
        return 0

    def cudaDriverGetVersion(self, value: Any) -> int:  # noqa: N802
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = 13010
        return 0


@pytest.fixture
def with_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ONNX Runtime that has the CUDA provider."""
    ort = backend.onnxruntime()
    monkeypatch.setattr(ort, "get_available_providers", lambda: [device.CUDA_PROVIDER, "CPUExecutionProvider"])
    monkeypatch.setattr(device, "_both_installed", lambda: False)


def use(monkeypatch: pytest.MonkeyPatch, library: FakeRuntime | None, *, cudnn: bool = True) -> None:
    monkeypatch.setattr(cuda_runtime, "_library", lambda: library)
    monkeypatch.setattr(cuda_runtime, "_has_cudnn", lambda: cudnn)


def test_a_bundle_for_the_cpu_runs_there_and_nowhere_else(models: TinyModels) -> None:
    manifest = models.bundle("tgt").manifest
    assert made_for(manifest) == "cpu"
    assert find_device("auto", manifest) == find_device("cpu", manifest) == CPU
    with pytest.raises(UsageError, match=r"was exported for the CPU: export it with .*--device cuda"):
        find_device("cuda", manifest)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CUDA", "", "cuda:1:2", "rocm"])
def test_other_names(models: TinyModels, name: str) -> None:
    with pytest.raises(UsageError, match="choose cpu, cuda, cuda:N"):
        find_device(name, models.bundle("tgt-cuda").manifest)


def test_a_bundle_for_a_gpu(models: TinyModels, monkeypatch: pytest.MonkeyPatch, with_provider: None) -> None:
    manifest = models.bundle("tgt-cuda").manifest
    assert made_for(manifest) == "cuda"
    use(monkeypatch, FakeRuntime(gpus=2))
    assert find_device("auto", manifest) == find_device("cuda", manifest) == Device("cuda", 0, resident=True)
    second = find_device("cuda:1", manifest)
    assert (second.index, second.name, second.resident) == (1, "cuda:1", True)
    assert second.providers()[0][1]["device_id"] == "1"
    assert find_device("cpu", manifest) == CPU
    assert draft_device(second, models.bundle("tgt")) == CPU
    assert draft_device(second, models.bundle("tgt-cuda")) == second
    assert draft_device(second, models.bundle("tgt-cuda"), "cuda:0") == Device("cuda", 0, resident=True)
    assert draft_device(second, models.bundle("tgt-cuda"), "cpu") == CPU
    with pytest.raises(UsageError, match="was exported for the CPU"):
        draft_device(second, models.bundle("tgt"), "cuda:0")


def test_auto_takes_the_cpu_where_no_gpu_can_be_used(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, with_provider: None
) -> None:
    use(monkeypatch, FakeRuntime(error=100))
    assert find_device("auto", models.bundle("tgt-cuda").manifest) == CPU


def test_what_is_said_without_a_gpu(models: TinyModels, monkeypatch: pytest.MonkeyPatch, with_provider: None) -> None:
    manifest = models.bundle("tgt-cuda").manifest
    use(monkeypatch, FakeRuntime(error=100))
    with pytest.raises(BackendError, match=r"CUDA finds no GPU \(error 100: no CUDA-capable .*--device cpu"):
        find_device("cuda", manifest)
    use(monkeypatch, None)
    with pytest.raises(BackendError, match=r"no CUDA libraries: .*specrun\[gpu\]"):
        find_device("cuda", manifest)
    use(monkeypatch, FakeRuntime(), cudnn=False)
    with pytest.raises(BackendError, match=r"finds no cuDNN 9: .*specrun\[gpu\]"):
        find_device("cuda", manifest)
    assert find_device("auto", manifest) == CPU
    use(monkeypatch, None)
    with pytest.raises(BackendError, match="no CUDA libraries"):
        create_session(greedy_graph(8), threads=1, device=Device("cuda", resident=True))


def test_a_gpu_of_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRuntime(gpus=1))
    with pytest.raises(BackendError, match=r"There is no GPU 'cuda:3' \(error 101: invalid device ordinal\)"):
        cuda_runtime.free_memory(3)


def test_an_onnxruntime_without_the_provider(models: TinyModels) -> None:
    if device.CUDA_PROVIDER in backend.onnxruntime().get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    with pytest.raises(BackendError, match=r"no CUDA support: `pip uninstall onnxruntime onnxruntime-gpu`, then"):
        find_device("cuda", models.bundle("tgt-cuda").manifest)


def test_both_packages_installed(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_folder", lambda name: Path("site-packages"))
    assert "Both onnxruntime and onnxruntime-gpu are installed" in str(cuda_problem())
    with pytest.raises(BackendError, match="Both onnxruntime"):
        find_device("cuda", models.bundle("tgt-cuda").manifest)


def test_packages_in_folders_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that was unpacked elsewhere, and is found first, is whole."""

    def install(name: str, folder: str) -> None:
        info = tmp_path / folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")

    install("onnxruntime-gpu", "unpacked")
    install("onnxruntime", "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "unpacked"), str(tmp_path / "site")])
    assert device._folder("onnxruntime-gpu") == (tmp_path / "unpacked").resolve()
    assert not device._both_installed()
    install("onnxruntime-gpu", "site")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert device._both_installed()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere")])
    assert not device._both_installed()


@pytest.mark.parametrize(
    ("built", "there", "problem"),
    [("12.8", 12, None), ("12.8", 13, cuda_runtime.NO_LIBRARIES), ("13.0", 13, None), ("", 12, None), (None, 12, None)],
)
def test_the_library_of_the_version_that_onnxruntime_was_built_for(
    monkeypatch: pytest.MonkeyPatch, built: str | None, there: int, problem: str | None
) -> None:
    """Another version, that came with some other program, may know no GPU where this one does, or the reverse."""

    def load(name: str) -> FakeRuntime:
        if str(there) not in name:
            raise OSError(name)
        return FakeRuntime()

    monkeypatch.setattr(backend.onnxruntime(), "cuda_version", built, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(cuda_runtime, "_has_cudnn", lambda: True)
    cuda_runtime._library.cache_clear()
    try:
        assert cuda_runtime.gpu_problem() == problem
    finally:
        cuda_runtime._library.cache_clear()


def test_buffers_take_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those outside a session come from an arena that doubles by default: KV would hold up to twice its size."""
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    asked: list[str] = []
    severities: list[int] = []
    monkeypatch.setattr(backend.onnxruntime(), "set_default_logger_severity", severities.append)
    strategies = SimpleNamespace(kSameAsRequested="same", kNextPowerOfTwo="double")
    monkeypatch.setattr(native, "ArenaExtendStrategy", strategies, raising=False)
    monkeypatch.setattr(native, "set_arena_extend_strategy", asked.append, raising=False)
    device.preload.cache_clear()
    try:
        device.preload()
        device.preload()
    finally:
        device.preload.cache_clear()
    assert (asked, severities) == (["same"], [3])  # 2, warnings, would be a line for each session and each layer


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("CUDA failure 2: out of memory ; GPU=0", r"cuda has no room for a graph of specrun's own: choose a smaller"),
        (
            "Failed to allocate memory for requested buffer of size 8",
            r"cuda has no room .* \(Failed to allocate memory",
        ),
        ("no kernel image is available", r"refused a graph of specrun's own: no kernel image is available"),
    ],
)
@pytest.mark.usefixtures("with_provider")
def test_a_session_that_cannot_begin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    """The reason is in the error, nothing is on standard output, and the processor does not load it all as well."""
    ort = backend.onnxruntime()
    asked: list[Any] = []

    def create(self: Any, providers: Any, *rest: Any) -> None:
        asked.append(providers)
        self._fallback_providers = ["CPUExecutionProvider"]
        raise RuntimeError(text)

    monkeypatch.setattr(ort.InferenceSession, "_create_inference_session", create)
    use(monkeypatch, FakeRuntime())
    with pytest.raises(BackendError, match=says):
        create_session(greedy_graph(8), threads=1, device=Device("cuda", resident=True))
    assert len(asked) == 1
    assert capsys.readouterr().out == ""


def test_too_little_memory_is_refused_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", resident=True)
    use(monkeypatch, FakeRuntime(free=5_000_000_000))
    require_memory(gpu, "big", 3_000_000_000, 1_000_000_000, "take a smaller one")
    with pytest.raises(BackendError) as refused:
        require_memory(gpu, "big", 4_000_000_000, 2_000_000_000, "take a smaller one")
    assert str(refused.value) == (
        "big needs 6.81 GB on cuda (4.00 GB of weights, 2.00 GB of KV, 0.81 GB to work in) and 5.00 GB of 17.18 GB "
        "are free: take a smaller one."
    )
    require_memory(CPU, "big", 1 << 60, 0, "the CPU is not asked")


def test_trees_are_left_out_where_kv_will_take_the_room(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers are made after the weights of the chains are there and before those of the trees."""
    bundle = models.bundle("tgt-cuda")
    monkeypatch.setattr(session, "create_session", lambda *arguments, **options: object())
    gpu, weights = Device("cuda", resident=True), bundle.weights_bytes
    kv = 8 * weights

    def opened(free: int) -> object:
        use(monkeypatch, FakeRuntime(free=free))
        return session._tree_opener(bundle, 1, gpu, kv)

    assert opened(2 * weights + kv + device.RESERVE) is not None
    assert opened(2 * weights + kv + device.RESERVE - 1) is None
    assert session._tree_opener(bundle, 1, CPU, kv) is not None


def test_buffers_for_which_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("Failed to allocate memory\nmore")

    monkeypatch.setattr(backend.onnxruntime().OrtValue, "ortvalue_from_shape_and_type", refuse)
    with pytest.raises(BackendError) as refused:
        DeviceBuffers(Device("cuda", 1, resident=True)).output((1 << 20, 8), "float16")
    says = "cuda:1 has no 17 MB left: use a smaller --context or --batch-size (Failed to allocate memory)."
    assert str(refused.value) == says


def test_what_decides_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeRuntime())
    assert cuda_runtime.gpu(0) == cuda_runtime.Gpu("9.0", 132, 13010)
    assert cuda_runtime.gpu_problem() is None


def test_graphs_are_recorded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", resident=True)
    monkeypatch.delenv(device.GRAPHS_VARIABLE, raising=False)
    assert gpu.providers()[0][1]["enable_cuda_graph"] == "0"
    monkeypatch.setenv(device.GRAPHS_VARIABLE, "1")
    assert gpu.providers(recorded=True)[0][1]["enable_cuda_graph"] == "1"
    assert gpu.providers()[0][1]["enable_cuda_graph"] == "0"  # small graphs run at any shape
    assert CPU.providers() == ["CPUExecutionProvider"]


def test_where_the_graph_for_trees_cannot_run_chains_still_do(models: TinyModels) -> None:
    """No kernel for its attention, or no room for its weights: that is no reason to refuse the model."""

    def no_trees() -> Any:
        raise BackendError("attention_bias is not supported")

    def opened(batch: int, rule: WidthRule) -> ModelSession:
        made = session_opener(models.bundle("tgt-cuda"), 1, Device(resident=True))(batch, rule)
        made._open_trees = no_trees
        return made

    found = probe(opened)
    assert (found.exactness, found.tree_bound) == ("bitwise", None)
    assert opened(1, found.rule).tree_room(10) == 0


def test_the_device_of_a_draft_model(models: TinyModels) -> None:
    target, draft = models.bundle("tgt"), models.bundle("self")
    with Engine(target, draft=draft, threads=1, draft_device="cpu") as engine:
        assert engine.generate("Hello", max_tokens=8, method="draft", draft_length=3).speculation.accepted > 0
    with pytest.raises(UsageError, match="was exported for the CPU"):
        Engine(target, draft=draft, threads=1, draft_device="cuda:1")
    with pytest.raises(UsageError, match="choose cpu, cuda, cuda:N"):
        Engine(target, draft=draft, threads=1, draft_device="gpu")
    with pytest.raises(UsageError, match="Only a draft model has a device of its own"):
        Engine(target, threads=1, draft_device="cpu")
