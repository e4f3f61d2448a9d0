"""torchtitan's Llama 3, sharded by its own ``parallelize_llama`` and trained with its optimizers and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchtitan.distributed.parallel_dims
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama
from torchtitan.models.qwen3 import parallelize_qwen3, qwen3_configs

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.worlds import Rank

VOCABULARY, ROWS, LENGTH = 2048, 12, 16


class Family(NamedTuple):
    """A model of torchtitan's for debugging, and its function that shards it."""

    configure: Callable[..., Any]
    parallelize: Callable[..., Any]


LLAMA = Family(partial(llama3_configs["debugmodel"], attn_backend="flex"), parallelize_llama)


def with_few_experts() -> Any:
    """Return a small Qwen3-MoE with eight experts, of which each token takes two."""
    config = qwen3_configs["debugmodel_moe"](attn_backend="flex", moe_comm_backend="standard")
    for layer in config.layers:
        experts, router = layer.moe.routed_experts, layer.moe.router
        for part in (layer.moe, experts.inner_experts, experts.token_dispatcher, router):
            part.num_experts = 8
        experts.inner_experts.hidden_dim, router.gate.out_features = 64, 8
        experts.token_dispatcher.top_k = router.top_k = 2
    return config


QWEN_MOE = Family(with_few_experts, parallelize_qwen3)


def configured(parallelism: ParallelismConfig, family: Family) -> Any:
    """Return torchtitan's own debugging model, with two of its layers."""
    config = family.configure()
    config = dataclasses.replace(config, layers=config.layers[:2])
    for layer in config.layers:  # the default attention has to be compiled, which takes minutes on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config


def whole(family: Family = LLAMA) -> Any:
    """Build the model on one device with torchtitan's initialisation."""
    torch.manual_seed(0)
    set_spmd_backend("partial_dtensor")
    with torch.device("meta"):
        model = configured(ParallelismConfig(spmd_backend="partial_dtensor"), family).build()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def tokens(step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=draw)
    return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return this rank's share of the loss, as torchtitan divides it: by the tokens of all ranks."""
    return cross_entropy_loss(model(batch["inputs"]), batch["labels"]) / (ROWS * LENGTH)


def load(fsdp: Rank, checkpoint: Path | None = None, family: Family = LLAMA, **degrees: int) -> Subject:
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",  # the default needs a nightly build of torch
        **{f"{name}_degree": size for name, size in degrees.items()},
    )
    training = TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32")
    set_spmd_backend("partial_dtensor")
    torchtitan.distributed.parallel_dims.device_type = fsdp.device.type
    dims = ParallelDims.from_config(parallelism, fsdp.world_size)
    dims.build_mesh()
    with torch.device("meta"):
        model = configured(parallelism, family).build()
    model = family.parallelize(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=fsdp.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    if fsdp.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    declared: dict[str, Any] = {"drawn": "*"}
    if checkpoint is not None:
        # As torchtitan does, without torch's get_model_state_dict: a hook saves the fused projection as three.
        state = model.state_dict()
        dcp.load(state, checkpoint_id=checkpoint)
        model.load_state_dict(state)
        declared = {}
    container = dataclasses.replace(default_adamw(lr=1e-3), implementation="for-loop").build(model_parts=[model])

    def states(with_optimizer: bool) -> dict[str, Any]:
        return {"model": model.state_dict()} | ({"optimizer": container.state_dict()} if with_optimizer else {})

    def resume(model: Any, optimizer: Any, folder: Path) -> None:
        loaded = states(optimizer is not None)
        dcp.load(loaded, checkpoint_id=folder)
        model.load_state_dict(loaded["model"])
        if optimizer is not None:
            container.load_state_dict(loaded["optimizer"])

    return Subject(
        model,
        reference=partial(whole, family),
        batch=tokens,
        loss=loss,
        loss_over_ranks="sum",
        optimizer=container,
        state_dict=lambda model: model.state_dict(),
        save=lambda model, optimizer, folder: dcp.save(states(optimizer is not None), checkpoint_id=folder),
        resume=resume,
        **declared,
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    dcp.save(whole().state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


@fsdp_conformance(world_size=2)
def test_fsdp(fsdp, checkpoint):
    return load(fsdp, checkpoint)


@fsdp_conformance(world_size=2)
def test_from_scratch(fsdp):
    return load(fsdp)


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, checkpoint):
    return load(fsdp, checkpoint)


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, checkpoint):
    replicas = 2 if fsdp.world_size == 4 else 1
    return load(fsdp, checkpoint, data_parallel_replicate=replicas)


@fsdp_conformance(mesh={"tp": 2})
def test_tensor_parallel(fsdp, checkpoint):
    return load(fsdp, checkpoint, tensor_parallel=fsdp.world_size)


@fsdp_conformance(mesh={"dp_shard": 2, "tp": 2})
def test_both(fsdp, checkpoint):
    return load(fsdp, checkpoint, tensor_parallel=2)


def test_recipe(recipe):
    assert "failed" not in recipe("torchtitan")


@pytest.fixture(scope="session")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    dcp.save(whole(QWEN_MOE).state_dict(), checkpoint_id=folder, no_dist=True)
    return folder


@fsdp_conformance(world_size=2)
def test_experts(fsdp, experts):
    return load(fsdp, experts, QWEN_MOE)


@fsdp_conformance(world_size=2)
def test_expert_parallel(fsdp, experts):
    return load(fsdp, experts, QWEN_MOE, expert_parallel=fsdp.world_size)
