"""Test optimizers that the loader built: those inside a framework's wrapper, and those with step hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fixtures.forms_optimizers import Container
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.loader.subject import SubjectError
from pytest_fsdp_meta.ranks.joined_optimizer import parts_of_optimizer
from pytest_fsdp_meta.ranks.optimizers import built_optimizer, make_optimizer, settings_of
from pytest_fsdp_meta.worlds import Rank
from tests.trial.test_trial import judged, observed, subject
from tests.trial_help import batch, build, judge_all, loss, observe

Making = Callable[[nn.Module, Rank], torch.optim.Optimizer]


class Delegating(torch.optim.Optimizer):
    """A wrapper like accelerate's: an Optimizer whose groups are those of the optimizer inside it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        raise AssertionError("only the framework knows when to step")


class Holding:
    """A wrapper that is not an Optimizer, like Megatron's, which may step copies."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def with_built(make: Making) -> Callable[[Rank], Subject]:
    def loader(fsdp):
        model = subject(fsdp, freeze=False).model
        return Subject(model, reference=build, batch=batch, loss=loss, optimizer=make(model, fsdp))

    return loader


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def findings(make: Making) -> dict[str, list[str]]:
    verdicts = judged(with_built(make))
    wrong = {id: found for id, found in verdicts.items() if found.status in ("failed", "error")}
    return {id: [*dict.fromkeys(f"{f.actual}; {f.cause}" for f in found.findings)] for id, found in wrong.items()}


def test_frozen_parameters_that_were_replaced_are_said_where_torch_has_no_name_for_them():
    stale = nn.Parameter(torch.ones(2), requires_grad=False)

    checks = ["optimizer_state_round_trip"]
    load = with_built(lambda model, fsdp: sgd([*model.parameters(), stale]))
    found = judge_all(observe(load, checks), checks)["optimizer_state_round_trip"]
    assert found.status == "error"
    assert found.reason.startswith("Subject(optimizer=...): it holds 1 tensor that the model does not register, as")


# Wrappers.


def test_the_optimizer_inside_accelerates_wrapper_is_the_one():
    accelerate = pytest.importorskip("accelerate")
    model, inner = nn.Linear(2, 2), sgd([nn.Parameter(torch.ones(1))])
    accelerated = accelerate.Accelerator(cpu=True).prepare_optimizer(inner)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    assert accelerated is not inner
    for given in (inner, accelerated, Delegating(accelerated)):
        assert built_optimizer(Subject(model, optimizer=given)) is inner


@pytest.mark.parametrize("optimizer", [None, sgd, torch.optim.AdamW])
def test_nothing_is_unwrapped_where_nothing_was_built(optimizer):
    assert built_optimizer(Subject(nn.Linear(2, 2), optimizer=optimizer)) is None


def test_a_wrapper_that_is_not_an_optimizer_is_refused_with_what_to_give():
    with pytest.raises(SubjectError) as caught:
        Subject(nn.Linear(2, 2), optimizer=Holding(sgd([nn.Parameter(torch.ones(1))])))  # type: ignore[arg-type]
    assert str(caught.value).endswith("; give its .optimizer if that steps the model's own parameters")


# Containers.


def halves(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    parameters = list(model.parameters())
    return parameters[:2], parameters[2:]


def contained(model: nn.Module, fsdp: Rank | None = None) -> Container:
    first, others = halves(model)
    return Container(torch.optim.AdamW(first, lr=0.1), sgd(others))


def test_the_optimizers_in_a_container_are_joined():
    model = build()
    container = contained(model)
    joined = built_optimizer(Subject(model, optimizer=container))
    assert joined is not None
    assert parts_of_optimizer(joined) == tuple(container.optimizers)
    assert [len(group["params"]) for group in joined.param_groups] == [2, len(list(model.parameters())) - 2]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    container.step()
    assert [parameter for parameter in model.parameters() if joined.state.get(parameter)] == list(model.parameters())
    first = next(model.parameters())
    del joined.state[first]
    assert first not in joined.state
    assert first not in container.optimizers[0].state
    with pytest.raises(KeyError):
        joined.state[first]
    assert first not in container.optimizers[0].state  # looking it up adds nothing
    joined.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_container_with_one_optimizer_in_a_wrapper_is_unwrapped():
    inner = sgd([nn.Parameter(torch.ones(1))])
    assert built_optimizer(Subject(nn.Linear(2, 2), optimizer=Container(Delegating(inner)))) is inner


def test_a_container_of_something_else_is_an_optimizer():
    container = Container(sgd([nn.Parameter(torch.ones(1))]))
    container.optimizers.append("no optimizer")  # type: ignore[arg-type]
    assert built_optimizer(Subject(nn.Linear(2, 2), optimizer=container)) is container


def test_a_parameter_that_no_optimizer_in_a_container_holds_is_found():
    def without_the_last(model: nn.Module, fsdp: Rank) -> Container:
        first, others = halves(model)
        return Container(torch.optim.AdamW(first, lr=0.1), sgd(others[:-1]))

    found = findings(without_the_last)
    assert list(found) == ["optimizer_owns_parameters"]
    assert found.popitem()[1][0].startswith("in no parameter group of AdamW and SGD inside Container")


def stepping(*numbers: int) -> Callable[[Rank], Subject]:
    """Return a loader whose step steps the optimizers of its container as often as the numbers say."""

    def step(model: nn.Module, container: Container, rows: Any) -> Any:
        found = loss(model, rows)
        found.backward()
        for optimizer, times in zip(container.optimizers, numbers, strict=True):
            for _ in range(times):
                optimizer.step()
        container.zero_grad()
        return found

    def loader(fsdp):
        model = subject(fsdp, freeze=False).model
        return Subject(model, reference=build, batch=batch, loss=loss, optimizer=contained(model), train_step=step)

    return loader


def test_a_step_gets_the_container_and_steps_each_optimizer_once():
    verdicts = judged(stepping(1, 1))
    assert {id: v.findings for id, v in verdicts.items() if v.status in ("failed", "error")} == {}
    reason = "Subject(train_step=...): it {} in step 0, but should step it once; "
    assert reason.format("never stepped its SGD") in judged(stepping(1, 0))["loss_parity"].reason
    assert reason.format("stepped its AdamW 2 times") in judged(stepping(2, 1))["loss_parity"].reason


def stepping_in_backward(parameters: Iterable[nn.Parameter], factor: float = 1.0) -> Container:
    """Return an optimizer for each parameter, stepped by its hook, as torch's tutorial does."""
    own: dict[Tensor, torch.optim.Optimizer] = {}

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(factor)
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in parameters:
        own[parameter] = torch.optim.AdamW([parameter], lr=0.1, eps=1e-2)
        parameter.register_post_accumulate_grad_hook(step)
    return Container(*own.values())


