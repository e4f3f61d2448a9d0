"""TransformerEngine under FSDP2 and, if the release has #2713, with its own tensor parallelism.

It needs CUDA, and this file has not run on a GPU yet.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject, fsdp_conformance

HIDDEN, INNER, ROWS = 64, 128, 8
SPLIT = {"column": {"weight": 0, "bias": 0}, "row": {"weight": 1}}
"""The dim along which tensor parallelism shards a tensor, by the layer's parallel mode."""


@pytest.fixture(scope="session")
def engine() -> None:
    if not torch.cuda.is_available():
        pytest.skip("TransformerEngine needs CUDA, and no GPU is available")
    pytest.importorskip("transformer_engine.pytorch")


@pytest.fixture(scope="session")
def engine_of_2713(engine: None) -> None:
    from transformer_engine.pytorch import Linear

    if not hasattr(Linear, "set_device_mesh"):
        pytest.skip("this TransformerEngine has no set_device_mesh (NVIDIA/TransformerEngine#2713)")


def build(tensor_parallel: int = 1) -> nn.Sequential:
    """Return a dense layer with a bias, and one whose bias is disabled."""
    import transformer_engine.pytorch as te

    def linear(inputs: int, outputs: int, mode: str, bias: bool) -> nn.Module:
        parallel: dict[str, Any] = {"parallel_mode": mode, "tp_size": tensor_parallel} if tensor_parallel > 1 else {}
        return te.Linear(inputs, outputs, bias=bias, params_dtype=torch.float32, device="cuda", **parallel)

    torch.manual_seed(5)
    return nn.Sequential(linear(HIDDEN, INNER, "column", True), nn.SiLU(), linear(INNER, HIDDEN, "row", False))


def batch(step: int) -> dict[str, torch.Tensor]:
    x, y = torch.randn(2, ROWS, HIDDEN, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": y}


def loss(model: nn.Module, rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(rows["x"]), rows["y"])


@fsdp_conformance(world_size=2)
def test_fsdp2(fsdp, engine):
    model = build()
    fully_shard(model, mesh=fsdp.mesh)
    return Subject(model, reference=build, batch=batch, loss=loss)


@fsdp_conformance(mesh={"dp_shard": 2, "tp": 2})
def test_fsdp2_with_tensor_parallelism(fsdp, engine_of_2713):
    model, whole, mesh = build(2), build(), fsdp.mesh["tp"]
    weights = fsdp.mesh[("dp_shard", "tp")]._flatten("weights")
    for layer, reference in zip(model, whole, strict=True):
        if not hasattr(layer, "set_device_mesh"):
            continue
        for name, dim in SPLIT[layer.parallel_mode].items():
            part = getattr(reference, name).detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
            getattr(layer, name).data.copy_(part)
        layer.set_device_mesh(tp_mesh=mesh, weight_mesh=weights)
    fully_shard(model, mesh=fsdp.mesh["dp_shard"])
    return Subject(model, reference=build, batch=batch, loss=loss)
