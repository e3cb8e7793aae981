"""A small draft model in torch: a few layers between the target's embedding and its cut head, distilled from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specrun.export.target_ends import TargetLayer
from specrun.export.training.batches import Batch
from specrun.export.training.distil import distil, ranks
from specrun.export.training.layers import Attention, Mlp, RMSNorm, Rotary
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts


class DraftLayer(nn.Module):
    """One llama layer."""

    def __init__(self, parts: TargetParts) -> None:
        super().__init__()
        self.input_norm = RMSNorm(parts.hidden, parts.epsilon)
        self.attention = Attention(parts.hidden, parts.heads, parts.kv_heads, parts.head_dim)
        self.mlp_norm = RMSNorm(parts.hidden, parts.epsilon)
        self.mlp = Mlp(parts.hidden, parts.intermediate)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor) -> Tensor:
        """x [rows, length, hidden] -> the same."""
        x = x + self.attention(self.input_norm(x), rotary, mask)
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class DraftModel(nn.Module):
    """Position i gives token i + 1, as the target does."""

    def __init__(self, parts: TargetParts, layers: int) -> None:
        super().__init__()
        self.parts = parts
        self.layers = [DraftLayer(parts) for _ in range(layers)]
        for index, layer in enumerate(self.layers):
            self.add_module(f"layer_{index}", layer)
        self.final_norm = RMSNorm(parts.hidden, parts.epsilon)
        with torch.no_grad():
            self.final_norm.weight.copy_(parts.final_norm)

    def tensors(self) -> dict[str, Tensor]:
        """The speculator's tensors by name; the matrices are the parameters themselves."""
        tensors: dict[str, Tensor] = {"final_norm": self.final_norm.weight}
        for index, layer in enumerate(self.layers):
            tensors |= {
                f"layers.{index}.input_norm": layer.input_norm.weight,
                f"layers.{index}.qkv": layer.attention.qkv.weight,
                f"layers.{index}.output": layer.attention.output.weight,
                f"layers.{index}.mlp_norm": layer.mlp_norm.weight,
                f"layers.{index}.gate_up": layer.mlp.gate_up.weight,
                f"layers.{index}.down": layer.mlp.down.weight,
            }
        return tensors

    @torch.no_grad()
    def start_from(self, layers: Sequence[TargetLayer]) -> None:
        """Begin with copies of layers of the target."""
        for ours, theirs in zip(self.layers, layers, strict=True):
            pairs = (
                (ours.input_norm.weight, theirs.input_norm),
                (ours.attention.qkv.weight, theirs.qkv),
                (ours.attention.output.weight, theirs.output),
                (ours.mlp_norm.weight, theirs.mlp_norm),
                (ours.mlp.gate_up.weight, theirs.gate_up),
                (ours.mlp.down.weight, theirs.down),
            )
            for parameter, array in pairs:
                parameter.copy_(torch.from_numpy(array))

    def losses(self, batch: Batch, depth: int = 0, scores: Scores | None = None) -> Tensor:
        """The loss; `scores` counts how often a chain of `depth` tokens was right at each of them."""
        rotary = Rotary(self.parts.head_dim, self.parts.rope_theta, batch.positions)
        mask = batch.mask()
        x = self.parts.embedding[batch.tokens[:, :-1]].float()
        for layer in self.layers:
            x = layer(x, rotary, mask)
        wanted = batch.scored(1)
        out, residual = self.final_norm(x[wanted]), batch.features[:, :-1, -self.parts.hidden :][wanted]
        if scores is not None:
            found = ranks(self.parts, out, residual, self.parts.rows(batch.ahead(1)[wanted]))
            right: Tensor | None = None
            for step in range(depth):  # a chain runs over the places behind the one where it starts
                right = None if right is None else nn.functional.pad(right[:, :-1], (1, 0))
                right = scores.add(step, wanted, found, right)
        return distil(self.parts, out, residual)
