"""What Medusa and EAGLE begin with in torch: the target's features and the newest token, joined into one vector."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specrun.export.training.layers import RMSNorm
from specrun.export.training.target_parts import TargetParts


class Trunk(nn.Module):
    """Each tap of the features normalised, all of them through `fc`; with the token's embedding through `join`."""

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
        self.final_norm = RMSNorm(hidden, parts.epsilon)
        scale = float(parts.final_norm.square().mean().sqrt())
        with torch.no_grad():
            # As a beginning the last residual stream passes as the target's own head would see it.
            self.fc.weight.zero_()
            self.fc.weight[:, -hidden:] = torch.eye(hidden)
            self.join.weight.normal_(0, 0.02)
            self.join.weight[:, hidden:] += torch.eye(hidden)
            self.tap_norms[-1].weight.copy_(parts.final_norm / scale)
            self.final_norm.weight.fill_(scale)

    def trunk_tensors(self) -> dict[str, Tensor]:
        """The tensors by name; the matrices are the parameters themselves."""
        vectors = {"tap_norms": torch.stack([norm.weight for norm in self.tap_norms])}
        for name in ("embedding_norm", "hidden_norm", "final_norm"):
            vectors[name] = getattr(self, name).weight
        return vectors | {"fc": self.fc.weight, "join": self.join.weight}

    def embed(self, tokens: Tensor) -> Tensor:
        """Normalised embeddings of tokens i64 [...] -> [..., hidden]."""
        embedded: Tensor = self.embedding_norm(self.parts.embedding[tokens])
        return embedded

    def combine(self, features: Tensor) -> Tensor:
        """Features [rows, length, taps * hidden] -> [rows, length, hidden]."""
        taps = features.float().chunk(self.taps, dim=-1)
        combined: Tensor = self.fc(torch.cat([norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)], -1))
        return combined

    def joined(self, x: Tensor, embedded: Tensor) -> Tensor:
        """Both [..., hidden] -> the same."""
        both: Tensor = self.join(torch.cat([embedded.to(x.dtype), self.hidden_norm(x)], dim=-1))
        return both
