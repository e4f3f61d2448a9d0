"""Functions that clip gradients: right ones of every kind pass; broken ones are in ``fixtures/defects``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_, get_total_norm

from fixtures.forms_optimizers import own, whole
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.worlds import Rank
from tests import trial_help

NORM, CLIP = "grad_norm_parity", "grad_clip_parity"
Parameters = Iterable[nn.Parameter]
Clip = Callable[[Parameters, float], object]
Make = Callable[[nn.Module, Rank], Clip]
"""Return the function that clips for a sharded model on a rank."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).float().square().mean()


def observe(make: Make, precision: MixedPrecisionPolicy | None = None) -> Evidence:
    def load(fsdp: Rank) -> Subject:
        model = build()
        fully_shard(model, mesh=fsdp.mesh, mp_policy=precision or MixedPrecisionPolicy())
        batch = lambda step: {"x": torch.randn(8, 16)}  # noqa: E731
        return Subject(model, reference=build, batch=batch, loss=squared, clip_grad_norm=make(model, fsdp))

    return trial_help.observe(load, [NORM, CLIP], steps=2)


def judged(evidence: Evidence) -> dict[str, Verdict]:
    return trial_help.judge_all(evidence, [NORM, CLIP])


def scale(parameters: Parameters, norm: Tensor, bound: float) -> Tensor:
    for parameter in parameters:
        own(parameter.grad).mul_((bound / (norm + 1e-6)).clamp(max=1.0))
    return norm


def by_norm(kind: float) -> Make:
    return lambda model, fsdp: partial(clip_grad_norm_, norm_type=kind)


def each_parameter(model: nn.Module, fsdp: Rank) -> Clip:
    """Half of the norm that it returns is more than the norm of any parameter."""

    def clip(parameters: Parameters, bound: float) -> float:
        return sum(float(whole(clip_grad_norm_([parameter], bound))) for parameter in parameters)

    return clip


def each_element(model: nn.Module, fsdp: Rank) -> Clip:
    def clip(parameters: Parameters, bound: float) -> Tensor:
        held = list(parameters)
        norm = whole(get_total_norm([parameter.grad for parameter in held], torch.inf))
        for parameter in held:
            own(parameter.grad).clamp_(-bound, bound)
        return norm

    return clip


def holding_the_model(model: nn.Module, fsdp: Rank) -> Clip:
    """The reference calls it with its own model."""

    def clip(parameters: Parameters, bound: float) -> Tensor:
        norms = [clip_grad_norm_(module.parameters(), bound) for module in (model[0], model[2], model[3], model[5])]
        return torch.stack([whole(norm) for norm in norms]).max()

    return clip


def counting_ranks(model: nn.Module, fsdp: Rank) -> Clip:
    """On one device, its norm is too small."""
    size = fsdp.world_size

    def clip(parameters: Parameters, bound: float) -> Tensor:
        held = list(parameters)
        square = torch.stack([whole(parameter.grad).square().sum() for parameter in held]).sum()
        dist.all_reduce(square)
        return scale(held, (square / size).sqrt(), bound)

    return clip


def over_a_mesh(model: nn.Module, fsdp: Rank) -> Clip:
    mesh = fsdp.mesh

    def clip(parameters: Parameters, bound: float) -> Tensor:
        held = list(parameters)
        square = torch.stack([own(parameter.grad).square().sum() for parameter in held]).sum()
        dist.all_reduce(square, group=mesh.get_group())
        return scale(held, square.sqrt(), bound)

    return clip


def of_dtensors_only(model: nn.Module, fsdp: Rank) -> Clip:
    def clip(parameters: Parameters, bound: float) -> Tensor:
        held = list(parameters)
        return scale(held, get_total_norm([parameter.grad for parameter in held]).full_tensor(), bound)

    return clip


RIGHT: dict[str, Make] = {
    "sum": by_norm(1.0),
    "parameter": each_parameter,
    "element": each_element,
    "model": holding_the_model,
    "ranks": counting_ranks,
    "dtensors": of_dtensors_only,
}


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT)
def test_a_right_function_passes(make):
    found = judged(observe(make))
    assert {id: (v.status, v.findings, v.reason) for id, v in found.items()} == dict.fromkeys(
        (NORM, CLIP), ("passed", (), "")
    )


def test_a_norm_in_bfloat16_passes_within_its_own_noise():
    evidence = observe(by_norm(math.inf), MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert evidence.training[0].noise.own_norm > 0
    assert {v.status for v in judged(evidence).values()} == {"passed"}


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (over_a_mesh, "cannot be sent there (it holds a DeviceMesh, which the reference does not have)"),
        (of_dtensors_only, "raised AttributeError there: 'Tensor' object has no attribute 'full_tensor'"),
        (by_norm(math.inf), ""),
    ],
)
def test_the_reference_uses_the_function_if_it_can(make, problem):
    reference = observe(make).reference
    assert (reference.clip_problem, reference.own_clipping is None) == (problem, bool(problem))


def test_torch_clipping_is_not_recorded_twice():
    assert observe(by_norm(2.0)).reference.own_clipping is None
