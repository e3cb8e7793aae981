"""What training takes from the target and leaves as it is: embedding, final norm, and the head cut to fewer rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Frozen tensors of the target, and its sizes.

    embedding [vocabulary, hidden], head [draft vocabulary, hidden], both of the type that training computes in;
    final_norm f32 [hidden];
    vocabulary i64 [draft vocabulary]: the target's token of each row of the head, ascending
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    vocabulary: Tensor
    epsilon: float
    rope_theta: float
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return int(self.final_norm.shape[0])

    def rows(self, tokens: Tensor) -> Tensor:
        """The rows of the head that stand for the target's tokens, i64 like `tokens`; -1 for those without one."""
        places = torch.searchsorted(self.vocabulary, tokens.contiguous()).clamp(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[places] == tokens, places, -1)

    def normed(self, residual: Tensor) -> Tensor:
        """The target's final norm of a residual stream [..., hidden], f32."""
        wide = residual.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon) * self.final_norm

    def logits(self, residual: Tensor) -> Tensor:
        """The target's own logits over the draft vocabulary, from its last residual stream [..., hidden]."""
        return self.guess(self.normed(residual))

    def guess(self, hidden: Tensor) -> Tensor:
        """Logits over the draft vocabulary of what stands before the head, [..., hidden]."""
        return hidden.to(self.head.dtype) @ self.head.T
