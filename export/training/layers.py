"""The pieces of a llama layer in torch, as the graphs compute them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size], any float dtype -> the same."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._epsilon)
        return (normed * self.weight).to(x.dtype)


class Rotary:
    """Rotates the halves of each head by position."""

    def __init__(self, head_dim: int, theta: float, positions: Tensor) -> None:
        """positions: i64 [batch, length]."""
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
        angles = positions[:, None, :, None].float() * theta**-steps
        self._cos, self._sin = angles.cos(), angles.sin()  # [batch, 1, length, head_dim / 2]

    def __call__(self, x: Tensor) -> Tensor:
        """x [batch, heads, length, head_dim] -> the same, rotated."""
        left, right = x.float().chunk(2, dim=-1)
        turned = torch.cat([left * self._cos - right * self._sin, right * self._cos + left * self._sin], dim=-1)
        return turned.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with the projections of q, k and v in one matrix. `width`: of its input."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, width: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.qkv = nn.Linear(width or hidden, (heads + 2 * kv_heads) * head_dim, bias=False)
        self.output = nn.Linear(heads * head_dim, hidden, bias=False)

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, length, width] -> q, k, v [batch, heads, length, head_dim], rotated, k and v one for each query."""
        batch, length, _ = x.shape
        split = self.qkv(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query, key, value = split.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        group = self.heads // self.kv_heads
        return rotary(query), rotary(key).repeat_interleave(group, 1), value.repeat_interleave(group, 1)

    def join(self, mixed: Tensor) -> Tensor:
        """[batch, heads, length, head_dim] -> [batch, length, hidden]."""
        batch, heads, length, size = mixed.shape
        joined: Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, heads * size))
        return joined

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor) -> Tensor:
        """Attention within x; mask bool [batch, 1, length, length]: what each row sees."""
        query, key, value = self.project(x, rotary)
        return self.join(nn.functional.scaled_dot_product_attention(query, key, value, mask))


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> the same."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        mixed: Tensor = self.down(nn.functional.silu(gate) * up)
        return mixed
