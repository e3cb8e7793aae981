"""The EAGLE draft layer in torch and its loss with training-time test (Li et al. 2024, 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrun.export.training.batches import Batch
from specrun.export.training.distil import distil, ranks
from specrun.export.training.layers import Attention, Mlp, RMSNorm, Rotary
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts

STEP_WEIGHT = 0.8  # of the loss of a step against that of the step before


class EagleModel(nn.Module):
    """One layer that predicts the target's next residual stream from the last ones and the newest token.

    Slot i holds the target's features of token i, or the layer's own output for slot i - 1, and token i + 1; its output
    gives the token after that.
    """

    def __init__(self, parts: TargetParts, taps: int) -> None:
        super().__init__()
        hidden = parts.hidden
        self.parts = parts
        self.taps = taps
        self.tap_norms = [RMSNorm(hidden, parts.epsilon) for _ in range(taps)]
        for index, norm in enumerate(self.tap_norms):
            self.add_module(f"tap_norm_{index}", norm)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.embedding_norm = RMSNorm(hidden, parts.epsilon)
        self.hidden_norm = RMSNorm(hidden, parts.epsilon)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_norm = RMSNorm(hidden, parts.epsilon)
        self.attention = Attention(hidden, parts.heads, parts.kv_heads, parts.head_dim)
        self.mlp_norm = RMSNorm(hidden, parts.epsilon)
        self.mlp = Mlp(hidden, parts.intermediate)
        self.final_norm = RMSNorm(hidden, parts.epsilon)
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:] = torch.eye(hidden)  # the last residual stream alone, as a beginning
            self.join.weight.normal_(0, 0.02)
            self.join.weight[:, hidden:] += torch.eye(hidden)
            for linear in (self.attention.output, self.mlp.down):
                linear.weight.mul_(0.5)
            self.final_norm.weight.fill_(float(parts.final_norm.square().mean().sqrt()))
            self.tap_norms[-1].weight.copy_(parts.final_norm / parts.final_norm.square().mean().sqrt())

    def tensors(self) -> dict[str, Tensor]:
        """The speculator's tensors by name; the matrices are the parameters themselves."""
        vectors = {"tap_norms": torch.stack([norm.weight for norm in self.tap_norms])}
        for name in ("embedding_norm", "hidden_norm", "input_norm", "mlp_norm", "final_norm"):
            vectors[name] = getattr(self, name).weight
        return vectors | {
            "fc": self.fc.weight,
            "join": self.join.weight,
            "qkv": self.attention.qkv.weight,
            "output": self.attention.output.weight,
            "gate_up": self.mlp.gate_up.weight,
            "down": self.mlp.down.weight,
        }

    def combine(self, features: Tensor) -> Tensor:
        """Features [rows, length, taps * hidden] -> [rows, length, hidden]."""
        taps = features.float().chunk(self.taps, dim=-1)
        combined: Tensor = self.fc(torch.cat([norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)], -1))
        return combined

    def losses(self, batch: Batch, steps: int, scores: Scores | None = None) -> Tensor:
        """The loss over `steps` steps; `scores` counts how often each was right.

        Step 0 uses the target's features; each later one the layer's own output of the step before, at the slot before.
        """
        rotary = Rotary(self.parts.head_dim, self.parts.rope_theta, batch.positions)
        embedded = self.embedding_norm(self.parts.embedding[batch.tokens[:, 1:]])
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
        joined = self.join(torch.cat([embedded.to(x.dtype), self.hidden_norm(x)], dim=-1))
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