@pytest.mark.parametrize(("built", "own_step"), [(False, True), (True, True), (False, False)])
def test_gradients_are_compared_although_the_backward_steps_the_optimizers(built: bool, own_step: bool) -> None:
    def step(model: nn.Module, optimizer: Container, batch: Any) -> Any:
        found = loss(model, batch)
        found.backward()
        return found

    def loader(fsdp: Rank, factor: float = 1.0) -> Subject:
        model = subject(fsdp, freeze=False).model
        optimizer = stepping_in_backward(model.parameters(), factor) if built else stepping_in_backward
        declared: dict[str, Any] = {"reference": build, "batch": batch, "loss": loss, "optimizer": optimizer}
        return Subject(model, **declared, train_step=step if own_step else None)

    verdicts = judged(loader)
    assert {id: v.findings for id, v in verdicts.items() if v.status in ("failed", "error")} == {}
    if built:  # the reference's copies have no hooks
        found = judged(partial(loader, factor=0.5))["grad_parity"].findings
        assert [finding.actual for finding in found] == ["gradient is 1/2 times the reference's"] * 4


def test_hooks_that_an_earlier_call_of_the_function_has_added_are_gone() -> None:
    made = Subject(build(), optimizer=stepping_in_backward)
    first, second = make_optimizer(made), make_optimizer(made)
    loss(made.model, batch(0)).backward()
    assert first is not None
    assert second is not None
    assert (bool(first.state), bool(second.state)) == (False, True)


# Step hooks.


def hooked(hook: Callable[..., Any], model: nn.Module, before: bool = False) -> torch.optim.Optimizer:
    optimizer = sgd(model.parameters())
    (optimizer.register_step_pre_hook if before else optimizer.register_step_post_hook)(hook)
    return optimizer


def shrinking_the_model(model: nn.Module, fsdp: Rank) -> torch.optim.Optimizer:
    """Shrink a parameter after the step, through a hook that holds the sharded model."""

    def shrink(*_: Any) -> None:
        with torch.no_grad():
            model[1].weight.mul_(0.5)

    return hooked(shrink, model)


