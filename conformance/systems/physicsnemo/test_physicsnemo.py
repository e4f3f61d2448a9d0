"""physicsnemo's ShardTensor: points divided over ranks, with weights that FSDP2 shards over others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchvision_operators
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_module

torchvision_operators.define()  # before physicsnemo's operators, which import torchvision

from physicsnemo.domain_parallel import ShardTensor, register_custom_ops, sync_module_over_mesh  # noqa: E402

from pytest_fsdp_meta import Subject, fsdp_conformance  # noqa: E402
from pytest_fsdp_meta.worlds import Rank  # noqa: E402

Loss = Callable[[Any, dict[str, Any]], Any]
CHECKS = ["loss_parity", "grad_parity", "update_parity"]
MSE = "physicsnemo 2.2.2 has no operator for mse_loss and takes DTensor's of torch 2.13.0 (shard_tensor.py:1567), "
UNEVEN = {"loss_parity": MSE + "which takes the mean of the ranks' means, however many points they have"}
SUMMED = {"grad_parity": MSE + "whose gradients are summed over the ranks instead of averaged"}
REORDERED = {
    "loss_parity": "physicsnemo 2.2.2: reshape merges rows into a sharded dimension by reshaping each part, which "
    "puts rows in another order (domain_parallel/shard_utils/view_ops.py:480)"
}


class Flat(nn.Module):
    """Mixes features of points, which it flattens as it is usual before linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return self.outer(self.inner(x.reshape(-1, 6)).relu())


def build_convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(6, 16, 3, padding=1), nn.GELU(), nn.Conv1d(16, 6, 3, padding=1))


def build_flat() -> nn.Module:
    torch.manual_seed(0)
    return Flat()


def batch(step: int, points: int = 9) -> dict[str, Tensor]:
    x = torch.randn(8, 6, points, generator=torch.Generator().manual_seed(step))
    return {"x": x, "y": x.flip(1).cos()}


def mean_of_squares(model: Any, batch: dict[str, Any]) -> Any:
    return (model(batch["x"]) - batch["y"]).square().mean()


def mse(model: Any, batch: dict[str, Any]) -> Any:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def weighted(model: Any, batch: dict[str, Any]) -> Any:
    """Weigh the rows of points by their place."""
    out = model(batch["x"])
    out = out.full_tensor() if isinstance(out, ShardTensor) else out
    return (out.square().mean(1) * torch.linspace(0, 1, len(out), device=out.device)).mean()


def load(fsdp: Rank, build: Callable[[], nn.Module], loss: Loss, *, points: int = 9, **options: Any) -> Subject:
    register_custom_ops()
    model, domain = build().to(fsdp.device), fsdp.mesh["cp"]
    sync_module_over_mesh(model, domain)
    model = distribute_module(model, domain)
    if "dp" in fsdp.mesh.mesh_dim_names:
        model = fully_shard(model, mesh=fsdp.mesh["dp"], **options)

    def train_step(model: Any, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        own = {}
        for name, whole in batch.items():
            parts = whole.chunk(domain.size(), 2)
            shapes = {0: tuple(part.shape for part in parts)}
            own[name] = ShardTensor.from_local(parts[domain.get_local_rank()], domain, (Shard(2),), shapes)
        value = loss(model, own)
        value = value.full_tensor() if isinstance(value, ShardTensor) else value
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return Subject(
        model,
        reference=build,
        batch=partial(batch, points=points),
        loss=loss,
        train_step=train_step,
        whole_while_loading=True,
    )


@fsdp_conformance(mesh={"cp": 2})
def test_uneven_points(fsdp):
    return load(fsdp, build_convolutions, mean_of_squares)


@fsdp_conformance(mesh={"dp": 2, "cp": 2}, only=[*CHECKS, "dtypes_match_reference"])
def test_bf16(fsdp):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return load(fsdp, build_convolutions, mean_of_squares, mp_policy=policy)


@fsdp_conformance(mesh={"cp": 2}, only=CHECKS, xfail=SUMMED)
def test_mse_of_even_points(fsdp):
    return load(fsdp, build_convolutions, mse, points=8)


@fsdp_conformance(mesh={"cp": 2}, only=CHECKS, xfail=UNEVEN)
def test_mse_of_uneven_points(fsdp):
    return load(fsdp, build_convolutions, mse)


@fsdp_conformance(mesh={"cp": 2}, only=CHECKS, xfail=REORDERED)
def test_reshape(fsdp):
    return load(fsdp, build_flat, weighted, points=8)


def test_recipe(recipe, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(torchvision_operators.__file__).parent), prepend=":")
    assert "failed" not in recipe("physicsnemo")
