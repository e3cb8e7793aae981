"""A speculator's weights on disk: `speculator.json` and `speculator.safetensors` in one folder.

Training writes such a folder, the package ships some, and `export` makes a graph of one for a target's bundle.
Matrices are stored in 8 bits: `NAME.codes` i8 [N, K] and `NAME.scales` f16 [N, K / 32], w = scale * code, which is what
the graph computes with. A matrix may also be a plain f32 or f16 `NAME`; vectors always are. `vocabulary` i32
[draft vocabulary] names, ascending, the target's token of each row of the head; without it the head has every row.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specrun.export.speculator_config import (
    CONFIGS,
    METHODS,
    SpeculatorConfig,
    SpeculatorTarget,
    TensorRule,
    check_config,
    tensor_rules,
)
from specrun.models_cache.errors import IntegrityError, ModelNotFoundError, UsageError
from specrun.models_cache.layout import check_bundle_name
from specrun.models_cache.strictjson import StrictJsonError, decode, parse_object

FORMAT = 1
BLOCK = 32
JSON_NAME, TENSORS_NAME = "speculator.json", "speculator.safetensors"
MAX_JSON_BYTES = 16 << 20
MAX_DEPTH, MAX_RANKS = 64, 64  # of the acceptance table
_TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "I8": np.dtype("i1"), "I32": np.dtype("<i4")}
_SHA256 = re.compile(r"[0-9a-f]{64}")

Tensor = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Speculator:
    """A speculator's description and tensors; `tensors` has the names of the file ("fc.codes", "fc.scales").

    acceptance[depth][rank] is the chance that the candidate of that rank (0 is the best) is the target's token where
    the path so far was right; `report` is free JSON about how it was measured.
    """

    method: str
    name: str
    licence: str | None
    target: SpeculatorTarget
    taps: tuple[int, ...]
    config: SpeculatorConfig
    acceptance: tuple[tuple[float, ...], ...]
    report: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)

    @property
    def vocabulary(self) -> NDArray[np.int32] | None:
        """The target's token of each row of the head, ascending; None: row r is token r."""
        return self.tensors.get("vocabulary")

    @property
    def layout(self) -> str:
        """Which graph it needs: "medusa", "eagle3", "eagle1" or "draft"."""
        return getattr(self.config, "layout", self.method)

    @property
    def draft_vocabulary(self) -> int:
        """Rows of the head."""
        return self.target.vocabulary if self.vocabulary is None else self.vocabulary.size

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or f"{name}.codes" in self.tensors

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor as f32, dequantised. Raises KeyError."""
        if name in self.tensors:
            return np.asarray(self.tensors[name], np.float32)
        return dequantize_rows(self.tensors[f"{name}.codes"], self.tensors[f"{name}.scales"])


def quantize_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """(codes i8 [N, K], scales f16 [N, K / 32]) of `weight` f32 [N, K]: symmetric, each block rounded to nearest.

    Codes are those of the scale as it is stored. Raises ValueError where 32 does not divide K, and for values that no
    scale can hold.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"Rows of {columns} columns are not whole blocks of {BLOCK}.")
    blocks = np.asarray(weight, np.float32).reshape(rows, columns // BLOCK, BLOCK)
    greatest = np.abs(blocks).max(axis=-1)
    with np.errstate(over="ignore"):
        scales = (greatest / np.float32(127)).astype(np.float16)
    # Rounded up, so that no code of a tiny block has to be clipped by more than rounding does.
    low = scales.astype(np.float32) * np.float32(127.49) < greatest
    scales = np.where(low, np.nextafter(scales, np.float16(np.inf)), scales)
    if not np.isfinite(scales).all():
        raise ValueError("The weights hold values that are not finite or too large for 8-bit blocks.")
    wide = scales.astype(np.float32)[:, :, None]
    codes = np.rint(blocks / np.where(wide > 0, wide, np.float32(1)))
    return np.clip(codes, -127, 127).astype(np.int8).reshape(rows, columns), scales


def dequantize_rows(codes: NDArray[np.int8], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """f32 [N, K] of what `quantize_rows` gives."""
    rows, columns = codes.shape
    blocks = codes.reshape(rows, scales.shape[1], columns // scales.shape[1]).astype(np.float32)
    return (blocks * scales.astype(np.float32)[:, :, None]).reshape(rows, columns)


def quantized(name: str, weight: NDArray[np.float32]) -> dict[str, Tensor]:
    """The tensors that store `weight` f32 [N, K] under `name`: 8-bit blocks, or f32 where 32 does not divide K."""
    if weight.shape[1] % BLOCK:
        return {name: np.ascontiguousarray(weight, np.float32)}
    codes, scales = quantize_rows(weight)
    return {f"{name}.codes": codes, f"{name}.scales": scales}


def encode_speculator(speculator: Speculator) -> dict[str, bytes]:
    """The contents of both files, by name; the same for the same speculator.

    Raises IntegrityError where `read_speculator` would refuse them.
    """
    from safetensors.numpy import save

    shapes = {name: (_type_name(name, array), tuple(array.shape)) for name, array in speculator.tensors.items()}
    where = f"speculator {speculator.name}"
    _check_name(where, speculator.name)
    try:
        _check(speculator, shapes)
    except StrictJsonError as error:
        raise IntegrityError(f"The {where} is not valid: {error}.") from None
    _check_values(where, speculator)
    header = {item.name: getattr(speculator, item.name) for item in dataclasses.fields(speculator)}
    del header["tensors"]
    for key in ("target", "config"):
        header[key] = dataclasses.asdict(header[key])
    text = json.dumps({"format": FORMAT, **header}, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    data = save({name: np.ascontiguousarray(array) for name, array in sorted(speculator.tensors.items())})
    return {TENSORS_NAME: data, JSON_NAME: text.encode("utf-8")}


def write_speculator(folder: Path, speculator: Speculator) -> None:
    """Write both files into `folder`, which is made; each appears whole.

    Raises IntegrityError where `read_speculator` would refuse them.
    """
    files = encode_speculator(speculator)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        part = folder / f"{name}.part"
        part.write_bytes(content)
        os.replace(part, folder / name)


def read_description(folder: Path) -> Speculator:
    """Read `speculator.json` alone: a speculator without tensors, its sizes not yet compared with any.

    Raises as `read_speculator` does.
    """
    if not (folder / JSON_NAME).is_file():
        raise ModelNotFoundError(f"{folder} holds no {JSON_NAME}, so it is no speculator; `specrun train` makes one.")
    try:
        return _read_json(folder)
    except StrictJsonError as error:
        raise IntegrityError(f"{folder / JSON_NAME} is not valid: {error}; fetch or train it again.") from None
    except OSError as error:
        raise IntegrityError(f"{folder / JSON_NAME} cannot be read ({error.strerror or error}).") from error


def read_speculator(folder: Path) -> Speculator:
    """Read and check a folder that `write_speculator` wrote; shapes are compared before any tensor is read.

    Raises ModelNotFoundError where there is none, IntegrityError for a file that is not what it must be.
    """
    speculator = read_description(folder)
    try:
        tensors = _read_tensors(folder / TENSORS_NAME, speculator)
    except StrictJsonError as error:
        raise IntegrityError(f"{folder / JSON_NAME} is not valid: {error}; fetch or train it again.") from None
    except OSError as error:
        raise IntegrityError(f"{folder / TENSORS_NAME} cannot be read ({error.strerror or error}).") from error
    speculator = dataclasses.replace(speculator, tensors=tensors)
    _check_values(str(folder), speculator)
    return speculator


def _read_json(folder: Path) -> Speculator:
    with (folder / JSON_NAME).open("rb") as stream:
        data = stream.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise StrictJsonError(f"it is larger than {MAX_JSON_BYTES} bytes")
    try:
        value = parse_object(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise StrictJsonError("it is not UTF-8 text") from None
    version = value.pop("format", None)
    if version != FORMAT or type(version) is not int:
        raise StrictJsonError(f"its format is {json.dumps(version)[:60]} and this specrun reads {FORMAT}")
    method = value.get("method")
    if method not in METHODS:
        raise StrictJsonError(f"method must be one of {', '.join(METHODS)}")
    config, report = value.pop("config", None), value.pop("report", {})
    if not isinstance(report, dict):
        raise StrictJsonError("report must be an object")
    header: _Header = decode(_Header, value)
    _check_name(str(folder), header.name)
    parts = {item.name: getattr(header, item.name) for item in dataclasses.fields(header)}
    return Speculator(**parts, config=decode(CONFIGS[method], config, "config"), report=report)


@dataclass(frozen=True, slots=True)
class _Header:
    """The keys of speculator.json whose form does not depend on the method."""

    method: str
    name: str
    licence: str | None
    target: SpeculatorTarget
    taps: tuple[int, ...]
    acceptance: tuple[tuple[float, ...], ...]


def _read_tensors(path: Path, speculator: Speculator) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise IntegrityError(f"{path} is missing: a speculator's weights are one safetensors file, never a pickle.")
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            shapes = {name: (item.get_dtype(), tuple(item.get_shape())) for name, item in slices.items()}
            _check(speculator, shapes)
            return {name: file.get_tensor(name) for name in shapes}
    except SafetensorError as error:
        raise IntegrityError(f"{path} is no sound safetensors file ({error}); fetch or train it again.") from None


def _type_name(name: str, array: Tensor) -> str:
    for type_name, dtype in _TYPES.items():
        if array.dtype == dtype:
            return type_name
    raise IntegrityError(f"{name} has the type {array.dtype}; a speculator stores {', '.join(_TYPES)}.")


def _check_name(where: str, name: str) -> None:
    try:
        same = check_bundle_name(name) == name
    except UsageError:
        same = False
    if not same:
        raise IntegrityError(f"{where}: {name!r} cannot name a speculator.")


def _check(speculator: Speculator, shapes: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare sizes, names, types and shapes with the configuration. Raises StrictJsonError, IntegrityError."""
    target = speculator.target
    if type(speculator.config) is not CONFIGS.get(speculator.method):
        raise StrictJsonError(f"config is not that of {speculator.method!r}")
    check_config(speculator.config, target, speculator.taps)
    if bad := [name for name, digest in target.source_files.items() if _SHA256.fullmatch(digest) is None]:
        raise StrictJsonError(f"target.source_files.{bad[0]} is no sha256 in lower-case hex")
    table = speculator.acceptance
    if not 1 <= len(table) <= MAX_DEPTH or not all(1 <= len(row) <= MAX_RANKS for row in table):
        raise StrictJsonError(f"acceptance must have 1 to {MAX_DEPTH} depths of 1 to {MAX_RANKS} ranks")
    if not all(0 <= chance <= 1 for row in table for chance in row):
        raise StrictJsonError("acceptance holds a number outside 0 .. 1")
    left = dict(shapes)
    rows = target.vocabulary
    if "vocabulary" in left:
        type_name, shape = left.pop("vocabulary")
        if type_name != "I32" or len(shape) != 1 or not 1 <= shape[0] <= target.vocabulary:
            raise IntegrityError(
                f"vocabulary is {type_name} {list(shape)} and must be I32 with 1 to {target.vocabulary} ids."
            )
        rows = shape[0]
    for name, rule in tensor_rules(speculator.config, target, speculator.taps, rows).items():
        _take(name, rule, left)
    if left:
        raise IntegrityError(f"{next(iter(left))} is no tensor of a {speculator.layout} speculator.")


def _take(name: str, rule: TensorRule, left: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Take the tensor (or both parts of it) out of `left`, checked."""
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {name: (("F32", "F16"), rule.shape)}
    if rule.kind == "matrix" and name not in left and (f"{name}.codes" in left or f"{name}.scales" in left):
        rows, columns = rule.shape
        wanted = {f"{name}.codes": (("I8",), rule.shape), f"{name}.scales": (("F16",), (rows, columns // BLOCK))}
        if columns % BLOCK:
            raise IntegrityError(f"{name} has {columns} columns, which are not whole blocks of {BLOCK}.")
    elif name not in left and rule.optional:
        return
    for part, (types, shape) in wanted.items():
        if part not in left:
            raise IntegrityError(f"The speculator lacks {part}; fetch or train it again.")
        found = left.pop(part)
        if found[0] not in types or found[1] != shape:
            raise IntegrityError(
                f"{part} is {found[0]} {list(found[1])} and must be {' or '.join(types)} {list(shape)}."
            )


def _check_values(where: str, speculator: Speculator) -> None:
    for name, array in speculator.tensors.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise IntegrityError(f"{where}: {name} holds values that are not finite; train it again.")
    ids = speculator.vocabulary
    if ids is not None and (ids[0] < 0 or ids[-1] >= speculator.target.vocabulary or (np.diff(ids) <= 0).any()):
        raise IntegrityError(f"{where}: vocabulary must hold ascending ids below {speculator.target.vocabulary}.")
