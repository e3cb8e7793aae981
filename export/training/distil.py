"""What all methods have in common: outputs go through the target's cut head and are compared with the target's own.

Rows of logits are as wide as the draft vocabulary, so a few hundred of them are in memory at a time: the gradient of a
piece is computed with its loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from specrun.export.training.scores import rank_of_best
from specrun.export.training.target_parts import TargetParts

ROWS = 256  # at a time


def distil(parts: TargetParts, hidden: Tensor, residual: Tensor) -> Tensor:
    """-sum(p * log q), the mean over the rows; 0 where there are none.

    q is softmax(head @ hidden), hidden [rows, hidden]; p the target's own distribution over the draft vocabulary after
    its last residual stream [rows, hidden].
    """
    total: Tensor = _Distil.apply(hidden, residual, parts)  # type: ignore[no-untyped-call]
    return total / max(len(hidden), 1)


@torch.no_grad()
def ranks(parts: TargetParts, hidden: Tensor, residual: Tensor, written: Tensor) -> Tensor:
    """At which rank the target's best token stands, i64 [rows]; `written` as `rank_of_best` takes it."""
    pieces = [
        rank_of_best(parts.guess(hidden[piece]), parts.logits(residual[piece]), written[piece])
        for piece in _pieces(len(hidden))
    ]
    return torch.cat(pieces) if pieces else torch.zeros_like(written)


class _Distil(torch.autograd.Function):
    """The sum of the losses, f32; keeps the gradient of `hidden`."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, residual: Tensor, parts: TargetParts
    ) -> Tensor:
        """See `distil`."""
        total = hidden.new_zeros((), dtype=torch.float32)
        gradient = torch.empty_like(hidden)
        for piece in _pieces(len(hidden)):
            q = parts.guess(hidden[piece]).float()
            p = torch.softmax(parts.logits(residual[piece]).float(), -1)
            norm = q.logsumexp(-1, keepdim=True)
            total += norm.sum() - (q * p).sum()
            difference = q.sub_(norm).exp_().sub_(p)
            gradient[piece] = (difference.to(parts.head.dtype) @ parts.head).to(gradient.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, scale: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of `hidden`."""
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * scale.to(gradient.dtype), None, None


def _pieces(rows: int) -> Iterator[slice]:
    for start in range(0, rows, ROWS):
        yield slice(start, start + ROWS)
