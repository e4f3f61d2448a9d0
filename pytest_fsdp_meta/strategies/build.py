"""Build what a plan describes: the model (on meta or not), its mesh, its sharding, its batches and its loss."""

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
"""The rows of a global batch: up to four ranks get equal slices, which can be halved again for micro-batches."""
DTYPES = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}


class PlannedLayer(nn.Module):  # type: ignore[misc]  # mypy does not follow torch
    """The module that a ``Layer`` describes; ``reset_buffers`` computes its buffers again after ``to_empty``."""

    def __init__(self, inputs: int, plan: Layer) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(plan.width, inputs), requires_grad=not plan.frozen)
        self.bias = nn.Parameter(torch.randn(plan.width), requires_grad=not plan.frozen) if plan.bias else None
        # Frozen because FSDP2 neither shards scalars nor reduces their gradients.
        self.scalar = nn.Parameter(torch.tensor(0.7), requires_grad=False) if plan.scalar else None
        for number, (kind, persistent) in enumerate(plan.buffers):
            self.register_buffer(f"{kind}_{number}", torch.empty(plan.width, dtype=DTYPES[kind]), persistent)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        for number, buffer in enumerate(self.buffers(recurse=False)):
            indices = torch.arange(buffer.shape[0], device=buffer.device)
            buffer.copy_((indices + number) % 2 == 0 if buffer.dtype == torch.bool else (indices + 1 + number) * 0.25)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.weight, self.bias)
        if self.scalar is not None:
            y = y * self.scalar
        for buffer in self.buffers(recurse=False):
            y = y + 0.1 * buffer.to(y.dtype)
        return torch.tanh(y)


class PlannedBlock(nn.Module):  # type: ignore[misc]
    """The module that a ``Block`` describes; ``outputs`` is the width of its last layer."""

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
    """The module that a ``Model`` describes; ``tie`` ties its weights, if the plan does, again after ``to_empty``."""

    def __init__(self, plan: Model) -> None:
        super().__init__(plan.inputs, plan.root)
        self.plan = plan
        self.tie()

    def layers(self) -> list[PlannedLayer]:
        """Return the layers in the order in which they are called."""
        return [module for module in self.modules() if isinstance(module, PlannedLayer)]

    def tie(self) -> None:
        if self.plan.tied:
            first, *_, last = self.layers()
            last.weight = first.weight


def build(plan: Model) -> PlannedModel:
    """Build the model, with the same values every time, or on meta inside ``with torch.device("meta")``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return PlannedModel(plan)


def save(plan: Model, path: Path) -> Path:
    """Write the state dict of ``build(plan)`` to ``path`` as safetensors and return the path."""
    save_file({name: tensor.clone() for name, tensor in build(plan).state_dict().items()}, path)
    return path


def make_mesh(plan: Plan, device: torch.device | str) -> DeviceMesh:
    """Create the mesh of the plan; all ranks must call it.

    In a world of another size, as for resharded checkpoints, the last dimension grows or shrinks. If the other
    dimensions do not divide the world size, it becomes the only one.
    """
    ranks = dist.get_world_size()
    *others, (last, _) = plan.mesh
    outer = prod(size for _, size in others)
    mesh = [*others, (last, ranks // outer)] if ranks % outer == 0 else [(last, ranks)]
    names, sizes = zip(*mesh, strict=True)
    return init_device_mesh(torch.device(device).type, sizes, mesh_dim_names=names)


def shard(model: PlannedModel, plan: Plan, mesh: DeviceMesh, **policy: Any) -> None:
    """Apply ``fully_shard`` to the modules that the plan wraps, then to the root, with ``policy`` as keyword arguments.

    Scalars are ignored, unless ``policy`` has ``ignored_params``.
    """
    policy = {"ignored_params": scalars(model)} | policy
    for name in plan.wrapped:
        fully_shard(model.get_submodule(name), mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)


def scalars(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters without dims, which FSDP2 cannot shard."""
    return {parameter for parameter in model.parameters() if not parameter.ndim}


def batch(plan: Model, step: int) -> dict[str, Tensor]:
    """Return the global batch of a step, the same for the same step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(ROWS, plan.inputs, generator=generator),
        "y": torch.randn(ROWS, plan.outputs, generator=generator),
    }


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squared error of the model on a batch."""
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])
