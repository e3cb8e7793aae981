"""The bundle manifest: what `export` writes and `runtime` reads. Nothing else passes between them."""

from __future__ import annotations

from dataclasses import dataclass, field

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, ONNX dtype name ("float32", "int64", ...) and shape (ints, or names for symbolic dimensions)."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX file of the bundle. `requires` names what the installed operator schema must have ("query_seqlens")."""

    file: str
    data: tuple[str, ...]
    requires: tuple[str, ...]
    max_batch: int | None
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model. `vocabulary` is the width of the logits; `tokens` how many ids the tokenizer really has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tokens: int
    context: int


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids with a meaning. `eos` holds every id that ends a text."""

    bos: int | None
    eos: tuple[int, ...]
    pad: int | None
    add_bos: bool


@dataclass(frozen=True, slots=True)
class KVSpec:
    """KV buffers: [batch, kv_heads, capacity, head_dim] of `dtype`. `positions` = rows of the rotary tables."""

    dtype: str
    positions: int


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """Where the weights came from. `files` maps a file name to its sha256."""

    name: str
    kind: str  # "path" | "hub" | "index"
    files: dict[str, str]
    licence: str | None


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Against the dequantised source on a fixed text: RMSE of logits, share of equal argmax, mean KL in nats."""

    logit_rmse: float
    argmax_agreement: float
    mean_kl: float
    positions: int


@dataclass(frozen=True, slots=True)
class FileInfo:
    """Size in bytes and sha256 (hex) of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that the runtime must know of a bundle."""

    name: str
    family: str
    sizes: Sizes
    special_ids: SpecialIds
    graphs: dict[str, GraphSpec]  # "target", "target_batch1"
    precision: dict[str, str]  # part ("embedding", "attention", "mlp", "head", "requested") -> precision
    kv: KVSpec
    source: SourceInfo
    fidelity: Fidelity | None
    widths_validated: tuple[int, ...] = ()
    speculators: dict[str, str] = field(default_factory=dict)  # name -> folder inside the bundle
    files: dict[str, FileInfo] = field(default_factory=dict)  # path inside the bundle -> size and digest
    schema_version: int = SCHEMA_VERSION
