"""Published heads with random weights, and their forward passes in torch as their papers' code has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

HIDDEN, VOCABULARY, DRAFT = 64, 300, 90
EAGLE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, width: int, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, size, bias) for size in (64, 32, 32))
        self.o_proj = nn.Linear(64, HIDDEN, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        q, k, v = (p(x).view(count, -1, 16).transpose(0, 1) for p in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, 16, 2) / 16)
        cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))
        q, k = (t * cos + torch.cat([-t[..., 8:], t[..., :8]], -1) * sin for t in (q, k))
        mixed = nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), is_causal=True
        )
        return self.o_proj(mixed.transpose(0, 1).reshape(count, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 96, False), nn.Linear(HIDDEN, 96, False)
        self.down_proj = nn.Linear(96, HIDDEN, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The decoder layer of EAGLE-1 (`width` = hidden), or of EAGLE-3 with norms of both inputs."""

    def __init__(self, eagle3: bool, bias: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(HIDDEN * (1 + eagle3), bias), Mlp()
        self.post_attention_layernorm = Norm()
        if eagle3:
            self.hidden_norm, self.input_layernorm = Norm(), Norm()

    def forward(self, x: torch.Tensor, embedded: torch.Tensor | None = None) -> torch.Tensor:
        joined = x
        if embedded is not None:
            joined = torch.cat([self.input_layernorm(embedded), self.hidden_norm(x)], -1)
        x = x + self.self_attn(joined)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle1(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(False, False)])
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.fc(torch.cat([embedded, features], -1)))


class Eagle3(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.midlayer, self.norm = Layer(True, bias), Norm()
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, False)
        self.lm_head = nn.Linear(HIDDEN, DRAFT, False)
        self.register_buffer("d2t", torch.sort(torch.randperm(VOCABULARY)[:DRAFT])[0] - torch.arange(DRAFT))
        self.register_buffer("t2d", torch.zeros(VOCABULARY, dtype=torch.bool))

    def forward(self, embedded: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.midlayer(self.fc(features), embedded)
        return self.lm_head(self.norm(hidden)), hidden


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


def medusa(heads: int = 3, blocks: int = 2, own: bool = True) -> nn.ModuleList:
    last = [nn.Linear(HIDDEN, VOCABULARY, bias=False)] if own else []
    return nn.ModuleList([nn.Sequential(*(Block() for _ in range(blocks)), *last) for _ in range(heads)])


def save_heads(model: nn.Module, folder: Path, config: dict[str, Any], **extra: torch.Tensor) -> Path:
    """Write config.json and model.safetensors; `extra` has "__" for "."."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    tensors |= {name.replace("__", "."): tensor for name, tensor in extra.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def to_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array, np.float32))
