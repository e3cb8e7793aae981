"""A speculator's tensors, and those that it shares with its target, in the data file of its graphs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specrun.export.config import LayerConfig, ModelConfig
from specrun.export.families import family_for
from specrun.export.quantize import BlockMatrix, Matrix, quantize_matrix
from specrun.export.rotary import rotary_tables
from specrun.export.speculator_config import DraftConfig, EagleConfig, rope_config
from specrun.export.speculator_weights import BLOCK, Speculator
from specrun.export.target_ends import TargetEnds, rows_8bit
from specrun.export.weight_file import Stored, WeightFile
from specrun.export.weight_store import StoredLayer, StoredLinear, StoredMatrix, StoredWeights, store_matrix


class SpeculatorParts:
    """Writes what the graph of `speculator` refers to; `ends` are its target's, `positions` how many there may be.

    cuda: the graph is for that provider.
    """

    def __init__(
        self, speculator: Speculator, ends: TargetEnds, file: WeightFile, positions: int, *, cuda: bool = False
    ) -> None:
        self.speculator = speculator
        self._ends = ends
        self._file = file
        self._positions = positions
        self._cuda = cuda

    def vector(self, name: str) -> Stored:
        """A vector of the speculator, f32."""
        return self._file.add(name, self.speculator.tensor(name))

    def target_norm(self) -> Stored:
        """The target's final norm, f32 [hidden]."""
        return self._file.add("target.norm", self._ends.final_norm)

    @property
    def target_epsilon(self) -> float:
        """The epsilon of that norm."""
        return self._ends.norm_epsilon

    def tap_norms(self) -> list[Stored]:
        """The norms of the taps, f32 [hidden] each; none in the published layout."""
        if "tap_norms" not in self.speculator:
            return []
        rows = self.speculator.tensor("tap_norms")
        return [self._file.add(f"tap_norms.{index}", row) for index, row in enumerate(rows)]

    def linear(self, name: str, bias: str | None = None) -> StoredLinear:
        """The matrix of that name, with the bias of that name if the speculator has it."""
        stored = store_matrix(self._file, name, _matrix(self.speculator, name))
        return StoredLinear((stored,), self.vector(bias) if bias is not None and bias in self.speculator else None)

    def embedding(self) -> StoredMatrix:
        """The speculator's own, else the target's."""
        if "embedding" in self.speculator:
            name, matrix = "embedding", _matrix(self.speculator, "embedding")
        else:
            name, matrix = "target.embedding", rows_8bit(self._ends.embedding)
        return store_matrix(self._file, name, matrix, zero_points=self._cuda)

    def head(self) -> StoredLinear:
        """The speculator's own, else the rows of the draft vocabulary out of the target's."""
        if "head" in self.speculator:
            return self.linear("head")
        cut = rows_8bit(self._ends.head, self.speculator.vocabulary)
        return StoredLinear((store_matrix(self._file, "target.head", cut),), None)

    def vocabulary(self) -> Stored | None:
        """The target's token of each row of the head, i64 [draft vocabulary]; None where they are the same."""
        ids = self.speculator.vocabulary
        return None if ids is None else self._file.add("vocabulary", ids.astype(np.int64))

    def rotary(self, config: EagleConfig | DraftConfig) -> tuple[Stored, Stored]:
        """(cosines, sines), f32 [positions, head_dim / 2] each."""
        cos, sin = rotary_tables(model_config(self.speculator, config, 1), self._positions)
        return self._file.add("cos", cos), self._file.add("sin", sin)

    def draft(self, config: DraftConfig) -> StoredWeights:
        """Everything of a draft, in the form that the target's graph takes."""
        layers = tuple(
            StoredLayer(
                input_norm=self.vector(f"layers.{index}.input_norm"),
                qkv=self.linear(f"layers.{index}.qkv", f"layers.{index}.qkv_bias"),
                query_norm=None,
                key_norm=None,
                output=self.linear(f"layers.{index}.output"),
                mlp_norm=self.vector(f"layers.{index}.mlp_norm"),
                gate_up=self.linear(f"layers.{index}.gate_up"),
                down=self.linear(f"layers.{index}.down"),
            )
            for index in range(config.layers)
        )
        cos, sin = self.rotary(config)
        return StoredWeights(self.embedding(), layers, self.vector("final_norm"), self.head(), cos, sin)


def model_config(speculator: Speculator, config: EagleConfig | DraftConfig, context: int) -> ModelConfig:
    """The layers of a speculator as a llama whose logits are those of the draft vocabulary."""
    layers = config.layers if isinstance(config, DraftConfig) else 1
    return ModelConfig(
        family=family_for("llama"),
        name=speculator.name,
        licence=speculator.licence,
        hidden=speculator.target.hidden,
        layers=layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate,
        vocabulary=speculator.draft_vocabulary,
        context=context,
        norm_epsilon=config.norm_epsilon,
        rope=rope_config(config),
        tied_head=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        layer_configs=(LayerConfig(None, True),) * layers,
    )


def _matrix(speculator: Speculator, name: str) -> Matrix:
    """A matrix in 8-bit blocks, just as its file has them where it does."""
    tensors = speculator.tensors
    if name in tensors:
        return quantize_matrix(np.ascontiguousarray(tensors[name], np.float32), "int8", BLOCK)
    codes: NDArray[np.int8] = tensors[f"{name}.codes"]
    rows, columns = codes.shape
    packed = (codes.view(np.uint8) ^ np.uint8(0x80)).reshape(rows, columns // BLOCK, BLOCK)
    return BlockMatrix("int8", 8, BLOCK, packed, tensors[f"{name}.scales"].astype(np.float32))
