"""Parameters as DeepSpeed's ZeRO-3 leaves them, and its optimizer, which steps flat copies of their parts.

``conformance/systems/deepspeed`` judges DeepSpeed itself.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.checks.training.observe.author_step import run_author_step
from pytest_fsdp_meta.checks.training.observe.beside import Beside
from pytest_fsdp_meta.checks.training.observe.gradients import gradients_of
from pytest_fsdp_meta.ranks.adapters.lookup import parts_of
from pytest_fsdp_meta.ranks.adapters.zero3 import MASTER
from pytest_fsdp_meta.ranks.inventory import named_tensors
from pytest_fsdp_meta.ranks.joined_optimizer import unwrapped_optimizer
from pytest_fsdp_meta.ranks.optimizers import optimizer_facts, pack_optimizer

WEIGHT = torch.arange(15.0).reshape(5, 3)
BIAS = torch.tensor([20.0, 21.0])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(WEIGHT.clone()), nn.Parameter(BIAS.clone())


class DeepSpeedEngine(nn.Module):
    """A stand-in for DeepSpeed's wrapper around a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DeepSpeedZeroOptimizer_Stage3:
    """What DeepSpeed 0.19.8's optimizer has, and its step: each sub-group is copied, stepped and put back in turn."""

    def __init__(self, groups: list[list[nn.Parameter]], decay: list[float], dtype: torch.dtype) -> None:
        self.fp16_groups = groups
        self.sub_group_to_group_id = {number: number for number in range(len(groups))}
        self.fp32_partitioned_groups_flat = [
            torch.cat([parameter.ds_tensor.float() for parameter in group]) for group in groups
        ]
        self.optimizer = torch.optim.AdamW(
            [{"params": [flat], "weight_decay": own} for flat, own in zip(self._flat, decay, strict=True)], lr=0.1
        )
        self.grad_position: dict[int, tuple[int, int, int]] = {}
        for number, group in enumerate(groups):
            start = 0
            for parameter in group:
                self.grad_position[id(parameter)] = (number, start, parameter.ds_tensor.numel())
                start += parameter.ds_tensor.numel()
        for group in self.optimizer.param_groups:
            group["params"] = []

    @property
    def _flat(self) -> list[Tensor]:
        return self.fp32_partitioned_groups_flat

    def get_param_id(self, parameter: Tensor) -> int:
        return id(parameter)

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def step(self, gradients: dict[int, Tensor], groups: slice = slice(None)) -> None:
        for number, group in list(enumerate(self.fp16_groups))[groups]:
            flat = self._flat[number]
            flat.grad = torch.cat([gradients[id(parameter)] for parameter in group])
            self.optimizer.param_groups[number]["params"] = [flat]
            self.optimizer.step()
            self.optimizer.param_groups[number]["params"] = []
            flat.grad = None


