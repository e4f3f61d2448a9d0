"""Right training setups, and wrong ones with one injected error, for ``benchmarks/power.py``."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fixtures.architectures import load_plainly
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.ranks.adapters.dtensor import own_memory
from pytest_fsdp_meta.transformers import subject
from pytest_fsdp_meta.worlds import Rank

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
RATES = {"sgd": 0.1, "adamw": 1e-3, "muon": 2e-2}
"""Usual learning rates; the sweep multiplies them."""


def load(
    fsdp: Rank, path: Path, optimizer: str, precision: str, rate: float = 1.0, error: str = "", size: float = 0.0,
    seed: int = 0,
) -> Subject:  # fmt: skip
    """Load a model that is right, but for the ``error`` of relative ``size`` in a parameter that ``seed`` chooses.

    ``precision`` is "float32", "bfloat16" (a mixed-precision policy) or "autocast"; ``rate`` multiplies the usual
    learning rate. Errors are "gradient" and "update" (scaled by 1 + size), "row" (one row's gradient is scaled) and
    "stale" (one rank's shard keeps its values).
    """
    policy = {"mp_policy": BFLOAT16} if precision == "bfloat16" else {}
    model = load_plainly(path, fsdp.mesh, fsdp.device, **policy)
    declared: dict[str, Any] = {"loss": _autocast_loss} if precision == "autocast" else {}
    declared["optimizer"] = partial(make_optimizer, kind=optimizer, rate=rate * RATES[optimizer])
    found = subject(model, path, **declared)
    if error:
        _inject(model, error, size, seed, fsdp)
    return found


def make_optimizer(parameters: Iterable[nn.Parameter], kind: str, rate: float) -> Optimizer:
    if kind == "sgd":
        return SGD(parameters, lr=rate, foreach=False)
    if kind == "adamw":
        return AdamW(parameters, lr=rate, foreach=False)
    held = list(parameters)
    return _MuonAndAdamW([p for p in held if p.ndim == 2], [p for p in held if p.ndim != 2], rate)


class _MuonAndAdamW(Optimizer):
    """Muon for matrices and AdamW for everything else, as trainings with Muon have it."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], rate: float) -> None:
        super().__init__([*matrices, *others], {})
        self._parts: list[Optimizer] = [torch.optim.Muon(matrices, lr=rate)] if matrices else []
        self._parts += [AdamW(others, lr=rate / 20, foreach=False)] if others else []

    def step(self, closure: Any = None) -> None:
        for part in self._parts:
            part.step()


def _autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast(batch["input_ids"].device.type, dtype=torch.bfloat16):
        loss: Tensor = model(**batch).loss
    return loss


def _inject(model: nn.Module, error: str, size: float, seed: int, fsdp: Rank) -> None:
    trained = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    chosen = trained[int(torch.randint(len(trained), (), generator=torch.Generator().manual_seed(seed)))]
    if error in ("gradient", "row"):
        chosen.register_post_accumulate_grad_hook(lambda p: _scale_gradient(p, size, error == "row", fsdp))
    elif error == "update" or fsdp.rank == 1:
        _change_update(chosen, 0.0 if error == "stale" else 1 + size)


def _scale_gradient(chosen: Tensor, size: float, one_row: bool, fsdp: Rank) -> None:
    assert chosen.grad is not None
    local = own_memory(chosen.grad)
    if not local.numel() or (one_row and fsdp.rank != 0):
        return
    row = int(local.flatten(1).norm(dim=1).argmax())
    with torch.no_grad():
        (local[row] if one_row else local).mul_(1 + size)


def _change_update(chosen: nn.Parameter, factor: float) -> None:
    """Let each step of any optimizer on this rank move the parameter ``factor`` times as far."""
    before: list[Tensor] = []

    def steps_it(optimizer: Optimizer) -> bool:
        held = any(p is chosen for group in optimizer.param_groups for p in group["params"])
        return held and not isinstance(optimizer, _MuonAndAdamW)  # its parts step the parameters

    def remember(optimizer: Optimizer, *_: Any) -> None:
        if steps_it(optimizer):
            before.append(own_memory(chosen).clone())

    def change(optimizer: Optimizer, *_: Any) -> None:
        if steps_it(optimizer):
            old, now = before.pop(), own_memory(chosen)
            now.copy_(old + factor * (now - old))

    register_optimizer_step_pre_hook(remember)
    register_optimizer_step_post_hook(change)
