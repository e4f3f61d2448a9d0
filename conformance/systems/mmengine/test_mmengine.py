"""mmengine's FSDPStrategy: its wrapper, train_step, accumulation, clipping, schedulers and checkpoints."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine._strategy import FSDPStrategy
from mmengine.model import BaseModel
from mmengine.optim import ConstantLR
from torch import Tensor, nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytest_fsdp_meta import Subject, fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.worlds import Rank

FULL = {
    "state_dict_type": "FULL_STATE_DICT",
    # With state_dict_cfg="full", which offloads to the CPU as well, torch crashes on a CPU; and what it gathers of the
    # optimizer's second state then overwrites the first one, because .cpu() copies nothing there.
    "state_dict_config": FullStateDictConfig(rank0_only=True),
    "optim_state_dict_config": FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False),
}
ADAM = {"type": "AdamW", "lr": 1e-2}
SGD = {"type": "SGD", "lr": 0.1}


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class Net(BaseModel):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(width, dropout), Block(width, dropout)), nn.Linear(width, 6)

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.blocks(x)), y)}


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> dict[str, Tensor]:
        return super().forward(x * self.scale, y, mode)


def build(**sizes: Any) -> Net:
    torch.manual_seed(0)
    return Net(**sizes)


def batch(step: int, width: int = 16, rows: int = 24) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(rows, width, generator=generator),
        "y": torch.randint(6, (rows,), generator=generator),
    }


def prepare(fsdp: Rank, folder: Path, model: nn.Module, wrapper: dict[str, Any] | None = None, **more: Any) -> Any:
    options = {"device_id": fsdp.device, "device_mesh": fsdp.mesh, "auto_wrap_policy": ModuleWrapPolicy({Block})}
    state_dict_cfg = more.pop("state_dict_cfg", FULL)
    strategy = more.pop("kind", FSDPStrategy)(
        work_dir=str(folder), model_wrapper={**options, **(wrapper or {})}, state_dict_cfg=state_dict_cfg
    )
    strategy.prepare(model, **{"optim_wrapper": {"optimizer": dict(ADAM)}, **more})
    return strategy


def train_step(strategy: Any, model: Any, optimizer: Any, batch: dict[str, Tensor], parts: int = 1) -> Tensor:
    """Call mmengine's step for each micro-batch, as its loops do."""
    chunks = zip(*(rows.chunk(parts) for rows in batch.values()), strict=True)
    losses = [model.train_step(dict(zip(batch, part, strict=True)), strategy.optim_wrapper) for part in chunks]
    return torch.stack([each["loss"].detach() for each in losses]).mean()


def load(strategy: Any, parts: int = 1, width: int = 16, **fields: Any) -> Subject:
    declared = {
        "reference": partial(build, width=width),
        "batch": partial(batch, width=width),
        "loss": lambda model, batch: model(**batch)["loss"],
        "optimizer": strategy.optim_wrapper.optimizer,
        "train_step": partial(train_step, strategy, parts=parts),
        "whole_while_loading": True,
    }
    return Subject(strategy.model, **{**declared, **fields})


LOCAL_NORM = {
    "grad_parity": "mmengine 0.10.7 clips by the norm of each rank's own shards (optimizer_wrapper.py:294)",
}
SAME_DROPOUT = {
    "random_numbers_follow_the_mesh": "mmengine 0.10.7 gives all ranks one seed by default (base.py:255)",
}
NO_RANDOM_STATE = {
    "random_numbers_resume": "mmengine 0.10.7 saves the seed and no state of random generators (fsdp.py:281)",
}
NEVER_WRITTEN = {
    "no_uninitialized_memory": "mmengine 0.10.7 recomputes no buffers after skip_init_weights (fsdp.py:210)",
}


@fsdp_conformance(world_size=2)
def test_its_step(fsdp, tmp_path):
    return load(prepare(fsdp, tmp_path, build()))


@fsdp_conformance(world_size=3)
def test_uneven(fsdp, tmp_path):
    return load(prepare(fsdp, tmp_path, build(width=7)), width=7)


@fsdp_conformance(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp(fsdp, tmp_path):
    return load(prepare(fsdp, tmp_path, build(), {"sharding_strategy": "HYBRID_SHARD"}))


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, tmp_path):
    precision = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    return load(prepare(fsdp, tmp_path, build(), {"mixed_precision": precision}))


