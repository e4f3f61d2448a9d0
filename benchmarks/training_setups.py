"""Right training setups, and wrong ones with one injected error, for ``benchmarks/power.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from fixtures.architectures import load_plainly
from pytest_fsdp_meta import Subject
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
    # The optimizer is built on the ranks and, from the same callable, on the reference, which has no injected error.
    declared["optimizer"] = partial(make_optimizer, kind=optimizer, rate=rate * RATES[optimizer])
    found = subject(model, path, **declared)
    if error:
        _inject(model, found, error, size, seed, fsdp)
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


def _inject(model: nn.Module, subject: Subject, error: str, size: float, seed: int, fsdp: Rank) -> None:
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1]
    _, chosen = trained[torch.randint(len(trained), (), generator=torch.Generator().manual_seed(seed)).item()]
    plain = subject.optimizer
    assert callable(plain)

    def wrong(parameters: Iterable[nn.Parameter]) -> Optimizer:
        built: Optimizer = plain(parameters)
        if error in ("gradient", "row"):
            built.register_step_pre_hook(lambda *_: _scale_gradient(chosen, size, error == "row", fsdp))
        else:
            _wrap_step(built, chosen, size, error == "stale" and fsdp.rank == 1)
        return built

    subject.optimizer = wrong


def _scale_gradient(chosen: nn.Parameter, size: float, one_row: bool, fsdp: Rank) -> None:
    if chosen.grad is None or (one_row and fsdp.rank != 0):
        return
    local = _own(chosen.grad)
    if not local.numel():
        return
    row = int(local.flatten(1).norm(dim=1).argmax())
    with torch.no_grad():
        (local[row] if one_row else local).mul_(1 + size)


def _wrap_step(built: Optimizer, chosen: nn.Parameter, size: float, stale: bool) -> None:
    before: list[Tensor] = []
    built.register_step_pre_hook(lambda *_: before.append(_own(chosen).detach().clone()))

    def change(*_: Any) -> None:
        old, now = before.pop(), _own(chosen).detach()
        factor = 0.0 if stale else 1 + size
        if stale or size:
            now.copy_(old + factor * (now - old))

    built.register_step_post_hook(change)


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Loader = Callable[..., Subject]
