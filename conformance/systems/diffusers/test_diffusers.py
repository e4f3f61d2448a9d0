"""diffusers' Flux: prepared by accelerate with FSDP2, and wrapped by diffusers' own ``wrap_with_fsdp`` (FSDP1)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from diffusers import FluxTransformer2DModel
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from diffusers.training_utils import wrap_with_fsdp
from torch import Tensor

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.worlds import Rank

SIZES = {
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 24,
    "pooled_projection_dim": 20,
    "axes_dims_rope": (4, 4, 8),
}
ROWS, PIXELS, WORDS = 12, 6, 5
SHAPES = {
    "hidden_states": (ROWS, PIXELS, 4),
    "encoder_hidden_states": (ROWS, WORDS, 24),
    "pooled_projections": (ROWS, 20),
    "target": (ROWS, PIXELS, 4),
}
NOTHING: Mapping[str, Any] = MappingProxyType({})


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    model = FluxTransformer2DModel(**SIZES)
    with torch.no_grad():
        for parameter in model.parameters():  # norms would all be equal, and biases too
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder)
    return folder


def read(path: Path) -> FluxTransformer2DModel:
    return FluxTransformer2DModel.from_pretrained(path)


def batch(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    rows = {name: torch.rand(shape, generator=draw) for name, shape in SHAPES.items()}
    # Flux multiplies by 1000 in the model's dtype: bfloat16 holds the products of few numbers, such as these.
    return {**rows, "timestep": 0.5 ** torch.randint(1, 7, (ROWS,), generator=draw)}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: tensor for name, tensor in batch.items() if name != "target"}
    target = batch["target"]
    ids = {"img_ids": torch.zeros(PIXELS, 3), "txt_ids": torch.zeros(WORDS, 3)}
    ids = {name: tensor.to(target.device) for name, tensor in ids.items()}
    return (model(**inputs, **ids).sample - target).square().mean()


def declare(model: Any, path: Path, **declared: Any) -> Subject:
    fields = {"reference": partial(read, path), "batch": batch, "loss": loss, "whole_while_loading": True}
    return Subject(model, **{**fields, **declared})


def load(fsdp: Rank, path: Path, plugin: Mapping[str, Any] = NOTHING, **options: Any) -> Subject:
    cpu = fsdp.device.type == "cpu"
    if cpu:  # accelerate uses DDP on CPUs and ignores the plugin, unless it takes them for GPUs
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **plugin)
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=sharding, **options)
    model = read(path)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return declare(
        model,
        path,
        optimizer=optimizer,
        save=lambda model, optimizer, folder: accelerator.save_state(str(folder)),
        resume=lambda model, optimizer, folder: accelerator.load_state(str(folder)),
    )


@fsdp_conformance(world_size=2)
def test_prepare(fsdp, path):
    return load(fsdp, path)


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, path):
    return load(fsdp, path)


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, path):
    return load(fsdp, path, mixed_precision="bf16")


@fsdp_conformance(world_size=2)
def test_activation_checkpointing(fsdp, path):
    return load(fsdp, path, plugin={"activation_checkpointing": True})


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, path):
    if fsdp.world_size == 2:  # where the checkpoint of 4 ranks is loaded: accelerate refuses replicas of whole shards
        return load(fsdp, path)
    sizes = {"dp_replicate_size": 2, "dp_shard_size": fsdp.world_size // 2}
    return load(fsdp, path, parallelism_config=ParallelismConfig(**sizes))


@fsdp_conformance(world_size=2)
def test_wrap_with_fsdp(fsdp, path):
    device = torch.device("cpu") if fsdp.device.type == "cpu" else fsdp.device
    model = wrap_with_fsdp(read(path), device, offload=False, transformer_layer_cls=FluxTransformerBlock)
    return declare(model, path)


def test_wrap_with_fsdp_refuses_a_set():
    """Its signature has a set of classes, which it puts into another set."""
    with pytest.raises(TypeError, match="unhashable type: 'set'"):
        wrap_with_fsdp(FluxTransformer2DModel(**SIZES), "cpu", transformer_layer_cls={FluxTransformerBlock})


def test_recipe(recipe):
    assert "failed" not in recipe("diffusers")
