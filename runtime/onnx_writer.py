"""The least that writes an ONNX file: small graphs are built where they run, and the runtime needs no `onnx` for it.

A message of the format is a list of fields, each a number and a value (onnx.proto, protocol buffers' wire format): a
varint, or a length and bytes. Only what the graphs of `device_graphs` use is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

IR_VERSION: Final = 10
OPSET: Final = 21
FLOAT: Final = 1
INT64: Final = 7
FLOAT16: Final = 10
DOUBLE: Final = 11
BFLOAT16: Final = 16
BOOL: Final = 9
_NUMPY: Final = {"float32": FLOAT, "int64": INT64, "float64": DOUBLE, "float16": FLOAT16, "bool": BOOL}

Dims = Sequence[int | str]


class GraphWriter:
    """Collects nodes, constants, inputs and outputs; `model` gives the bytes of the file. Values are their names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[bytes] = []
        self._constants: dict[str, bytes] = {}
        self._inputs: list[bytes] = []
        self._outputs: list[bytes] = []

    def input(self, name: str, element: int, dims: Dims) -> str:
        """Declare an input of an ONNX element type; names in `dims` are symbolic sizes."""
        self._inputs.append(_value(name, element, dims))
        return name

    def output(self, name: str, element: int, dims: Dims) -> None:
        """Declare that a value is an output."""
        self._outputs.append(_value(name, element, dims))

    def constant(self, name: str, array: NDArray[np.generic] | Sequence[int]) -> str:
        """A constant, shared under its name; a sequence of numbers is int64."""
        if name not in self._constants:
            data = np.ascontiguousarray(np.asarray(array, np.int64) if isinstance(array, Sequence) else array)
            dims = [(1, size) for size in data.shape]
            fields = [*dims, (2, _NUMPY[str(data.dtype)]), (8, name), (9, data.tobytes())]
            self._constants[name] = _message(fields)
        return name

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: int) -> str:
        """Append a node with one output, named `out` if given; all attributes are integers."""
        return self.op_multi(kind, *inputs, outs=(out,), **attributes)[0]

    def op_multi(self, kind: str, *inputs: str, outs: Sequence[str], **attributes: int) -> list[str]:
        """Append a node with several outputs; an empty name is replaced by one of its own."""
        number = len(self._nodes)
        names = [out or f"{kind}.{number}.{place}" for place, out in enumerate(outs)]
        fields: list[tuple[int, Any]] = [(1, name) for name in inputs] + [(2, name) for name in names]
        fields += [(3, f"{kind}.{number}"), (4, kind)]
        fields += [(5, _message([(1, key), (3, value), (20, 2)])) for key, value in attributes.items()]
        self._nodes.append(_message(fields))
        return names

    def model(self) -> bytes:
        """The bytes of the ONNX file."""
        fields: list[tuple[int, Any]] = [(1, node) for node in self._nodes]
        fields += [(2, self._name), *((5, constant) for constant in self._constants.values())]
        fields += [(11, value) for value in self._inputs] + [(12, value) for value in self._outputs]
        opset = _message([(1, ""), (2, OPSET)])
        return _message([(1, IR_VERSION), (2, "specrun"), (7, _message(fields)), (8, opset)])


def _value(name: str, element: int, dims: Dims) -> bytes:
    shape = _message([(1, _message([(2 if isinstance(size, str) else 1, size)])) for size in dims])
    return _message([(1, name), (2, _message([(1, _message([(1, element), (2, shape)]))]))])


def _message(fields: Iterable[tuple[int, Any]]) -> bytes:
    parts = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            parts += _varint(number << 3) + _varint(value & (1 << 64) - 1)
        else:
            data = value.encode() if isinstance(value, str) else value
            parts += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(parts)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
