"""Medusa heads in torch and their loss (Cai et al. 2024), with one head matrix for all, cut from the target's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrun.export.training.batches import Batch
from specrun.export.training.distil import distil, ranks
from specrun.export.training.scores import Scores
from specrun.export.training.target_parts import TargetParts
from specrun.export.training.trunk import Trunk

STEP_WEIGHT = 0.8  # of the loss of a head against that of the head before


class MedusaModel(Trunk):
    """Head j guesses the token j + 2 places after the position whose features it reads, with the token after that.

    In the paper the heads see the last residual stream alone. They guess far better if they see which token was chosen
    after it (Ankner et al. 2024, Hydra) and the streams of lower layers (EAGLE-3), at one matrix each for all heads.
    """

    def __init__(self, parts: TargetParts, taps: int, heads: int, blocks: int) -> None:
        super().__init__(parts, taps)
        self.heads = [[nn.Linear(parts.hidden, parts.hidden) for _ in range(blocks)] for _ in range(heads)]
        for index, linears in enumerate(self.heads):
            for block, linear in enumerate(linears):
                self.add_module(f"head_{index}_{block}", linear)
                nn.init.zeros_(linear.weight)
                nn.init.zeros_(linear.bias)

    def tensors(self) -> dict[str, Tensor]:
        """The speculator's tensors by name; the matrices are the parameters themselves."""
        return self.trunk_tensors() | {
            f"heads.{index}.blocks.{block}.{part}": getattr(linear, part)
            for index, blocks in enumerate(self.heads)
            for block, linear in enumerate(blocks)
            for part in ("weight", "bias")
        }

    def losses(self, batch: Batch, scores: Scores | None = None) -> Tensor:
        """The loss; `scores` counts how often each head was right."""
        residual = batch.features[..., -self.parts.hidden :]
        shared = self.joined(self.combine(batch.features[:, :-1]), self.embed(batch.tokens[:, 1:]))
        total = shared.new_zeros((), dtype=torch.float32)
        right: Tensor | None = None
        for index, blocks in enumerate(self.heads):
            wanted = batch.scored(index + 2)
            ahead = residual[:, index + 1 :]
            wanted = wanted[:, : ahead.shape[1]]
            z = shared[:, : ahead.shape[1]][wanted]
            for block in blocks:
                z = z + nn.functional.silu(block(z))
            out = self.final_norm(z)
            total = total + STEP_WEIGHT**index * distil(self.parts, out, ahead[wanted])
            if scores is not None:
                written = self.parts.rows(batch.ahead(index + 2)[:, : ahead.shape[1]][wanted])
                before = None if right is None else right[:, : ahead.shape[1]]
                right = scores.add(index, wanted, ranks(self.parts, out, ahead[wanted], written), before)
        return total
