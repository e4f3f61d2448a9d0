"""A small model in which every module has ``reset_parameters``, which megatron-fsdp requires for building on meta.

Initialisation is deterministic: it draws no random numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, ROWS = 8, 8
KEPT = "sequence_parallel"
"""An attribute that Megatron-Core sets on parameters and that the package should copy to new ones."""


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-0.5, 0.5, self.weight.numel()).view_as(self.weight))


class Frequencies(nn.Module):
    """A module without parameters, and with a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 1 / 10 ** torch.arange(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.frequencies.cos()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Frequencies()
        self.blocks = nn.Sequential(Block(), Block())
        for block in self.blocks:
            setattr(block.norm.weight, KEPT, True)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.rotary(x))


def batch(step: int) -> dict[str, Tensor]:
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": y}


def loss(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"])
