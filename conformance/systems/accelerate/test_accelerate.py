"""accelerate's FSDP2: ``Accelerator(fsdp_plugin=...).prepare(model, optimizer)`` with models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import (
    Accelerator,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PartialState,
)
from transformers import AutoModelForCausalLM

from fixtures.tiny import save_tiny
from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.transformers import subject
from pytest_fsdp_meta.worlds import Rank

ARCHITECTURES = ("llama", "llama-tied", "qwen3-moe", "gemma3", "gpt2")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_tiny(name, tmp_path_factory.mktemp("checkpoint") / name) for name in ARCHITECTURES}


def accelerator(fsdp: Rank, *, plugin: dict[str, Any] | None = None, **options: Any) -> Accelerator:
    cpu = fsdp.device.type == "cpu"
    if cpu:  # accelerate uses DDP on CPUs and ignores the plugin, unless it takes them for GPUs
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    sharding = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "cpu_ram_efficient_loading": False, **(plugin or {})}
    return Accelerator(cpu=cpu, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **sharding), **options)


def load(fsdp: Rank, path: Path, **options: Any) -> Subject:
    built = accelerator(fsdp, **options)
    model = AutoModelForCausalLM.from_pretrained(path)
    model, optimizer = built.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return subject(
        model,
        path,
        optimizer=optimizer,
        whole_while_loading=True,
        save=lambda model, optimizer, folder: built.save_state(str(folder)),
        resume=lambda model, optimizer, folder: built.load_state(str(folder)),
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_prepare(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name])


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@fsdp_conformance(world_size=2)
def test_ram_efficient_loading(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name], plugin={"cpu_ram_efficient_loading": True})


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], mixed_precision="bf16")


@fsdp_conformance(world_size=2)
def test_activation_checkpointing(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], plugin={"activation_checkpointing": True})


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, checkpoints):
    sizes = {"dp_replicate_size": 2, "dp_shard_size": fsdp.world_size // 2}
    return load(fsdp, checkpoints["llama"], parallelism_config=ParallelismConfig(**sizes))
