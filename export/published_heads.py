"""Published Medusa and EAGLE heads in safetensors form, read as speculators of a bundle's target.

Layouts: Medusa (https://github.com/FasterDecoding/Medusa): "J.B.linear.weight" and ".bias" of block B of head J, then
"J.<blocks>.weight", the head's own LM head. EAGLE-1 and 2 (https://github.com/SafeAILab/EAGLE): "fc" from embedding
and feature, one llama layer "layers.0" without input norm. EAGLE-3: "fc" from three taps, "midlayer" with both input
norms, "norm", "lm_head" over a draft vocabulary, and "d2t", whose sum with the row is the target's token.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specrun.export.config_keys import Keys, read_config, rope_from_json
from specrun.export.quantize import Matrix, dequantize_matrix
from specrun.export.speculator_config import (
    EagleConfig,
    MedusaConfig,
    RopeScaling,
    SpeculatorConfig,
    SpeculatorTarget,
)
from specrun.export.speculator_weights import Speculator, Tensor, quantized
from specrun.export.target_ends import TargetEnds, read_target_ends
from specrun.export.weights import FLOAT_SIZES, map_bytes, to_float32
from specrun.export.weights_safetensors import Entry, read_header
from specrun.models_cache.errors import IntegrityError, UnsupportedModelError, UsageError
from specrun.models_cache.integrity import check_weights_folder
from specrun.models_cache.layout import Bundle

_MEDUSA = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_HEAD = re.compile(r"(\d+)\.")
_PREFIXES = ("model.", "medusa_head.", "medusa_heads.")
_INERT = re.compile(r"t2d|.*rotary_emb\.inv_freq")
_SAMPLED_ROWS = 64
# What is published of acceptance differs by target and text; these are a start, and the runtime goes by what it sees.
_FIRST_GUESS, _LATER_GUESS = (0.55, 0.12, 0.05), (0.45, 0.12, 0.05)
_EAGLE_DEPTH = 5
_SAME = 0.03  # of the mean square: above what 8-bit blocks cost, far below another training


class PublishedHeads:
    """The heads of a folder: `layout` is "medusa", "eagle3", "eagle1", or None where it is some other model.

    Raises IntegrityError for files that are no sound safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw = read_config(folder / "config.json")
        self._entries: dict[str, tuple[Path, Entry]] = {}
        for file in check_weights_folder(folder):
            for name, entry in read_header(folder / file).items():
                plain = _plain(name)
                if plain in self._entries:
                    raise IntegrityError(f"{folder} has {plain} twice; keep one of its safetensors files.")
                self._entries[plain] = (folder / file, entry)
        self.layout = self._layout()

    def _layout(self) -> str | None:
        if any(_MEDUSA.fullmatch(name) for name in self._entries):
            return "medusa"
        if "fc.weight" not in self._entries:
            return None
        if "midlayer.hidden_norm.weight" in self._entries or "layers.0.hidden_norm.weight" in self._entries:
            return "eagle3"
        return "eagle1" if "layers.0.self_attn.q_proj.weight" in self._entries else None

    def speculator(self, bundle: Bundle, name: str, licence: str | None) -> Speculator:
        """The heads for a bundle's target, matrices in 8-bit blocks; what equals the target's own is left out.

        Raises UsageError where they are for a model of other sizes, UnsupportedModelError for what no graph is built
        for, IntegrityError.
        """
        sizes = bundle.manifest.sizes
        target = SpeculatorTarget(bundle.manifest.name, sizes.hidden, sizes.layers, sizes.vocabulary, {})
        reader = _Reader(self._entries, Keys(self.raw, "the heads' config.json"), target, read_target_ends(bundle))
        config, taps = (reader.medusa if self.layout == "medusa" else reader.eagle)(self.layout or "")
        reader.finish()
        tensors = reader.tensors
        report = {"imported_from": name, "acceptance": "a guess, not measured"}
        method, depth = ("medusa", config.heads) if isinstance(config, MedusaConfig) else ("eagle", _EAGLE_DEPTH)
        acceptance = (_FIRST_GUESS, *[_LATER_GUESS] * (depth - 1))
        return Speculator(method, name, licence, target, taps, config, acceptance, report, tensors)


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


