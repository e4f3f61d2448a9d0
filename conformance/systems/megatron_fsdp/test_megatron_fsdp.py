"""megatron-fsdp: ``fully_shard_model`` and ``fully_shard_optimizer`` around a tiny Llama.

results/systems.md has the findings, and what runs on a CPU, where handles.py replaces CUDA streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from conformance.systems.megatron_fsdp.handles import stand_in_for_cuda
from conformance.systems.megatron_fsdp.plain import KEPT, Block, Plain, batch, loss
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import reference_model, token_batch
from pytest_fsdp_meta.worlds import Rank, WorldSpec

ARCHITECTURES = ("llama", "llama-tied", "llama-odd")
SHARDED, GRADIENTS, OPTIMIZER, WHOLE = "optim_grads_params", "optim_grads", "optim", "no_shard"


def sharded(model: nn.Module, fsdp: Rank, units: list[type[nn.Module]], **options: Any) -> nn.Module:
    """Shard with main weights and gradients in the parameters' dtype, because parity needs one precision."""
    stand_in_for_cuda(fsdp.device)
    wrapped = fully_shard_model(
        model,
        device_mesh=init_device_mesh(fsdp.device.type, (fsdp.world_size, 1), mesh_dim_names=("dp_shard", "tp")),
        dp_shard_dim="dp_shard",
        tp_dim="tp",
        fsdp_unit_modules=units,
        device=fsdp.device,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None),
        **options,
    )
    # Scale gradients before they are summed: only NCCL has the fused operation.
    wrapped.ddp_config.gradient_reduce_div_fusion = False
    return wrapped


def declared(model: nn.Module, **more: Any) -> Subject:
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False))
    return Subject(model, optimizer=optimizer, state_dict=exported, save=save, resume=resume, **more)


def exported(model: nn.Module) -> dict[str, Any]:
    """Strip the wrapper's prefix ``module.`` from the keys, as exporting does."""
    return {key.removeprefix("module."): value for key, value in model.state_dict().items()}


def save(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    dcp.save(states(model, optimizer), checkpoint_id=folder)


def resume(model: nn.Module, optimizer: Optimizer | None, folder: Path) -> None:
    """Load as in the package's README; its hooks describe uneven shards to torch."""
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"], strict=False)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


def states(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    return {"model": model.state_dict()} | ({} if optimizer is None else {"optimizer": optimizer.state_dict()})


def llama(model: nn.Module, path: Path, **more: Any) -> Subject:
    """Declare a Llama that every rank built whole and then sharded, the usual way to use the package."""
    more["whole_while_loading"] = tuple(range(dist.get_world_size()))
    sources = {"reference": lambda: reference_model(path), "batch": lambda step: token_batch(step, path)}
    return declared(model, **sources, **more)


def clip_grad_norm(parameters: Iterable[nn.Parameter], limit: float) -> torch.Tensor:
    """Clip here: the package has no clipping, and torch's pairs norms by position, but ranks may lack gradients."""
    gradients = [parameter.grad.to_local() for parameter in parameters]
    norm = sum((gradient.square().sum() for gradient in gradients), torch.zeros(()))
    dist.all_reduce(norm)
    norm = norm.sqrt()
    for gradient in gradients:
        gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-odd"])
@fsdp_conformance(world_size=(2, 4))
def test_sharded(fsdp, checkpoints, name):
    path = checkpoints[name]
    return llama(sharded(reference_model(path), fsdp, [LlamaDecoderLayer]), path, clip_grad_norm=clip_grad_norm)


@pytest.mark.parametrize("strategy", [GRADIENTS, OPTIMIZER])
@fsdp_conformance(world_size=2)
def test_weights_whole_while_computing(fsdp, checkpoints, strategy):
    path = checkpoints["llama"]
    model = sharded(reference_model(path), fsdp, [LlamaDecoderLayer], zero_dp_strategy=strategy)
    return llama(model, path, clip_grad_norm=clip_grad_norm)


@fsdp_conformance(world_size=2)
def test_no_shard(fsdp, checkpoints):
    path = checkpoints["llama"]
    model = sharded(reference_model(path), fsdp, [LlamaDecoderLayer], zero_dp_strategy=WHOLE)
    return llama(model, path, unsharded="*")


def plain(fsdp: Rank, **options: Any) -> Subject:
    with torch.device("meta" if options.get("init_model_with_meta_device") else fsdp.device):
        built = Plain()
    model = sharded(built, fsdp, [Block], **options)
    return declared(
        model,
        reference=Plain,
        batch=batch,
        loss=loss,
        kept_attributes=(KEPT,),
        clip_grad_norm=clip_grad_norm,
        # The buffers and copies of one of the two small blocks are larger than the model, built on meta or not.
        whole_while_loading=tuple(range(fsdp.world_size)),
    )


@fsdp_conformance(world_size=2)
def test_built_on_the_device(fsdp):
    return plain(fsdp)


BUFFERS = "megatron-fsdp 0.6.1 materialises modules with parameters only, so buffers of other modules stay on meta"
ATTRIBUTES = "megatron-fsdp 0.6.1 copies only _tensor_parallel_mode to the parameters that it recreates"


LOADED = ["no_meta_params", "no_meta_buffers", "no_uninitialized_memory", "shapes_match_reference"]
"""A model with buffers on meta is neither trained nor saved, which is an error of those checks."""


def built_on_meta(fsdp: Rank) -> Subject:
    return plain(fsdp, init_model_with_meta_device=True)


@fsdp_conformance(
    world_size=2,
    only=[*LOADED, "parameter_attributes_kept"],
    xfail={"no_meta_buffers": BUFFERS, "parameter_attributes_kept": ATTRIBUTES},
)
def test_built_on_meta(fsdp):
    return built_on_meta(fsdp)


def test_messages_about_building_on_meta(failures_of: Callable[..., dict[str, str]]):
    failures = failures_of(built_on_meta, WorldSpec({"dp_shard": 2}, timeout=120))
    assert set(failures) == {"no_meta_buffers", "parameter_attributes_kept"}
    assert "rotary.frequencies, ranks 0, 1: on meta, but should be materialised" in failures["no_meta_buffers"]
    assert (
        "blocks.{0..1}.norm.weight, ranks 0, 1: without the attribute sequence_parallel, but should be "
        "sequence_parallel=True, as in the reference"
    ) in failures["parameter_attributes_kept"]