def partition(model: Model, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Model:
    """Leave this rank's padded part of each parameter, as ZeRO-3 does on rank ``rank`` of ``size``."""
    for name, parameter in list(model.named_parameters()):
        length = -(-parameter.numel() // size)
        padded = torch.full((length * size,), torch.nan)
        padded[: parameter.numel()] = parameter.detach().flatten()
        placeholder = nn.Parameter(torch.empty(0, dtype=dtype))
        placeholder.ds_id, placeholder.ds_shape, placeholder.ds_numel = name, parameter.shape, parameter.numel()
        placeholder.ds_tensor = padded[rank * length : (rank + 1) * length].to(dtype)
        placeholder.ds_tensor.ds_numel = length
        placeholder.ds_process_group = SimpleNamespace(rank=lambda: rank)
        setattr(model, name, placeholder)
    return model


def trained(dtype: torch.dtype = torch.float32, decay: tuple[float, float] = (0.1, 0.0)) -> tuple[Model, Any]:
    """Return rank 1 of 2 with the optimizer of its two parameters, one in each group."""
    model = partition(Model(), 1, 2, dtype)
    zero = DeepSpeedZeroOptimizer_Stage3([[model.weight], [model.bias]], list(decay), dtype)
    for parameter in model.parameters():
        parameter._z3_optimizer = zero
    return model, zero


def padded_gradients(model: Model) -> dict[int, Tensor]:
    return {id(model.weight): torch.arange(8.0), id(model.bias): torch.tensor([9.0])}


@pytest.mark.parametrize(
    ("size", "held"),
    [
        (2, [((0, 8), (0, 1)), ((8, 15), (1, 2))]),
        (4, [((0, 4), (0, 1)), ((4, 8), (1, 2)), ((8, 12), (2, 2)), ((12, 15), (2, 2))]),
    ],
)
def test_the_parts_of_all_ranks(size, held):
    for rank, ranges in enumerate(held):
        model = partition(Model(), rank, size)
        for (name, _, tensor), (start, stop), whole in zip(named_tensors(model), ranges, (WEIGHT, BIAS), strict=True):
            part = parts_of(model).of(name, tensor)
            assert (part.shape, part.flat, part.by) == (tuple(whole.shape), True, "ZeRO-3")
            assert part.local.tolist() == whole.flatten()[start:stop].tolist()
            assert part.regions == ((((start, stop),) if stop > start else ()),)


def test_names_inside_the_engine():
    assert [name for name, *_ in named_tensors(DeepSpeedEngine(Model()))] == ["weight", "bias"]


def test_a_part_on_a_disk_is_no_part():
    model = partition(Model(), 0, 2)
    model.weight.ds_tensor.data = torch.empty(0)
    assert not parts_of(model).of("weight", model.weight).by


def test_groups_and_settings():
    model, zero = trained()
    optimizer = unwrapped_optimizer(zero)
    assert unwrapped_optimizer(zero) is optimizer
    facts = optimizer_facts(optimizer, Subject(model, optimizer=zero))
    assert facts.kind == "AdamW inside DeepSpeedZeroOptimizer_Stage3"
    assert facts.held == {"weight": 1, "bias": 1}
    assert not facts.others
    assert [facts.settings[name]["weight_decay"] for name in ("weight", "bias")] == ["0.1", "0.0"]


def test_the_reference_steps_with_the_inner_optimizer():
    import cloudpickle

    model, zero = trained()
    [packed] = cloudpickle.loads(pack_optimizer(unwrapped_optimizer(zero), model))
    assert packed.kind is torch.optim.AdamW
    assert [(options["weight_decay"], names) for options, names in packed.groups] == [
        (0.1, {"weight"}),
        (0.0, {"bias"}),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_by_parameter_without_padding(dtype):
    model, zero = trained(dtype)
    optimizer = unwrapped_optimizer(zero)
    assert not optimizer.state[model.weight]
    zero.step(padded_gradients(model))
    state = optimizer.state[model.weight]
    assert state["exp_avg"].tolist() == pytest.approx([0.1 * number for number in range(7)])
    assert float(state["step"]) == 1.0
    assert (MASTER in state) == (dtype is torch.bfloat16)
    assert optimizer.state[model.bias]["exp_avg"].tolist() == pytest.approx([0.9])


def look_during(step: Any) -> tuple[Model, list[dict[str, list[float]]]]:
    """Run ``step`` as the author's, and return what is seen of the gradients while it runs."""
    model, zero = trained()
    seen: list[dict[str, list[float]]] = []

    def train_step(model: Model, optimizer: Any, batch: dict[str, Any]) -> float:
        assert optimizer is zero
        step(zero, padded_gradients(model))
        return 0.0

    subject = Subject(model, optimizer=zero, train_step=train_step)

    def look() -> None:
        seen.append({name: part.local.tolist() for name, part in gradients_of(model)})

    run_author_step(subject, unwrapped_optimizer(zero), {}, 0, look, Beside())
    return model, seen


def test_gradients_of_all_sub_groups_are_seen_once():
    model, seen = look_during(lambda zero, gradients: zero.step(gradients))
    assert seen == [{"weight": list(range(7)), "bias": [9.0]}]
    assert gradients_of(model) == []  # outside of a step there are none


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda zero, gradients: None, "it never stepped the optimizer in step 0"),
        (lambda zero, gradients: zero.step(gradients, slice(1)), "it never stepped the optimizer in step 0"),
        (lambda zero, gradients: [zero.step(gradients), zero.step(gradients)], "it stepped the optimizer 2 times"),
    ],
)
def test_steps_are_counted(step, problem):
    with pytest.raises(ValueError, match=problem):
        look_during(step)