@fsdp_conformance(world_size=2)
def test_accumulation(fsdp, tmp_path):
    wrapper = {"optimizer": dict(ADAM), "accumulative_counts": 2}
    strategy = prepare(fsdp, tmp_path, build(), optim_wrapper=wrapper, dispatch_kwargs={"max_iters": 1000})
    return load(strategy, parts=2)


@fsdp_conformance(world_size=2, xfail=LOCAL_NORM)
def test_clipping(fsdp, tmp_path):
    wrapper = {"optimizer": dict(SGD), "clip_grad": {"max_norm": 0.1}}
    return load(prepare(fsdp, tmp_path, build(), optim_wrapper=wrapper), max_grad_norm=0.1)


@fsdp_conformance(world_size=2, xfail=SAME_DROPOUT)
def test_dropout(fsdp, tmp_path):
    return load(prepare(fsdp, tmp_path, build(dropout=0.1)), reference=partial(build, dropout=0.1))


def save(strategy: Any, model: Any, optimizer: Any, folder: Path) -> None:
    strategy.save_checkpoint(str(Path(folder) / "saved.pth"), extra_ckpt={"meta": {"iter": 0}})


def resume(strategy: Any, model: Any, optimizer: Any, folder: Path) -> None:
    strategy.resume(str(Path(folder) / "saved.pth"), map_location="cpu")


class InOrder(FSDPStrategy):
    """The strategy with the arguments of ``optim_state_dict_to_load`` in torch's order."""

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        optimizer = self.optim_wrapper.optimizer
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(self.model, optimizer, state_dict))


def saved(fsdp: Rank, folder: Path, **sizes: Any) -> Subject:
    strategy = prepare(fsdp, folder, build(**sizes), kind=InOrder)
    functions = {"save": partial(save, strategy), "resume": partial(resume, strategy)}
    return load(strategy, reference=partial(build, **sizes), **functions)


@fsdp_conformance(world_size=2)
def test_full_with_arguments_in_order(fsdp, tmp_path):
    return saved(fsdp, tmp_path)


@fsdp_conformance(world_size=2, xfail={**SAME_DROPOUT, **NO_RANDOM_STATE})
def test_full_with_dropout(fsdp, tmp_path):
    return saved(fsdp, tmp_path, dropout=0.1)


@fsdp_conformance(world_size=2, xfail=NEVER_WRITTEN)
def test_skip_init_weights(fsdp, tmp_path):
    strategy = prepare(fsdp, tmp_path, {"type": Scaled}, kind=partial(FSDPStrategy, skip_init_weights=True))
    torch.manual_seed(0)
    torch.save({"state_dict": Scaled().state_dict()}, tmp_path / f"{fsdp.rank}.pth")
    strategy.load_checkpoint(str(tmp_path / f"{fsdp.rank}.pth"))

    def reference() -> Scaled:
        torch.manual_seed(0)
        return Scaled()

    return load(strategy, reference=reference)


@fsdp_spmd(world_size=2)
def test_full_checkpoints_cannot_be_resumed(fsdp, tmp_path):
    strategy = prepare(fsdp, tmp_path, build())
    train_step(strategy, strategy.model, None, batch(0))
    save(strategy, None, None, tmp_path)
    fsdp.barrier()
    with pytest.raises(TypeError, match="unhashable type: 'dict'"):
        resume(strategy, None, None, tmp_path)


@fsdp_spmd(world_size=2)
def test_local_checkpoints_cannot_be_resumed(fsdp, tmp_path):
    strategy = prepare(fsdp, tmp_path, build(), {"device_mesh": None}, state_dict_cfg="local")
    train_step(strategy, strategy.model, None, batch(0))
    save(strategy, None, None, tmp_path)
    fsdp.barrier()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        resume(strategy, None, None, tmp_path)


@fsdp_spmd(world_size=2)
def test_a_built_scheduler_is_dropped(fsdp, tmp_path):
    model = build()
    scheduler = ConstantLR(torch.optim.AdamW(model.parameters(), lr=1.0), factor=0.5, by_epoch=False)
    strategy = prepare(fsdp, tmp_path, model, param_scheduler=scheduler)
    assert strategy.param_schedulers == []  # fsdp.py:614 builds another one, which nothing keeps


@pytest.mark.parametrize(("kind", "message"), [("AdamW", "decoupled_weight_decay"), ("SGD", "unhashable type: 'dict'")])
@fsdp_spmd(world_size=2)
def test_a_built_optimizer_raises(fsdp, tmp_path, kind, message):
    model = build()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=message):
        prepare(fsdp, tmp_path, model, optim_wrapper=optimizer)


def test_recipe(recipe):
    assert "failed" not in recipe("mmengine")
