"""Helpers for tests on GPUs: how many there are, a world on them, and functions that its ranks run."""

from __future__ import annotations

import os
from functools import cache

import pytest

from pytest_fsdp_meta.worlds import ForkServerEngine, World, WorldSpec, current
from tests.world_help import preload

COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier")

PRETENDED = os.environ.get("GPU_DRY_RUN")
"""The number of GPUs in a dry run, which uses the CPU in their place (``python -m benchmarks.gpu --dry-run``)."""
DEVICE = "cpu" if PRETENDED else "cuda"
SHARED = (f"--fsdp-device={DEVICE}", "--fsdp-backend=gloo")
only_cuda = pytest.mark.skipif(bool(PRETENDED), reason="a dry run on the CPU")


@cache
def gpus() -> int:
    """Count the GPUs; not done when this module is imported, because ranks import it too."""
    return int(PRETENDED) if PRETENDED else ForkServerEngine().count_gpus()


def need(count: int) -> None:
    """Skip the test on a machine with fewer GPUs."""
    if gpus() < count:
        pytest.skip(f"needs {count} GPU{'s' if count > 1 else ''}, this machine has {gpus()}")


def gpu_spec(size: int, backend: str, timeout: float = 120.0) -> WorldSpec:
    """Return the specification of a world whose ranks share the GPUs evenly."""
    if PRETENDED:
        return WorldSpec({"dp_shard": size}, timeout=timeout)
    devices = tuple(rank % gpus() for rank in range(size))
    return WorldSpec({"dp_shard": size}, "cuda", backend, timeout=timeout, devices=devices)


def gpu_world(size: int, backend: str, timeout: float = 120.0) -> World:
    return World(gpu_spec(size, backend, timeout), preload())


def synchronize() -> None:
    """Wait for the work that this rank has given to its device."""
    import torch

    torch.get_device_module(current().device).synchronize()


def check_collective(name: str) -> None:
    """Run a collective that FSDP2 or checkpoints use, and check its result."""
    import torch
    import torch.distributed as dist

    rank, device = current(), current().device
    size = rank.world_size
    local = torch.full((2,), float(rank.rank), device=device)
    expected = torch.arange(size, device=device).float().repeat_interleave(2)
    if name == "all_reduce":
        dist.all_reduce(local)
        assert local.tolist() == [sum(range(size))] * 2
    elif name == "broadcast":
        dist.broadcast(local, src=0)
        assert local.tolist() == [0.0, 0.0]
    elif name == "all_gather_into_tensor":
        out = torch.empty(2 * size, device=device)
        dist.all_gather_into_tensor(out, local)
        assert torch.equal(out, expected)
    elif name == "all_gather":
        parts = [torch.empty(2, device=device) for _ in range(size)]
        dist.all_gather(parts, local)
        assert torch.equal(torch.cat(parts), expected)
    elif name == "reduce_scatter_tensor":
        out = torch.empty(2, device=device)
        dist.reduce_scatter_tensor(out, torch.arange(2.0 * size, device=device))
        assert out.tolist() == [2.0 * rank.rank * size, (2.0 * rank.rank + 1) * size]
    else:
        assert name == "barrier"
        dist.barrier()


def train() -> list[float]:
    """Train a sharded model for three steps and return the losses."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank = current()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(rank.device)
    for layer in model:
        fully_shard(layer, mesh=rank.mesh)
    fully_shard(model, mesh=rank.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(3, 8, device=rank.device)
    losses = []
    for _ in range(3):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def export() -> bool:
    """Return whether a sharded weight, gathered as DTensors and as exports are, is the one that was sharded."""
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    rank = current()
    torch.manual_seed(0)
    model = nn.Linear(6, 5).to(rank.device)
    weight = model.weight.detach().clone()
    fully_shard(model, mesh=rank.mesh)
    exported = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["weight"]
    return torch.equal(model.weight.full_tensor(), weight) and torch.equal(exported, weight)  # type: ignore[attr-defined]
