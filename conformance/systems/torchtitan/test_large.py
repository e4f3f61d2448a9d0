"""torchtitan's published sizes on 1024 ranks that do not run, sharded by its own ``parallelize_llama``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torchtitan.distributed.parallel_dims
from torch import Tensor
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.deepseek_v3 import deepseekv3_configs, parallelize_deepseekv3
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.worlds import Rank

LENGTH = 4096


class Published(NamedTuple):
    """A published size, and torchtitan's function that shards it."""

    configure: Callable[..., Any]
    parallelize: Callable[..., Any]


LLAMA_8B = Published(partial(llama3_configs["8B"], attn_backend="flex"), parallelize_llama)
LLAMA_70B = Published(partial(llama3_configs["70B"], attn_backend="flex"), parallelize_llama)
DEEPSEEK = Published(
    partial(deepseekv3_configs["671B"], attn_backend="flex", moe_comm_backend="standard"), parallelize_deepseekv3
)


def configured(published: Published, parallelism: ParallelismConfig) -> Any:
    config = published.configure()
    for layer in config.layers:  # the default attention has to be compiled
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config


def whole(published: Published) -> Any:
    set_spmd_backend("partial_dtensor")
    return configured(published, ParallelismConfig(spmd_backend="partial_dtensor")).build()


def tokens(step: int) -> dict[str, Tensor]:
    rows = torch.zeros(1024, LENGTH, dtype=torch.long)
    return {"inputs": rows, "labels": rows}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy_loss(model(batch["inputs"]), batch["labels"])


def load(fsdp: Rank, published: Published, **degrees: int) -> Subject:
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",  # the default needs a nightly build of torch
        **{f"{name}_degree": degree for name, degree in degrees.items()},
    )
    set_spmd_backend("partial_dtensor")
    torchtitan.distributed.parallel_dims.device_type = "cpu"
    dims = ParallelDims.from_config(parallelism, fsdp.world_size)
    dims.build_mesh()
    with torch.device("meta"):
        model = configured(published, parallelism).build()
    model = published.parallelize(
        model,
        parallel_dims=dims,
        training=TrainingConfig(seq_len=LENGTH),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    model.to_empty(device=fsdp.device)
    return Subject(model, reference=partial(whole, published), batch=tokens, loss=loss, optimizer=torch.optim.AdamW)


@fsdp_conformance(simulate=1024)
def test_llama_8b(fsdp: Rank) -> Subject:
    return load(fsdp, LLAMA_8B)


@fsdp_conformance(simulate=True, mesh={"dp_shard": 128, "tp": 8})
def test_llama_70b(fsdp: Rank) -> Subject:
    return dataclasses.replace(load(fsdp, LLAMA_70B, tensor_parallel=8), batch=None)


@fsdp_conformance(simulate=1024)
def test_deepseek(fsdp: Rank) -> Subject:
    """Without a step: tokens are sent to experts by the router's values."""
    return dataclasses.replace(load(fsdp, DEEPSEEK, expert_parallel=min(64, fsdp.world_size)), batch=None)
