"""Conversations in files: an .npz archive with the messages and the keys and values that the target holds of them.

    header   u8 [n]: JSON with format, model, digest, precision, machine, messages
    tokens   u32 [n]: whose keys and values follow; may be none
    kv.I     f32, or f16 for a GPU's bundle, [kv_heads, n, head_dim]: buffer I, key and value of each layer in turn

`digest` is that of the target's graphs and weights. `machine` stands for what decides the bits of keys and values
(ONNX Runtime, processor, threads, widths): made elsewhere they are not used, and the conversation is read again.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import CacheError, IntegrityError
from specrun.runtime.calibration import kept_path
from specrun.runtime.device_buffers import HOST_TYPES
from specrun.runtime.npz_file import DAMAGED, read_array, write_arrays

if TYPE_CHECKING:
    from specrun.runtime.engine import Engine

FORMAT: Final = 1
_HEADER_END: Final = 64 << 20


def save_session(engine: Engine, messages: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a conversation; CacheError if the folder refuses."""
    tokens = engine.encode(list(messages)) if messages else []
    parts = engine.copy_kv(tokens)
    manifest = engine.bundle.manifest
    header = {
        "format": FORMAT,
        "model": manifest.name,
        "digest": engine.bundle.target_digest,
        "precision": manifest.precision,
        "machine": _machine(engine),
        "messages": list(messages),
    }
    held = parts[0].shape[1] if parts else 0
    write_arrays(
        path,
        {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "tokens": np.array(tokens[:held], np.uint32),
            **{f"kv.{index}": part for index, part in enumerate(parts)},
        },
    )


def read_session(engine: Engine, path: Path) -> list[dict[str, str]]:
    """The messages of a file; the engine then holds their keys and values, if these are of any use to it.

    Errors: IntegrityError for a damaged file or one of another model, CacheError if it cannot be read.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            header = _header(archive)
            _require_model(engine, header, path)
            kv = _read_kv(engine, archive)
    except OSError as error:
        raise CacheError(f"Cannot read {path}: {error.strerror}.") from error
    except DAMAGED as error:
        raise IntegrityError(f"{path} is not a saved conversation, or damaged ({error}): name another file.") from error
    tokens, parts = kv
    if tokens and header.get("machine") == _machine(engine) and len(tokens) < engine.context:
        engine.restore_kv(tokens, parts)
    messages: list[dict[str, str]] = header["messages"]
    return messages


def _header(archive: zipfile.ZipFile) -> dict[str, Any]:
    data = read_array(archive, "header", np.uint8, (None,), most=_HEADER_END).tobytes()
    try:
        header = json.loads(data)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else None
        raise ValueError(f"its format is {found!r:.20}, not {FORMAT}")
    messages = header.get("messages")
    if not isinstance(messages, list) or not all(
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        and message["role"] in ("system", "user", "assistant")
        for message in messages
    ):
        raise ValueError("it has no messages")
    return header


def _require_model(engine: Engine, header: Mapping[str, Any], path: Path) -> None:
    manifest = engine.bundle.manifest
    if header.get("digest") != engine.bundle.target_digest or header.get("precision") != manifest.precision:
        model = f"{header.get('model')!s:.80} ({_precision(header.get('precision'))})"
        ours = f"{manifest.name} ({_precision(manifest.precision)})"
        raise IntegrityError(f"{path} was saved with {model}, and this is another model, {ours}: load that one.")


def _precision(parts: object) -> str:
    return "/".join(sorted({str(part)[:20] for part in parts.values()})) if isinstance(parts, Mapping) else "unknown"


def _read_kv(engine: Engine, archive: zipfile.ZipFile) -> tuple[list[int], list[NDArray[Any]]]:
    """Tokens and their keys and values, of no other sizes than this model's."""
    manifest = engine.bundle.manifest
    sizes, most = manifest.sizes, manifest.kv.positions
    tokens = read_array(archive, "tokens", np.uint32, (None,), most=4 * most)
    if tokens.size > most or (tokens.size and int(tokens.max()) >= sizes.tokens):
        raise ValueError("its tokens are not those of this model")
    shape = (sizes.kv_heads, tokens.size, sizes.head_dim)
    dtype = HOST_TYPES[engine.bundle.manifest.kv.dtype]
    parts = [read_array(archive, f"kv.{index}", dtype, shape) for index in range(2 * sizes.layers)]
    if not all(np.isfinite(part).all() for part in parts):
        raise ValueError("its keys and values are not numbers")
    return [int(token) for token in tokens], parts


def _machine(engine: Engine) -> str:
    settings = kept_path("session", FORMAT, engine.bundle, engine.threads, engine.device).stem
    return "-".join([settings, *map(str, astuple(engine.target.width_rule))])
