"""What still agrees when a gradient is wrong within attention, on real ranks; with the message as pytest shows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.reports.terminal import describe_failure
from pytest_fsdp_meta.worlds import Rank
from tests import trial_help

PARITY = "grad_parity"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.o, self.v, self.k, self.q = (nn.Linear(8, 8, bias=False) for _ in range(4))  # not in the order of use
        self.repeats = False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.repeats:  # as a backward that adds the gradients of repeated heads once too often
            k, v = (part + (part - part.detach()) for part in (k, v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.ModuleDict({"layers": nn.Sequential(Attention(), Attention()), "head": nn.Linear(8, 4)})
    return Model(blocks)


class Model(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.layers, self.head = parts["layers"], parts["head"]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def observe(repeats: bool, **declared: Any) -> Evidence:
    def load(fsdp: Rank) -> Subject:
        model: Any = network()
        model.layers[1].repeats = repeats
        for block in model.layers:
            fully_shard(block, mesh=fsdp.mesh)
        fully_shard(model, mesh=fsdp.mesh)
        batch = lambda step: {"x": torch.randn(4, 6, 8)}  # noqa: E731
        return Subject(model, reference=network, batch=batch, loss=squared, **declared)

    return trial_help.observe(load, [PARITY], steps=2, selection={PARITY})


def test_the_order_of_use_is_recorded():
    evidence = observe(repeats=False)
    attention = [f"layers.{block}.{name}.weight" for block in (0, 1) for name in "qkvo"]
    assert evidence.reference is not None
    assert evidence.reference.used == (*attention, "head.weight", "head.bias")
    assert judge(built_in()[PARITY], evidence, built_in()).status == "passed"


def test_keys_and_values_depart_and_the_rest_of_the_attention_agrees():
    untraced = replace(observe(repeats=True), traces=None)  # with traces, the line names the module
    message = describe_failure(judge(built_in()[PARITY], untraced, built_in()), "world of 2", "pytest")
    assert message.splitlines()[1:7] == [
        "failed in a world of 2:",
        "",
        "where it starts: the backward reaches layers.1.v.weight first, layers.1.o.weight agrees",
        "",
        "  layers.1.v.weight, ranks 0, 1: gradient is 2 times the reference's, but should be equal within 0.0001",
        "  layers.1.k.weight, ranks 0, 1: gradient is 2 times the reference's, but should be equal within 0.0001",
    ]
