"""Muon of muon-fsdp2 with FSDP2: its settings, other meshes, uneven rows, and torch's own Muon as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import muon_fsdp2
import pytest
import torch
from muon_fsdp2 import Muon
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from pytest_fsdp_meta import Subject, fsdp_conformance, fsdp_spmd
from pytest_fsdp_meta.transformers import subject, token_batch
from pytest_fsdp_meta.worlds import Rank, WorldSpec

ARCHITECTURES = ("llama", "llama-tied")
Named = Iterable[tuple[str, Tensor]]
OVERWRITTEN = {
    "update_parity": "muon-fsdp2 0.3.0 without Nesterov: the update overwrites the momentum (muon_fsdp2.py:63)"
}

torch.compiler.set_stance("force_eager")  # torch refuses fullgraph=True in the mode that watches random numbers


def muon_update(grad: Tensor, momentum: Tensor, beta: float, nesterov: bool, steps: int, rms_scale: bool) -> Tensor:
    """Compute what 0.3.0 calls on one device, but lacks, from the package's own functions."""
    update = muon_fsdp2.apply_momentum(grad, momentum, beta, nesterov)
    return muon_fsdp2.apply_scaling(muon_fsdp2.zeropower_via_newtonschulz5(update, steps), rms_scale)


def split(named_parameters: Named) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices of the blocks, and the rest."""
    groups: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, parameter in named_parameters:
        groups[not ("layers" in name and parameter.ndim == 2)].append(parameter)
    return groups


def optimizer(named_parameters: Named, **options: Any) -> Muon:
    muon_fsdp2.muon_update = muon_update
    matrices, rest = split(named_parameters)
    return Muon([{"params": matrices, "use_muon": True, **options}, {"params": rest, "use_muon": False}])


class TorchMuon(torch.optim.Optimizer):
    """torch's Muon and Adam, with the defaults of muon-fsdp2."""

    def __init__(self, matrices: list[Tensor], rest: list[Tensor]) -> None:
        super().__init__([{"params": matrices, "lr": 0.02}, {"params": rest, "lr": 3e-4}], {})
        self.both = (
            torch.optim.Muon(matrices, lr=0.02, weight_decay=0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.Adam(rest, lr=3e-4, betas=(0.9, 0.95), eps=1e-10),
        )

    def step(self, closure: Any = None) -> None:
        for each in self.both:
            each.step()


def compared_with_torch(named_parameters: Named) -> torch.optim.Optimizer:
    named = list(named_parameters)
    return optimizer(named) if isinstance(named[0][1], DTensor) else TorchMuon(*split(named))


def load(
    fsdp: Rank, path: Path, make: Callable[..., torch.optim.Optimizer] = optimizer, policy: Any = None, **fields: Any
) -> Subject:
    model = AutoModelForCausalLM.from_pretrained(path)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=fsdp.mesh, mp_policy=policy or MixedPrecisionPolicy())
    return subject(model, path, **{"optimizer": make, "whole_while_loading": True, **fields})


@pytest.mark.parametrize("name", ARCHITECTURES)
@fsdp_conformance(world_size=2)
def test_architecture(fsdp, checkpoints, name):
    return load(fsdp, checkpoints[name])


@fsdp_conformance(world_size=4)
def test_four_ranks(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"])


@fsdp_conformance(world_size=2)
def test_torchs_muon(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], compared_with_torch)


@pytest.mark.parametrize("options", [{"rms_scale": False, "lr": 0.05}, {"weight_decay": 0.1, "momentum": 0.8}])
@fsdp_conformance(world_size=2)
def test_options(fsdp, checkpoints, options):
    return load(fsdp, checkpoints["llama"], lambda named_parameters: optimizer(named_parameters, **options))


@fsdp_conformance(world_size=2, xfail=OVERWRITTEN)
def test_without_nesterov(fsdp, checkpoints):
    return load(fsdp, checkpoints["llama"], lambda named_parameters: optimizer(named_parameters, nesterov=False))


@fsdp_conformance(world_size=2)
def test_bf16(fsdp, checkpoints):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return load(fsdp, checkpoints["llama"], policy=policy)


def uneven(fsdp: Rank, path: Path) -> Subject:
    return load(fsdp, path, batch=partial(token_batch, checkpoint=path, rows=6))


def test_uneven_rows_abort_a_rank(checkpoints, failures_of):
    """The parts are gathered into buffers that are as large as the part of the rank that gathers (:129)."""
    failures = failures_of(uneven, WorldSpec({"dp_shard": 3}, timeout=120), path=checkpoints["llama"])
    assert "was killed by SIGABRT" in failures["update_parity"], failures


def step(model: nn.Module, mesh: Any = None, size: tuple[int, ...] = (4, 8)) -> None:
    """Train a step with Muon for all parameters."""
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    model(torch.ones(size)).sum().backward()
    Muon([{"params": list(model.parameters()), "use_muon": True}]).step()


@fsdp_spmd(mesh={"dp_replicate": 2, "dp_shard": 2})
def test_hsdp_raises(fsdp):
    with pytest.raises(NotImplementedError):
        step(nn.Linear(8, 8, bias=False), fsdp.mesh)


@fsdp_spmd(world_size=2)
def test_filters_raise(fsdp):
    with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
        step(nn.Conv2d(8, 8, 3, bias=False), fsdp.mesh, (4, 8, 5, 5))


def test_one_device_raises(monkeypatch):
    monkeypatch.delattr(muon_fsdp2, "muon_update", raising=False)
    with pytest.raises(NameError, match="muon_update"):
        step(nn.Linear(8, 8, bias=False))


def test_recipe(recipe):
    assert "failed" not in recipe("muon_fsdp2")
