"""The EAGLE draft layer in torch and its loss with training-time test (Li et al. 2024, 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrun.export.training.batches import Batch
from specrun.export.training.distil import distil, ranks
from specrun.export.training.layers import Attention, Mlp, RMSNorm, Rotary
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.trunk import Trunk

STEP_WEIGHT = 0.8  # of the loss of a step against that of the step before


class EagleModel(Trunk):
    """One layer that predicts the target's next residual stream from the last ones and the newest token.

    Slot i holds the target's features of token i, or the layer's own output for slot i - 1, and token i + 1; its output
    gives the token after that.
    """

    def __init__(self, parts: TargetParts, taps: int) -> None:
        super().__init__(parts, taps)
        self.input_norm = RMSNorm(parts.hidden, parts.epsilon)
        self.attention = Attention(parts.hidden, parts.heads, parts.kv_heads, parts.head_dim)
        self.mlp_norm = RMSNorm(parts.hidden, parts.epsilon)
        self.mlp = Mlp(parts.hidden, parts.intermediate)
        with torch.no_grad():
            for linear in (self.attention.output, self.mlp.down):
                linear.weight.mul_(0.5)

    def tensors(self) -> dict[str, Tensor]:
        """The speculator's tensors by name; the matrices are the parameters themselves."""
        return self.trunk_tensors() | {
            "input_norm": self.input_norm.weight,
            "mlp_norm": self.mlp_norm.weight,
            "qkv": self.attention.qkv.weight,
            "output": self.attention.output.weight,
            "gate_up": self.mlp.gate_up.weight,
            "down": self.mlp.down.weight,
        }

    def losses(self, batch: Batch, steps: int, scores: Scores | None = None) -> Tensor:
        """The loss over `steps` steps; `scores` counts how often each was right.

        Step 0 uses the target's features; each later one the layer's own output of the step before, at the slot before.
        """
        rotary = Rotary(self.parts.head_dim, self.parts.rope_theta, batch.positions)
        embedded = self.embed(batch.tokens[:, 1:])
        last = batch.features[:, 1:, -self.parts.hidden :]
        x = self.combine(batch.features[:, :-1])
        mask = batch.mask()
        segments = batch.segments[:, :-1]
        wanted = batch.scored(2)  # slot i gives token i + 2
        keys: list[Tensor] = []
        values: list[Tensor] = []
        total = x.new_zeros((), dtype=torch.float32)
        right: Tensor | None = None
        for step in range(steps):
            if step:
                x = _later(x, 1)
                wanted = wanted.clone()
                wanted[:, :step] = False
                wanted[:, step:] &= segments[:, step:] == segments[:, :-step]
            x, key, value = self._layer(x, embedded, rotary, mask, keys, values)
            keys.append(key)
            values.append(value)
            out, residual = self.final_norm(x[wanted]), last[wanted]
            total = total + STEP_WEIGHT**step * distil(self.parts, out, residual)
            if scores is not None:
                found = ranks(self.parts, out, residual, self.parts.rows(batch.ahead(2)[wanted]))
                # The path of slot i ran over the slot before, at the step before.
                before = None if right is None else _later(right[..., None], 1)[..., 0]
                right = scores.add(step, wanted, found, before)
        return total

    def _layer(
        self, x: Tensor, embedded: Tensor, rotary: Rotary, mask: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        joined = self.joined(x, embedded)
        query, key, value = self.attention.project(self.input_norm(joined), rotary)
        if keys:
            mixed = _chain_attention(query, [*keys, key], [*values, value], mask)
        else:
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        x = joined + self.attention.join(mixed)
        return x + self.mlp(self.mlp_norm(x)), key, value


def _chain_attention(query: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Attention of step s: over the slots of step 0 up to i - s, then one slot of each later step, i itself last."""
    steps = len(keys) - 1
    length = query.shape[2]
    scale = query.shape[-1] ** -0.5
    seen = mask & torch.ones_like(mask[:1]).tril(-steps)
    first = (query @ keys[0].transpose(-1, -2) * scale).float().masked_fill(~seen, float("-inf"))
    scores = [first]
    moved: list[Tensor] = []
    for step in range(1, steps + 1):
        key, value = (_later(part[step], steps - step) for part in (keys, values))
        scores.append(((query * key).sum(-1, keepdim=True) * scale).float())
        moved.append(value)
    weights = torch.softmax(torch.cat(scores, dim=-1), -1).to(query.dtype)
    mixed = weights[..., :length] @ values[0]
    for index, value in enumerate(moved):
        mixed = mixed + weights[..., length + index : length + index + 1] * value
    return mixed


def _later(x: Tensor, slots: int) -> Tensor:
    """x [..., length, size] moved `slots` further; what comes in is 0."""
    return x if not slots else nn.functional.pad(x[..., :-slots, :], (0, 0, slots, 0))
