"""ibm-fms' tensor parallelism: plain tensors that are parts of a whole, described by an adapter."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fms.distributed.tensorparallel import _all_reduce, _CopyToModelParallelRegion
from fms.models import get_model
from torch import Tensor

from pytest_fsdp_meta import Part, Subject, fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.worlds import Rank

FUSED = {"qkv_fused": 3, "wg1_fused": 2}
"""The weights that are several weights one below the other, each split among the ranks, and their number."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    for fused in (True, False):
        torch.save(get_model("llama", "micro", fused_weights=fused).state_dict(), folder / f"{fused}.pth")
    return folder


def describe(shapes: dict[str, torch.Size], rank: int, size: int, name: str, tensor: Tensor) -> Part | None:
    shape = shapes.get(name, tensor.shape)
    if tensor.shape == shape:
        return None
    for fused, count in FUSED.items():
        if fused in name:
            rows, own = shape[0] // count, shape[0] // count // size
            first = [start * rows + rank * own for start in range(count)]
            return Part.blocks(tensor, shape, [(start, start + own) for start in first])
    start = [0 if own == whole else own * rank for own, whole in zip(tensor.shape, shape, strict=True)]
    return Part.block(tensor, shape, start)


def load_split(fsdp: Rank, file: Path, fused: bool) -> Any:
    tp = fsdp.mesh["tp"].get_group()
    kind = fsdp.device.type
    return get_model(
        "llama", "micro", str(file), device_type=kind, distributed_strategy="tp", group=tp, fused_weights=fused
    )


def declare(fsdp: Rank, file: Path, fused: bool) -> Subject:
    shapes = {name: tensor.shape for name, tensor in torch.load(file, mmap=True).items()}
    return Subject(
        load_split(fsdp, file, fused),
        reference=partial(get_model, "llama", "micro", str(file), fused_weights=fused),
        adapter=partial(describe, shapes, fsdp.rank, fsdp.world_size),
    )


@pytest.mark.parametrize("fused", [True, False])
@fsdp_conformance(mesh={"tp": 2})
def test_tensor_parallel(fsdp, folder, fused):
    return declare(fsdp, folder / f"{fused}.pth", fused)


def batch(step: int) -> dict[str, Tensor]:
    return {"tokens": torch.randint(256, (8, 12), generator=torch.Generator().manual_seed(step))}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"][:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def corrected(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return _all_reduce(gradient, ctx.pg), None


@fsdp_conformance(mesh={"tp": 2})
def test_training_with_a_corrected_backward(fsdp, folder):
    _CopyToModelParallelRegion.backward = staticmethod(corrected)  # a world is fresh, so this ends with the test
    return dataclasses.replace(declare(fsdp, folder / "True.pth", True), batch=batch, loss=loss)


@fsdp_spmd(mesh={"tp": 2})
def test_backward_raises(fsdp, folder):
    """``_CopyToModelParallelRegion`` returns one gradient for two inputs."""
    tokens = torch.arange(8)[None]
    logits = load_split(fsdp, folder / "True.pth", True)(tokens)
    with pytest.raises(RuntimeError, match=r"expected 2, got 1"):
        logits.sum().backward()


def test_recipe(recipe):
    assert "failed" not in recipe("fms")
