"""The order in which a forward uses the parameters is recorded, on real ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.worlds import Rank
from tests import trial_help

PARITY = "grad_parity"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o, self.v, self.k, self.q = (nn.Linear(8, 8, bias=False) for _ in range(4))  # not in the order of use

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.Sequential(Attention(), Attention()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def test_the_order_of_use_is_recorded():
    def load(fsdp: Rank) -> Subject:
        model = Model()
        for block in model.layers:
            fully_shard(block, mesh=fsdp.mesh)
        fully_shard(model, mesh=fsdp.mesh)
        return Subject(model, reference=Model, batch=lambda step: {"x": torch.randn(4, 6, 8)}, loss=squared)

    evidence = trial_help.observe(load, [PARITY], steps=2, selection={PARITY})
    attention = [f"layers.{block}.{name}.weight" for block in (0, 1) for name in "qkvo"]
    assert evidence.reference is not None
    assert evidence.reference.used == (*attention, "head.weight", "head.bias")
    assert judge(built_in()[PARITY], evidence, built_in()).status == "passed"
