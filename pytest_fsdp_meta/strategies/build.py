"""What a plan says, built: the model, on meta or not, its mesh, its sharding, its batches."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta.strategies.plan import Block, Layer, Model, Plan

ROWS = 24
"""Of a global batch: any world of up to four ranks gets the same number, and can halve it once more."""
DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


class PlannedLayer(nn.Module):  # type: ignore[misc]  # mypy does not follow torch
    """A ``Layer``. ``reset_buffers`` computes its buffers, as ``__init__`` does."""

    def __init__(self, inputs: int, plan: Layer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(plan.width, inputs), requires_grad=not plan.frozen)
        self.bias = nn.Parameter(torch.randn(plan.width), requires_grad=not plan.frozen) if plan.bias else None
        # Frozen, so that nobody need reduce its gradient: FSDP2, which shards no scalar, does not.
        self.scalar = nn.Parameter(torch.tensor(0.7), requires_grad=False) if plan.scalar else None
        for number, (kind, persistent) in enumerate(plan.buffers):
            self.register_buffer(f"{kind}_{number}", torch.empty(plan.width, dtype=DTYPES[kind]), persistent)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        for number, buffer in enumerate(self.buffers(recurse=False)):
            places = torch.arange(buffer.shape[0], device=buffer.device)
            buffer.copy_((places + number) % 2 == 0 if buffer.dtype == torch.bool else (places + 1 + number) * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        if self.scalar is not None:
            y = y * self.scalar
        for buffer in self.buffers(recurse=False):
            y = y + 0.1 * buffer.to(y.dtype)
        return torch.tanh(y)


class PlannedBlock(nn.Module):  # type: ignore[misc]
    """A ``Block``; ``outputs`` is the width of its last layer."""

    def __init__(self, inputs: int, plan: Block) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for part in plan.parts:
            self.parts.append(PlannedBlock(inputs, part) if isinstance(part, Block) else PlannedLayer(inputs, part))
            inputs = self.parts[-1].outputs if isinstance(part, Block) else part.width
        self.outputs = inputs

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class PlannedModel(PlannedBlock):
    """A ``Model``. ``tie`` makes its tie, if it has one, again after ``to_empty``."""

    def __init__(self, plan: Model) -> None:
        super().__init__(plan.inputs, plan.root)
        self.plan = plan
        self.tie()

    def layers(self) -> list[PlannedLayer]:
        """In the order in which they are called."""
        return [module for module in self.modules() if isinstance(module, PlannedLayer)]

    def tie(self) -> None:
        if self.plan.tied:
            first, *_, last = self.layers()
            last.weight = first.weight


def build(plan: Model) -> PlannedModel:
    """The model, with the same values each time; within ``with torch.device("meta")`` without any."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PlannedModel(plan)


def save(plan: Model, path: Path) -> Path:
    """Writes the state dict of ``build(plan)`` to ``path``, as safetensors."""
    save_file({name: tensor.clone() for name, tensor in build(plan).state_dict().items()}, path)
    return path


def make_mesh(plan: Plan, device: torch.device | str) -> DeviceMesh:
    """The mesh of the plan; every rank calls it.

    In a world of another size, into which checkpoints are loaded again, its last dimension takes more ranks or fewer,
    and is the only one where the others do not fit.
    """
    ranks = dist.get_world_size()
    *others, (last, _) = plan.mesh
    beside = prod(size for _, size in others)
    mesh = [*others, (last, ranks // beside)] if ranks % beside == 0 else [(last, ranks)]
    names, sizes = zip(*mesh, strict=True)
    return init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=names)


def shard(model: PlannedModel, plan: Plan, mesh: DeviceMesh, **policy: Any) -> None:
    """``fully_shard`` on the modules that the plan wraps, then on the root; ``policy`` is passed on to it.

    Scalars are left out, unless ``policy`` says which ``ignored_params`` there are.
    """
    policy = {"ignored_params": scalars(model)} | policy
    for name in plan.wrapped:
        fully_shard(model.get_submodule(name), mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)


def scalars(model: nn.Module) -> set[nn.Parameter]:
    """The parameters without a dimension, which FSDP2 cannot shard."""
    return {parameter for parameter in model.parameters() if not parameter.ndim}


def batch(plan: Model, step: int) -> dict[str, Tensor]:
    """The global batch of a step, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(ROWS, plan.inputs, generator=generator),
        "y": torch.randn(ROWS, plan.outputs, generator=generator),
    }


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])
