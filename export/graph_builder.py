"""Nodes and initializers of a graph, in the few forms that language models need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specrun.export.weight_file import Stored, WeightFile
from specrun.export.weight_store import StoredLinear, StoredMatrix
from specrun.models_cache.manifest import TensorSpec

OPSET = 23
IR_VERSION = 10
MICROSOFT = "com.microsoft"
THETA = "rope_theta"  # the key of a model's metadata that holds the base of its rotary frequencies
# int8 accumulation of MatMulNBits: activations are rounded per row and block, so rows stay independent.
ACCURACY_LEVEL = 4


class GraphBuilder:
    """Adds nodes to a graph; values are `onnx_ir.Value`s."""

    def __init__(self, file: WeightFile) -> None:
        self._file = file
        self.floats = ir.DataType.from_numpy(file.floats)
        self._tape = ir.tape.Tape()
        self._constants: dict[str, ir.Value] = {}
        self._scope = ""
        self._count = 0

    def scope(self, name: str) -> None:
        """Names of the nodes that follow begin with `name`."""
        self._scope, self._count = name, 0

    def op(self, kind: str, inputs: list[ir.Value | None], domain: str = "", **attributes: Any) -> ir.Value:
        """Append a node with one output."""
        return self.op_multi(kind, inputs, 1, domain, **attributes)[0]

    def op_multi(
        self, kind: str, inputs: list[ir.Value | None], outputs: int, domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        """Append a node with several outputs."""
        self._count += 1
        name = f"{self._scope}/{kind}.{self._count}"
        values = self._tape.op_multi_out(
            kind,
            inputs,
            attributes=attributes,
            num_outputs=outputs,
            domain=domain,
            name=name,
        )
        for index, value in enumerate(values):
            value.name = f"{name}:{index}"
        return list(values)

    def weight(self, stored: Stored) -> ir.Value:
        """The initializer for a stored tensor."""
        assert stored.name is not None
        if stored.name not in self._constants:
            self._constants[stored.name] = self._tape.initializer(stored)
        return self._constants[stored.name]

    def constant(self, name: str, array: NDArray[np.generic]) -> ir.Value:
        """A small constant, shared under its name."""
        if name not in self._constants:
            self._constants[name] = self._tape.initializer(ir.Tensor(array, name=name))
        return self._constants[name]

    def linear(self, x: ir.Value, linear: StoredLinear) -> ir.Value:
        """x [batch, positions, K] -> [batch, positions, sum of N]."""
        outputs = []
        sums: dict[int, ir.Value] = {}
        for matrix in linear.matrices:
            y = self._matmul(x, matrix)
            if matrix.offsets is not None or "offsets" in matrix.tensors:
                if matrix.block not in sums:
                    sums[matrix.block] = self._block_sums(x, matrix.block)
                y = self.op("Add", [y, self._offset_term(sums[matrix.block], matrix)])
            outputs.append(y)
        y = outputs[0] if len(outputs) == 1 else self.op("Concat", [*outputs], axis=-1)
        return y if linear.bias is None else self.op("Add", [y, self.weight(linear.bias)])

    def _offset_term(self, sums: ir.Value, matrix: StoredMatrix) -> ir.Value:
        """What the blocks' offsets add: sums [batch, positions, K / block] -> [batch, positions, N]."""
        if matrix.offsets is None:
            return self.op("MatMul", [sums, self.weight(matrix.tensors["offsets"])])
        return self._matmul(sums, replace(matrix.offsets, columns=matrix.columns // matrix.block))

    def _matmul(self, x: ir.Value, matrix: StoredMatrix) -> ir.Value:
        tensors = matrix.tensors
        if matrix.bits == 32:
            # The weight stays [N, K] so that a tied embedding is stored once; the kernel prepacks it at load.
            return self.op("FusedMatMul", [x, self.weight(tensors["weight"])], MICROSOFT, transB=1)
        return self.op(
            "MatMulNBits",
            [x, self.weight(tensors["packed"]), self.weight(tensors["scales"])],
            MICROSOFT,
            K=matrix.columns,
            N=matrix.rows,
            bits=matrix.bits,
            block_size=matrix.block,
            # Activations of 16 bits are for the CUDA provider, which multiplies in that precision.
            **({"accuracy_level": ACCURACY_LEVEL} if self.floats == ir.DataType.FLOAT else {}),
        )

    def _block_sums(self, x: ir.Value, block: int) -> ir.Value:
        return self.op("ReduceSum", [self._blocks(x, block), self.axis(-1)], keepdims=0)

    def _blocks(self, x: ir.Value, block: int) -> ir.Value:
        """[batch, positions, K] -> [batch, positions, K / block, block]."""
        shape = self.constant(f"blocks_of_{block}", np.array([0, 0, -1, block], np.int64))
        return self.op("Reshape", [x, shape])

    def embed(self, ids: ir.Value, matrix: StoredMatrix) -> ir.Value:
        """ids [batch, positions] -> [batch, positions, hidden], from the same bytes that a tied head multiplies."""
        tensors = matrix.tensors
        if matrix.bits == 32:
            return self.op("Gather", [self.weight(tensors["weight"]), ids], axis=0)
        packed = tensors["packed"]
        flat = self._file.view(f"{packed.name}.flat", packed, (matrix.rows, matrix.columns * matrix.bits // 8))
        numbers = [self.weight(tensors[part]) for part in ("scales", "zero_points") if part in tensors]
        x = self.op(
            "GatherBlockQuantized",
            [self.weight(flat), ids, *numbers],
            MICROSOFT,
            bits=matrix.bits,
            block_size=matrix.block,
            gather_axis=0,
            quantize_axis=1,
        )
        if "offsets" not in tensors:
            return x
        offsets = self.op("Gather", [self.weight(tensors["offsets"]), ids], axis=1)  # [blocks, batch, positions]
        offsets = self.op("Unsqueeze", [self.op("Transpose", [offsets], perm=[1, 2, 0]), self.axis(-1)])
        joined = self.constant("hidden_shape", np.array([0, 0, matrix.columns], np.int64))
        return self.op("Reshape", [self.op("Add", [self._blocks(x, matrix.block), offsets]), joined])

    def float32(self, x: ir.Value) -> ir.Value:
        """x, if the graph computes in another type."""
        return x if self.floats == ir.DataType.FLOAT else self.op("Cast", [x], to=ir.DataType.FLOAT)

    def axis(self, axis: int) -> ir.Value:
        """The number of an axis, as an input."""
        return self.constant(f"axis_{axis}", np.array([axis], np.int64))

    def slice_axis1(self, x: ir.Value, end: ir.Value) -> ir.Value:
        """x[:, :end]."""
        return self.op("Slice", [x, self.constant("zero", np.array([0], np.int64)), end, self.axis(1)])

    def norm(self, x: ir.Value, gamma: ir.Value, epsilon: float) -> ir.Value:
        """RMS norm over the last axis."""
        return self.op("RMSNormalization", [x, gamma], axis=-1, epsilon=epsilon)

    def add_norm(self, x: ir.Value, residual: ir.Value, gamma: ir.Value, epsilon: float) -> tuple[ir.Value, ir.Value]:
        """(RMS norm of x + residual, x + residual)."""
        outputs = self.op_multi("SkipSimplifiedLayerNormalization", [x, residual, gamma], 4, MICROSOFT, epsilon=epsilon)
        for unused in outputs[1:3]:
            unused.name = ""  # mean and inverse deviation are only for training
        return outputs[0], outputs[3]

    def finish(self, inputs: list[ir.Value], outputs: list[ir.Value], name: str) -> ir.Model:
        """The model."""
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET, MICROSOFT: 1},
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="specrun")


def tensor_specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """Inputs or outputs of a graph as a manifest describes them."""
    specs = []
    for value in values:
        assert value.name is not None
        assert value.dtype is not None
        assert value.shape is not None
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        specs.append(TensorSpec(value.name, str(value.dtype.numpy()), shape))
    return tuple(specs)