def doubling_gradients(model: nn.Module, fsdp: Rank) -> torch.optim.Optimizer:
    def double(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(2)

    return hooked(double, model, before=True)


def shrinking_by_mesh(model: nn.Module, fsdp: Rank) -> torch.optim.Optimizer:
    """Shrink a parameter by what all ranks agree about; in the world of the reference, the mesh has one rank."""
    mesh = fsdp.mesh

    def shrink(*_: Any) -> None:
        half = torch.tensor(0.5)
        dist.all_reduce(half, group=mesh.get_group())
        with torch.no_grad():
            model[1].weight.mul_(half / mesh.size())

    return hooked(shrink, model)


def shrinking_shards(model: nn.Module, fsdp: Rank) -> torch.optim.Optimizer:
    def shrink(*_: Any) -> None:
        with torch.no_grad():
            model[1].weight.to_local().mul_(0.5)

    return hooked(shrink, model)


@pytest.mark.parametrize("make", [shrinking_the_model, doubling_gradients, shrinking_by_mesh])
def test_the_reference_runs_the_step_hooks(make):
    assert findings(make) == {}


def evidence_of(make: Making) -> Evidence:
    return observed(with_built(make))


def test_a_step_hook_that_cannot_run_on_the_reference_is_named_as_the_cause():
    found = findings(shrinking_shards)
    why = "shrink: it raises AttributeError: 'Parameter' object has no attribute 'to_local'"
    cause = f"the optimizer has a step hook that the reference does not run ({why})"
    assert {id: {text.split("; ", 1)[1] for text in texts} for id, texts in found.items()} == {"update_parity": {cause}}


def replacing_a_parameter(model: nn.Module, fsdp: Rank) -> torch.optim.Optimizer:
    def replace(*_: Any) -> None:
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())

    return hooked(replace, model)


def test_the_reference_keeps_its_parameters():
    reference = evidence_of(replacing_a_parameter).reference
    assert reference is not None
    assert reference.hooks_left_out == ("replace: it replaces parameters of the model",)
    assert reference.losses_again is None, "the ranks differ from it"


def test_a_copy_of_a_dtensor_is_not_sent_to_the_reference():
    def make(model: nn.Module, fsdp: Rank) -> torch.optim.Optimizer:
        average = model[1].weight.detach().clone()
        assert isinstance(average, DTensor)
        return hooked(lambda *_: average.lerp_(model[1].weight.detach(), 0.5), model)

    reference = evidence_of(make).reference
    assert reference is not None
    assert reference.hooks_left_out == ("<lambda>: it holds a DTensor, whose other parts are on other ranks",)


def test_a_function_gets_what_its_parameter_is_named_after():
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)), []

    def by_names(named_parameters: Any) -> torch.optim.Optimizer:
        seen.append([name for name, _ in named_parameters])
        return sgd([parameter for _, parameter in named_parameters])

    def by_model(model: nn.Module) -> torch.optim.Optimizer:
        seen.append(model)
        return sgd(model.parameters())

    for function in (by_names, by_model, sgd, torch.optim.AdamW):
        made = make_optimizer(Subject(model, optimizer=function))
        assert made is not None
    assert seen == [["0.weight", "0.bias"], model]
    settings = settings_of(made, model)
    kept = {"lr": "0.001", "betas": "(0.9, 0.999)", "eps": "1e-08", "weight_decay": "0.01"}
    assert settings["0.weight"].items() >= kept.items()
    assert "foreach" not in settings["0.weight"]
    assert "1.weight" not in settings


def test_settings_are_plain_text():
    model = nn.Linear(2, 2)
    group = {"params": model.parameters(), "lr": torch.tensor(0.5), "mesh": object()}
    assert settings_of(torch.optim.SGD([group], foreach=False), model)["weight"]["lr"] == "0.5"
    group |= {"params": model.parameters(), "initial_lr": 1.0}
    settings = settings_of(torch.optim.SGD([group], foreach=False), model)
    assert settings["weight"]["lr"] == "1.0", "that of before a scheduler has set it"
    assert "mesh" not in settings["weight"]
    assert "initial_lr" not in settings["weight"]


@pytest.mark.parametrize("built", [False, True])
def test_an_optimizer_that_needs_a_closure_is_refused(built: bool) -> None:
    model = nn.Linear(4, 4)
    declared: Any = torch.optim.LBFGS(model.parameters()) if built else torch.optim.LBFGS
    with pytest.raises(SubjectError, match=r"LBFGS.step\(\) needs a closure, .* declare another one, such as SGD"):
        make_optimizer(Subject(model, optimizer=declared))
