"""Embedding, final norm and head of a bundle's target, read out of its own graph and data file.

A speculator gets its own copy of what it shares with the target, so it is made of the bundle alone: the weights that
the bundle was exported from may be gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrun.export.graph_builder import THETA
from specrun.export.quantize import OFFSETS_BLOCK, BlockMatrix, FloatMatrix, Matrix, dequantize_matrix, quantize_matrix
from specrun.models_cache.errors import IntegrityError
from specrun.models_cache.layout import Bundle

_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class TargetEnds:
    """What a speculator shares with its target; a tied head is the embedding itself.

    `final_norm` f32 [hidden] with its epsilon stands between the last residual stream and the head. `rope_theta` is the
    base of the target's rotary frequencies, before any scaling of the low ones.
    """

    embedding: Matrix
    head: Matrix
    final_norm: NDArray[np.float32]
    norm_epsilon: float
    rope_theta: float = 10_000.0


@dataclass(frozen=True, slots=True)
class TargetLayer:
    """One decoder layer of a target, f32: norms [hidden], matrices [N, K] with q, k, v and gate, up in one."""

    input_norm: NDArray[np.float32]
    qkv: NDArray[np.float32]
    output: NDArray[np.float32]
    mlp_norm: NDArray[np.float32]
    gate_up: NDArray[np.float32]
    down: NDArray[np.float32]


def read_target_layer(bundle: Bundle, index: int) -> TargetLayer:
    """Read layer `index` of a bundle's target, without its biases and head norms.

    Raises IntegrityError where the graph is not one that specrun exported.
    """
    spec = min(bundle.manifest.graphs.values(), key=lambda graph: graph.file)
    sizes = bundle.manifest.sizes
    prefix = f"model.layers.{index}"
    try:
        found = _Initializers(ir.load(bundle.path / spec.file).graph, bundle.path, spec.data)
        return TargetLayer(
            input_norm=np.array(found.array(f"{prefix}.input_layernorm.weight"), np.float32),
            qkv=found.fused(f"{prefix}.self_attn.q_proj_k_proj_v_proj", sizes.hidden),
            output=found.fused(f"{prefix}.self_attn.o_proj", sizes.heads * sizes.head_dim),
            mlp_norm=np.array(found.array(f"{prefix}.post_attention_layernorm.weight"), np.float32),
            gate_up=found.fused(f"{prefix}.mlp.gate_proj_up_proj", sizes.hidden),
            down=found.fused(f"{prefix}.mlp.down_proj", sizes.intermediate),
        )
    except (KeyError, ValueError, OSError) as error:
        raise _not_ours(bundle, spec.file, error) from error


def _not_ours(bundle: Bundle, file: str, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"{bundle.path / file} is no target graph that specrun exported ({type(error).__name__}: {error}); "
        "export the model again."
    )


def read_target_ends(bundle: Bundle) -> TargetEnds:
    """Read the ends of a bundle's target; large tensors stay in the file until they are used.

    Raises IntegrityError where the graph is not one that specrun exported.
    """
    spec = min(bundle.manifest.graphs.values(), key=lambda graph: graph.file)
    path = bundle.path / spec.file
    try:
        model = ir.load(path)
    except Exception as error:  # what onnx and protobuf raise has no common base
        raise IntegrityError(f"{path} is no ONNX graph ({type(error).__name__}); export the model again.") from error
    try:
        graph = model.graph
        found = _Initializers(graph, bundle.path, spec.data)
        hidden = bundle.manifest.sizes.hidden
        embedding = found.matrix(_EMBEDDING, hidden)
        head = found.matrix(_HEAD, hidden) if any(name.startswith(_HEAD) for name in found.values) else embedding
        norm = np.array(found.array(_NORM), np.float32)
        theta = float(model.metadata_props.get(THETA, 0)) or found.rope_theta(bundle.manifest.sizes.head_dim)
        epsilon = next(
            node.attributes["epsilon"].as_float()
            for node in graph
            if any(value is not None and value.name == _NORM for value in node.inputs)
        )
    except (KeyError, ValueError, StopIteration, OSError) as error:
        raise IntegrityError(
            f"{path} is no target graph that specrun exported ({type(error).__name__}: {error}); "
            "export the model again."
        ) from error
    vocabulary = bundle.manifest.sizes.vocabulary
    if norm.shape != (hidden,) or embedding.rows != vocabulary or head.rows != vocabulary:
        raise IntegrityError(f"{path} does not have the sizes of its manifest; export it again.")
    return TargetEnds(embedding, head, norm, float(epsilon), theta)


class _Initializers:
    """The initializers of a graph by name; their data must lie in the files that the manifest names."""

    def __init__(self, graph: ir.Graph, folder: Path, data: tuple[str, ...]) -> None:
        self.values = graph.initializers
        self._folder = folder
        self._data = data

    def array(self, name: str) -> NDArray[Any]:
        tensor = self.values[name].const_value
        if tensor is None or (isinstance(tensor, ir.ExternalTensor) and str(tensor.location) not in self._data):
            raise ValueError(f"{name} has no data in the bundle")
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor.numpy()
        # Not through the library, which refuses a file with several hard links, as deduplicating tools make them.
        path = self._folder / str(tensor.location)
        shape = tuple(int(size) for size in tensor.shape.numpy())
        return np.memmap(path, tensor.dtype.numpy(), "r", offset=tensor.offset or 0, shape=shape)

    def fused(self, label: str, columns: int) -> NDArray[np.float32]:
        """The matrices label.0, label.1, ... of one input, dequantised, one below the other."""
        pieces: list[NDArray[np.float32]] = []
        while any(name.startswith(f"{label}.{len(pieces)}.") for name in self.values):
            pieces.append(dequantize_matrix(self.matrix(f"{label}.{len(pieces)}", columns)))
        if not pieces:
            raise KeyError(label)
        return np.concatenate(pieces)

    def rope_theta(self, head_dim: int) -> float:
        """From the first two of the frequencies theta ** (-2 i / head_dim), whose angles at position 1 the tables hold.

        A scaling that divides all of them leaves their ratio as it is.
        """
        if head_dim < 4 or "cos" not in self.values:
            return 10_000.0
        first, second = np.arctan2(self.array("sin")[1, :2], self.array("cos")[1, :2]).tolist()
        return float(f"{(second / first) ** (-head_dim / 2):.4g}")

    def matrix(self, name: str, columns: int) -> Matrix:
        if f"{name}.weight" in self.values:
            return FloatMatrix(self.array(f"{name}.weight"))
        # An embedding has the codes as flat rows, a head in blocks; a tied pair both, of the same bytes.
        packed = self.array(f"{name}.packed" if f"{name}.packed" in self.values else f"{name}.packed.flat")
        scales = np.asarray(self.array(f"{name}.scales"), np.float32)
        rows, blocks = scales.shape
        block = columns // blocks
        bits = packed.size * 8 // (rows * columns)
        offsets = None
        if f"{name}.offsets" in self.values:
            offsets = np.asarray(self.array(f"{name}.offsets"), np.float32).T
        elif f"{name}.offsets.packed" in self.values:
            padded = self.array(f"{name}.offsets.scales").shape[1] * OFFSETS_BLOCK
            offsets = dequantize_matrix(self.matrix(f"{name}.offsets", padded))[:, :blocks]
        return BlockMatrix(f"int{bits}", bits, block, packed.reshape(rows, blocks, block * bits // 8), scales, offsets)


def rows_8bit(matrix: Matrix, ids: NDArray[np.integer[Any]] | None = None) -> Matrix:
    """The rows `ids` of a matrix (None: all) in 8-bit blocks: as they are where it has those, else rounded to them."""
    keep = slice(None) if ids is None else ids
    if isinstance(matrix, BlockMatrix) and matrix.bits == 8 and matrix.offsets is None:
        return BlockMatrix("int8", 8, matrix.block, matrix.packed[keep], matrix.scales[keep])
    numbers = np.arange(matrix.rows) if ids is None else np.asarray(ids)
    pieces = [
        quantize_matrix(dequantize_matrix(matrix, numbers[start : start + _ROWS_AT_ONCE]), "int8", None)
        for start in range(0, numbers.size, _ROWS_AT_ONCE)
    ]
    blocks = [piece for piece in pieces if isinstance(piece, BlockMatrix)]
    if not blocks:  # rows that no block size divides
        return FloatMatrix(np.concatenate([piece.weight for piece in pieces if isinstance(piece, FloatMatrix)]))
    packed, scales = (np.concatenate([getattr(piece, part) for piece in blocks]) for part in ("packed", "scales"))
    return BlockMatrix("int8", 8, blocks[0].block, packed, scales)
