"""lightning's Fabric with ``ModelParallelStrategy``: FSDP2, TP and both, its backward, clipping and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject
from pytest_fsdp_meta.worlds import Rank

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe")
NEVER_COMPUTED = (
    "lightning 2.6.6 writes what each module's reset_parameters() does (fabric/utilities/init.py:101, with a warning): "
    "a rotary embedding, which has none, is garbage after init_module(empty_init=True)"
)
COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def parallelize(model: Any, mesh: Any) -> Any:
    """Shard a Llama over both dimensions of the mesh, as lightning's documentation does."""
    for layer in model.model.layers:
        if mesh["tensor_parallel"].size() > 1:
            plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
            names = {name: style for name, _ in layer.named_modules() if (style := plan.get(name.rpartition(".")[2]))}
            parallelize_module(layer, mesh["tensor_parallel"], names)
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def make_fabric(fsdp: Rank, tensor_parallel: int = 1) -> Fabric:
    sizes = {"data_parallel_size": fsdp.world_size // tensor_parallel, "tensor_parallel_size": tensor_parallel}
    strategy = ModelParallelStrategy(parallelize, **sizes)
    fabric = Fabric(accelerator=fsdp.device.type, devices=fsdp.world_size, strategy=strategy)
    fabric.launch()
    return fabric


def step_of(fabric: Fabric, clip: bool) -> Callable[[Any, Any, dict[str, Any]], Tensor]:
    def step(model: Any, optimizer: Any, batch: dict[str, Any]) -> Tensor:
        loss = model(**batch).loss
        fabric.backward(loss)
        if clip:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def load(fsdp: Rank, path: Path, tensor_parallel: int = 1, **declared: Any) -> Subject:
    fabric = make_fabric(fsdp, tensor_parallel)
    model = fabric.setup_module(AutoModelForCausalLM.from_pretrained(path))
    return with_optimizer(fabric, model, path, whole_while_loading=True, **declared)


def load_on_meta(fsdp: Rank, path: Path, repair: bool) -> Subject:
    fabric = make_fabric(fsdp)
    config = AutoConfig.from_pretrained(path)
    with fabric.init_module(empty_init=True):
        model = AutoModelForCausalLM.from_config(config)
    model = fabric.setup_module(model)
    if repair:
        rotary = model.model.rotary_emb
        frequencies = type(rotary)(config).inv_freq
        rotary.inv_freq.copy_(frequencies)
        rotary.original_inv_freq.copy_(frequencies)
    fabric.load_raw(path / "model.safetensors", model)
    # clip_gradients raises for the NaN that frequencies without values give: that step cannot be judged.
    return with_optimizer(fabric, model, path) if repair else subject(model, path, batch=None)


def with_optimizer(fabric: Fabric, model: Any, path: Path, **declared: Any) -> Subject:
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def save(model: Any, optimizer: Any, folder: Path) -> None:
        fabric.save(folder, {"model": model} | ({} if optimizer is None else {"optimizer": optimizer}))

    def resume(model: Any, optimizer: Any, folder: Path) -> None:
        fabric.load(folder, {"model": model} | ({} if optimizer is None else {"optimizer": optimizer}))

    # torch's clip_grad_norm_, which Fabric calls, refuses gradients on several meshes (torch 2.13).
    clip = fabric.strategy.device_mesh["tensor_parallel"].size() == 1
    fields = {"optimizer": optimizer, "train_step": step_of(fabric, clip), "max_grad_norm": 0.5 if clip else None}
    return subject(model, path, **fields, save=save, resume=resume, **declared)


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_built_whole(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name])


@fsdp_conformance(mesh={"tp": 2})
def test_tensor_parallel(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], tensor_parallel=fsdp.world_size)


@fsdp_conformance(mesh={"dp": 2, "tp": 2})
def test_both(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], tensor_parallel=2)


@fsdp_conformance(world_size=2, xfail={"no_uninitialized_memory": NEVER_COMPUTED})
def test_built_on_meta(fsdp, checkpoints):
    return load_on_meta(fsdp, checkpoints["llama"], repair=False)


@fsdp_conformance(world_size=2)
def test_built_on_meta_and_repaired(fsdp, checkpoints):
    return load_on_meta(fsdp, checkpoints["llama"], repair=True)


def test_recipe(recipe):
    assert "failed" not in recipe("lightning")
