"""litgpt's LoRA, sharded by its ``parallelize_fn`` and loaded by its ``load_checkpoint``, as ``finetune_lora`` does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from litgpt.config import Config as BaseConfig
from litgpt.finetune.lora import parallelize_fn
from litgpt.lora import GPT, Config, mark_only_lora_as_trainable
from litgpt.model import GPT as Base
from litgpt.utils import chunked_cross_entropy, load_checkpoint
from torch import Tensor

from pytest_fsdp_meta import Subject, fsdp_conformance
from pytest_fsdp_meta.worlds import Rank

SIZES: dict[str, Any] = {"block_size": 32, "padded_vocab_size": 60, "n_layer": 2, "n_head": 4, "n_embd": 32}
LORA: dict[str, Any] = {"lora_r": 4, "lora_alpha": 8, "lora_query": True, "lora_value": True}
OTHER_DROPOUT = {
    "recomputation_draws_alike": "litgpt 0.5.13 checkpoints the blocks with preserve_rng_state=False "
    "(finetune/lora.py:528), so backward computes with another dropout than the forward"
}


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gpt") / "lit_model.pth"
    torch.save(Base(BaseConfig(**SIZES)).state_dict(), file)
    return file


def build(**lora: Any) -> GPT:
    model = GPT(Config(**SIZES, **LORA, **lora))
    mark_only_lora_as_trainable(model)
    return model


def reference(path: Path, **lora: Any) -> GPT:
    model = build(**lora)
    model.load_state_dict(torch.load(path), strict=False)
    return model


def batch(step: int) -> dict[str, Tensor]:
    return {"ids": torch.randint(60, (12, 10), generator=torch.Generator().manual_seed(step))}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return chunked_cross_entropy(model(batch["ids"])[..., :-1, :], batch["ids"][..., 1:], chunk_size=0)


def load(fsdp: Rank, path: Path, **lora: Any) -> Subject:
    strategy = ModelParallelStrategy(parallelize_fn, data_parallel_size=fsdp.world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator=fsdp.device.type, strategy=strategy, devices=fsdp.world_size)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = build(**lora)
    model = fabric.setup_module(model)
    # litgpt passes all parameters and replaces the frozen ones below; torch cannot save such an optimizer.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained, lr=1e-3))
    load_checkpoint(fabric, model, path, strict=False)
    return Subject(
        model,
        reference=partial(reference, path, **lora),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        drawn=["*lora_A"],
    )


@fsdp_conformance(world_size=2)
def test_lora(fsdp, path):
    return load(fsdp, path)


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, path):
    return load(fsdp, path)


@fsdp_conformance(world_size=2)
def test_every_projection(fsdp, path):
    return load(fsdp, path, lora_key=True, lora_projection=True, lora_mlp=True, lora_head=True)


@fsdp_conformance(world_size=2, xfail=OTHER_DROPOUT)
def test_default_dropout(fsdp, path):
    return load(fsdp, path, lora_dropout=0.05)


def test_recipe(recipe):
    assert "failed" not in recipe("litgpt")