class _Reader:
    """Takes tensors out of `entries`, checked, until `finish` says what nobody took."""

    def __init__(
        self, entries: dict[str, tuple[Path, Entry]], keys: Keys, target: SpeculatorTarget, ends: TargetEnds
    ) -> None:
        self._left = dict(entries)
        self._keys = keys
        self._target = target
        self._ends = ends
        self.tensors: dict[str, Tensor] = {}

    def medusa(self, layout: str) -> tuple[SpeculatorConfig, tuple[int, ...]]:
        """Residual blocks, and each head's own LM head where it has one."""
        places = [match for match in map(_MEDUSA.fullmatch, self._left) if match]
        heads, blocks = (max(int(match[part]) for match in places) + 1 for part in (1, 2))
        heads = self._keys.integer("medusa_num_heads", heads, least=1, limit=heads)
        own = f"0.{blocks}.weight" in self._left
        for head in range(heads):
            for block in range(blocks):
                place, name = f"{head}.{block}.linear", f"heads.{head}.blocks.{block}"
                self._fits(f"{place}.weight", self._target.hidden)
                self._matrix(f"{name}.weight", [f"{place}.weight"])
                self._vector(f"{name}.bias", f"{place}.bias")
            if own:
                self._store(f"heads.{head}.head", self._rows(self._take_matrix(f"{head}.{blocks}.weight")))
        # Heads that the configuration leaves out are not missed.
        beyond = [name for name in self._left if (match := _HEAD.match(name)) and int(match[1]) >= heads]
        for name in beyond:
            del self._left[name]
        return MedusaConfig(heads, blocks), (self._target.layers,)

    def eagle(self, layout: str) -> tuple[SpeculatorConfig, tuple[int, ...]]:
        """One decoder layer, of either layout."""
        keys, hidden = self._keys, self._target.hidden
        if (size := keys.integer("hidden_size")) != hidden or keys.integer("target_hidden_size", hidden) != hidden:
            raise self._other(f"hidden size {size}", hidden)
        if (layers := keys.integer("num_hidden_layers", 1)) != 1:
            raise UnsupportedModelError(f"The EAGLE head has {layers} layers; specrun builds heads of one.")
        if (activation := keys.raw.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise UnsupportedModelError(f"The activation {activation!r} is not supported; specrun builds silu only.")
        heads = keys.integer("num_attention_heads", least=1)
        rope = rope_from_json(keys, 10_000.0, keys.integer("max_position_embeddings", 2048))
        scaling = {field.name: getattr(rope, field.name) for field in dataclasses.fields(RopeScaling)}
        config = EagleConfig(
            layout=layout,
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads, least=1),
            head_dim=keys.integer("head_dim", hidden // heads),
            intermediate=keys.integer("intermediate_size"),
            rope_theta=rope.theta,
            norm_epsilon=keys.number("rms_norm_eps", 1e-6),
            rope_scaling=None if rope.kind == "default" else RopeScaling(**scaling),
        )
        prefix = "midlayer" if f"midlayer.{_QUERY}" in self._left else "layers.0"
        taps = self._taps() if layout == "eagle3" else (self._target.layers,)
        self._matrix("fc", ["fc.weight"])
        if layout == "eagle3":
            for name, place in (("input_norm", "input_layernorm"), ("hidden_norm", "hidden_norm")):
                self._vector(name, f"{prefix}.{place}.weight")
            self._vector("final_norm", "norm.weight")
        elif "fc.bias" in self._left:
            self._vector("fc_bias", "fc.bias")
        self._layer(prefix)
        self._ends_of_eagle()
        return config, taps

    def _layer(self, prefix: str) -> None:
        parts = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        self._matrix("qkv", [f"{part}.weight" for part in parts])
        if f"{parts[0]}.bias" in self._left:
            biases = [self._take(f"{part}.bias") for part in parts]
            self.tensors["qkv_bias"] = np.concatenate(biases)
        self._matrix("output", [f"{prefix}.self_attn.o_proj.weight"])
        self._vector("mlp_norm", f"{prefix}.post_attention_layernorm.weight")
        self._matrix("gate_up", [f"{prefix}.mlp.gate_proj.weight", f"{prefix}.mlp.up_proj.weight"])
        self._matrix("down", [f"{prefix}.mlp.down_proj.weight"])

    def _taps(self) -> tuple[int, ...]:
        layers = self._target.layers
        taps = (2, layers // 2, layers - 3)
        if list(taps) != sorted(set(taps)):
            raise UnsupportedModelError(f"EAGLE-3 reads three layers, which a model of {layers} layers does not have.")
        own = self._keys.raw.get("eagle_config")
        listed = own.get("eagle_aux_hidden_state_layer_ids") if isinstance(own, dict) else None
        # Counted as the layer that reads the stream, or as the one that wrote it.
        if listed is not None and listed not in (list(taps), [tap - 1 for tap in taps]):
            raise UnsupportedModelError(
                f"These EAGLE-3 heads read the layers {listed}; specrun gives {list(taps)} only."
            )
        return taps

    def _ends_of_eagle(self) -> None:
        """Vocabulary, LM head and embedding, the last two only where they are not the target's."""
        ids = order = None
        if "d2t" in self._left:
            offsets = self._integers("d2t")
            ids = np.arange(offsets.size) + offsets
            if (
                ids.size == 0
                or ids.min() < 0
                or ids.max() >= self._target.vocabulary
                or np.unique(ids).size != ids.size
            ):
                raise IntegrityError(f"d2t does not lead to different tokens below {self._target.vocabulary}.")
            order = np.argsort(ids)
            ids = ids[order]
        if "lm_head.weight" in self._left:
            head = self._take_matrix("lm_head.weight")
            if order is None:
                head = self._rows(head)
            elif head.shape[0] != order.size:
                raise IntegrityError(f"lm_head has {head.shape[0]} rows and d2t {order.size}; fetch the heads again.")
            else:
                head = head[order]
            if not _equal(head, self._ends.head, ids):
                self._store("head", head)
        if ids is not None:
            self.tensors["vocabulary"] = ids.astype(np.int32)
        if "embed_tokens.weight" in self._left:
            embedding = self._rows(self._take_matrix("embed_tokens.weight"))
            if not _equal(embedding, self._ends.embedding, None):
                self._store("embedding", embedding)

    def _rows(self, matrix: NDArray[np.float32]) -> NDArray[np.float32]:
        """A matrix over the vocabulary with the target's number of rows: paddings of the two may differ."""
        missing = self._target.vocabulary - matrix.shape[0]
        if abs(missing) > max(1024, self._target.vocabulary // 50) or matrix.shape[1] != self._target.hidden:
            raise self._other(f"a vocabulary of {matrix.shape[0]} x {matrix.shape[1]}", self._target.vocabulary)
        return np.pad(matrix, ((0, missing), (0, 0))) if missing > 0 else matrix[: self._target.vocabulary]

    def _other(self, theirs: str, ours: int) -> UsageError:
        return UsageError(f"The heads are for another model than {self._target.name}: {theirs}, and {ours} here.")

    def _fits(self, name: str, columns: int) -> None:
        if name in self._left and (shape := self._left[name][1].shape)[-1:] != (columns,):
            raise self._other(f"hidden size {list(shape)[-1:]}", columns)

    def _matrix(self, name: str, places: list[str]) -> None:
        parts = [self._take(place) for place in places]
        if any(part.ndim != 2 or part.shape[1] != parts[0].shape[1] for part in parts):
            raise IntegrityError(f"{places[0]} and its neighbours do not have the shapes of one projection.")
        self._store(name, np.concatenate(parts))

    def _store(self, name: str, matrix: NDArray[np.float32]) -> None:
        try:
            self.tensors |= quantized(name, matrix)
        except ValueError as error:
            raise IntegrityError(f"{name} cannot be stored ({error}); fetch the heads again.") from None

    def _take_matrix(self, name: str) -> NDArray[np.float32]:
        """One tensor of two dimensions."""
        matrix = self._take(name)
        if matrix.ndim != 2:
            raise IntegrityError(f"{name} has the shape {list(matrix.shape)} and must be a matrix.")
        return matrix

    def _vector(self, name: str, place: str) -> None:
        self.tensors[name] = self._take(place)

    def _take(self, name: str) -> NDArray[np.float32]:
        """One tensor as f32; each is taken once."""
        raw, entry = self._raw(name, tuple(FLOAT_SIZES))
        values = to_float32(raw, entry.dtype, entry.shape)
        if not np.isfinite(values).all():
            raise IntegrityError(f"{name} holds values that are not finite; fetch the heads again.")
        return values

    def _integers(self, name: str) -> NDArray[np.int64]:
        raw, entry = self._raw(name, ("I64", "I32"))
        kind = np.dtype("<i8" if entry.dtype == "I64" else "<i4")
        if raw.size != math.prod(entry.shape) * kind.itemsize:
            raise IntegrityError(f"{name} has {raw.size} bytes, which is not {entry.dtype} {list(entry.shape)}.")
        return raw.view(kind).astype(np.int64).reshape(-1)

    def _raw(self, name: str, types: tuple[str, ...]) -> tuple[NDArray[np.uint8], Entry]:
        if name not in self._left:
            raise IntegrityError(f"The heads lack {name}; fetch them again.")
        path, entry = self._left.pop(name)
        if entry.dtype not in types:
            raise UnsupportedModelError(f"{name} is stored as {entry.dtype}; specrun reads {', '.join(types)} there.")
        return map_bytes(path, entry.start, entry.end - entry.start), entry

    def finish(self) -> None:
        """Raise UnsupportedModelError for a tensor that nobody took: weights that are ignored are worse guesses."""
        left = [name for name in self._left if not _INERT.fullmatch(name)]
        if left:
            raise UnsupportedModelError(f"The heads have {left[0]}, which specrun's layouts do not account for.")


_QUERY = "self_attn.q_proj.weight"


def _equal(found: NDArray[np.float32], matrix: Matrix, ids: NDArray[np.int64] | None) -> bool:
    """Whether `found` is the rows `ids` of the target's matrix but for rounding, judged by some rows."""
    rows = np.unique(np.linspace(0, found.shape[0] - 1, _SAMPLED_ROWS).astype(np.int64))
    ours = dequantize_matrix(matrix, rows if ids is None else ids[rows])
    theirs = found[rows]
    if ours.shape != theirs.shape:
        return False
    difference = (theirs - ours).astype(np.float64)  # which holds the square of any float
    return float(np.square(difference).mean()) <= _SAME**2 * float(np.square(ours).mean())
