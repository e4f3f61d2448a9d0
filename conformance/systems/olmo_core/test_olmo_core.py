"""OLMo-core's ``parallelize_model``, its initialisation, its optimizer and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.distributed.checkpoint import load_model_and_optim_state, save_model_and_optim_state
from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module.transformer import (
    TransformerActivationCheckpointingConfig,
    TransformerActivationCheckpointingMode,
    TransformerDataParallelConfig,
    TransformerDataParallelWrappingStrategy,
    TransformerTensorParallelConfig,
)
from olmo_core.train.train_module.transformer.common import parallelize_model
from torch import Tensor

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.worlds import Rank

CONFIG = TransformerConfig.llama_like(d_model=32, vocab_size=60, n_layers=2, n_heads=4, qk_norm=True)


def build(config: TransformerConfig = CONFIG) -> Any:
    torch.manual_seed(0)
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"))
    return model


def batch(step: int) -> dict[str, Tensor]:
    tokens = torch.randint(60, (12, 11), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].contiguous()}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def load(
    fsdp: Rank,
    checkpoint: Path | None = None,
    *,
    sharding: TransformerDataParallelConfig | None = None,
    tp: int = 1,
    **options: Any,
) -> Subject:
    dp = sharding or TransformerDataParallelConfig(name=DataParallelType.fsdp)
    if tp > 1:
        options["tp_config"] = TransformerTensorParallelConfig(degree=tp)
    mesh = build_world_mesh(dp=dp, tp=options.get("tp_config"), device_type=fsdp.device.type)
    model = parallelize_model(
        CONFIG.build(init_device="meta"), world_mesh=mesh, device=fsdp.device, dp_config=dp, **options
    )
    if checkpoint:
        load_model_and_optim_state(str(checkpoint), model)
    return Subject(
        model,
        reference=build,
        batch=batch,
        loss=loss,
        optimizer=AdamWConfig(lr=1e-3).build(model),
        save=lambda model, optimizer, folder: save_model_and_optim_state(str(folder), model, optimizer),
        resume=lambda model, optimizer, folder: load_model_and_optim_state(str(folder), model, optimizer),
        drawn=() if checkpoint else "*",
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    save_model_and_optim_state(str(folder), build())
    return folder


@fsdp_conformance(world_size=2)
def test_from_scratch(fsdp):
    return load(fsdp)


@fsdp_conformance(world_size=2)
def test_checkpoint(fsdp, checkpoint):
    return load(fsdp, checkpoint)


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, checkpoint):
    return load(fsdp, checkpoint)


@fsdp_conformance(world_size=2)
def test_fine_grained(fsdp, checkpoint):
    strategy = TransformerDataParallelWrappingStrategy.fine_grained
    sharding = TransformerDataParallelConfig(name=DataParallelType.fsdp, wrapping_strategy=strategy)
    return load(fsdp, checkpoint, sharding=sharding)


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, checkpoint):
    replicas = 2 if fsdp.world_size == 4 else 1
    sharding = TransformerDataParallelConfig(name=DataParallelType.hsdp, num_replicas=replicas)
    return load(fsdp, checkpoint, sharding=sharding)


@fsdp_conformance(mesh={"dp": 2, "tp": 2})
def test_tensor_parallel(fsdp, checkpoint):
    return load(fsdp, checkpoint, tp=2)


@fsdp_conformance(world_size=2)
def test_activation_checkpointing(fsdp, checkpoint):
    mode = TransformerActivationCheckpointingMode.full
    return load(fsdp, checkpoint, ac_config=TransformerActivationCheckpointingConfig(mode=mode))


def test_recipe(recipe):
    assert "failed" not in recipe("olmo_core")
