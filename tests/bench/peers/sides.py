"""The sides of a comparison: specrun, and the peers with their packages, weights and speculation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specrun.models_cache import Bundle
from specrun.models_cache.sources import FetchedSource

from .environments import Note, peer_python
from .processes import BenchError, Worker
from .weights import BUILD_OPTIONS, genai_model, gguf_file, gguf_types, transformers_folder

WORKERS = Path(__file__).resolve().parent / "workers"
SPECRUN = "specrun"
BASELINE = "specrun baseline"
PLAIN = "specrun plain"


@dataclass(frozen=True, slots=True)
class Place:
    """What a peer's weights are made of and where. work: a folder for environments and weights."""

    work: Path
    source: FetchedSource
    genai_options: Sequence[str]
    note: Note


@dataclass(frozen=True, slots=True)
class Weights:
    """A peer's weights: the worker's first arguments, and what they are in words."""

    arguments: list[str]
    words: str


@dataclass(frozen=True, slots=True)
class Peer:
    """A runtime to compare with. kinds: of weights, the usual one first. speculation: the worker's name for its own.

    requirements: lower bounds. variables: of the environment in which they are built.
    """

    name: str
    worker: str
    requirements: Callable[[], list[str]]
    kinds: tuple[str, ...]
    speculation: str
    weights: Callable[[Place, Path, str], Weights]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """A peer with the kind of weights it shall run."""

    peer: Peer
    kind: str

    @property
    def label(self) -> str:
        """The peer's name, with the kind after it unless it is the usual one."""
        return self.peer.name if self.kind == self.peer.kinds[0] else f"{self.peer.name} {self.kind}"


@dataclass(frozen=True, slots=True)
class Mode:
    """A side and a method of its worker. reference: the mode of the same side whose text it is expected to keep."""

    side: str
    method: str
    draft_length: int  # 0: the method's own choice, or none
    label: str
    reference: str


@dataclass(frozen=True, slots=True)
class Side:
    """A side that is ready to start: the Python and the arguments of its worker, and its weights in words."""

    label: str
    python: Path
    script: Path
    arguments: list[str]
    weights: str

    def start(self, work: Path) -> Worker:
        """Start its worker; the log is below `work`. It has loaded its model when this returns."""
        log = work / f"{self.label.replace(' ', '-')}.log"
        worker = Worker(self.label, self.python, self.script, self.arguments, log)
        try:
            worker.ask("about")
        except BenchError:
            worker.close()
            raise
        return worker


def choice(text: str) -> Choice:
    """The peer that "genai" or "genai:int4" names. Raises BenchError where there is none."""
    name, _, kind = text.partition(":")
    peer = next((peer for peer in PEERS if peer.name == name), None)
    if peer is None:
        raise BenchError(f"there is no peer {name!r}: choose of {', '.join(peer.name for peer in PEERS)}")
    if kind and kind not in peer.kinds:
        raise BenchError(f"{name} has no weights {kind!r} here: choose of {', '.join(peer.kinds)}")
    return Choice(peer, kind or peer.kinds[0])


def specrun_side(bundle: Bundle, threads: int, label: str = SPECRUN) -> Side:
    """The side of a bundle, in this Python."""
    arguments = [os.fspath(bundle.path), str(threads)]
    precision = str(bundle.manifest.precision.get("requested"))
    return Side(label, Path(sys.executable), WORKERS / "worker_specrun.py", arguments, precision)


def peer_side(chosen: Choice, place: Place, threads: int, context: int) -> Side:
    """Make what a peer needs, its environment and its weights, where they are missing.

    context: positions that the longest prompt and its text take. Raises BenchError where something cannot be made.
    """
    peer = chosen.peer
    python = peer_python(place.work / peer.name, peer.requirements(), peer.variables, place.note)
    weights = peer.weights(place, python, chosen.kind)
    arguments = [*weights.arguments, str(threads), str(context)]
    return Side(chosen.label, python, WORKERS / peer.worker, arguments, weights.words)


def specrun_modes(methods: Sequence[str]) -> list[Mode]:
    """The baseline, plain decoding, and `methods` such as "ngram" or "ngram:4"."""
    modes = [Mode(SPECRUN, "baseline", 0, BASELINE, PLAIN), Mode(SPECRUN, "none", 0, PLAIN, PLAIN)]
    for text in dict.fromkeys(methods):
        method, _, length = text.partition(":")
        if length and not length.isdecimal():
            raise BenchError(f"{text!r} is no method: write it as METHOD or METHOD:K")
        if method != "none":
            modes.append(Mode(SPECRUN, method, int(length or 0), f"{SPECRUN} {text.replace(':', ' ')}", PLAIN))
    return modes


def peer_modes(chosen: Choice, draft_lengths: Sequence[int]) -> list[Mode]:
    """A peer's plain mode, and its speculation with each draft length."""
    side, method = chosen.label, chosen.peer.speculation
    plain = f"{side} plain"
    return [
        Mode(side, "plain", 0, plain, plain),
        *(Mode(side, method, length, f"{side} {method} {length}", plain) for length in draft_lengths),
    ]


def _gguf_weights(place: Place, python: Path, kind: str) -> Weights:
    path = gguf_file(place.source)
    return Weights([os.fspath(path)], f"the GGUF file, {gguf_types(path)}")


def _genai_weights(place: Place, python: Path, kind: str) -> Weights:
    folder = transformers_folder(place.work, place.source, place.note)
    model = genai_model(
        place.work / "genai", python, place.source, folder, kind, [*BUILD_OPTIONS, *place.genai_options], place.note
    )
    return Weights([os.fspath(model)], f"its own {kind} model, {' '.join([*BUILD_OPTIONS, *place.genai_options])}")


def _transformers_weights(place: Place, python: Path, kind: str) -> Weights:
    folder = transformers_folder(place.work, place.source, place.note)
    return Weights([os.fspath(folder), kind], kind)


def _genai_requirements() -> list[str]:
    """Its model builder imports more than it asks for; it runs on specrun's ONNX Runtime, so both have its kernels."""
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            runtime = f"onnxruntime=={version(name)}"
        except PackageNotFoundError:
            continue
        return ["onnxruntime-genai>=0.18", "onnx", "onnx-ir", "safetensors", "torch", "transformers", runtime]
    raise BenchError("ONNX Runtime is not installed in this Python: pip install 'specrun[cpu]'")


PEERS: tuple[Peer, ...] = (
    Peer(
        "llama.cpp",
        "worker_llama.py",
        lambda: ["llama-cpp-python>=0.3.36"],
        ("gguf",),
        "lookup",
        _gguf_weights,
        # Built for this machine's processor, as its makers advise.
        {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)},
    ),
    Peer("openvino", "worker_openvino.py", lambda: ["openvino-genai>=2026.4.1"], ("gguf",), "lookup", _gguf_weights),
    Peer("genai", "worker_genai.py", _genai_requirements, ("int8", "int4"), "ngram", _genai_weights),
    Peer(
        "transformers",
        "worker_transformers.py",
        lambda: ["transformers>=4.57", "torch>=2.5", "safetensors>=0.5"],
        ("float32", "bfloat16"),
        "lookup",
        _transformers_weights,
    ),
)
