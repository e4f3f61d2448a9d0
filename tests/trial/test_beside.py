"""Schedulers and state beside the model, on real ranks: what authors may declare, and what they may not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fixtures.forms_beside import PlainAverage, halve_each_step, local
from tests.trial.test_reloading import for_torch, from_torch, plain
from tests.trial.test_train_step import build, judged, load, plain_step
from tests.trial_help import loss

CHECKS = ("update_parity", "beside_parity", "beside_round_trip", "resume_parity")


class Sum:
    """Adds up the loss; not a tensor, so only saved and loaded."""

    total = 0.0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


def test_torchs_own_average_of_a_model_that_is_not_sharded_in_place():
    """AveragedModel copies the model, which fully_shard refuses: an average of the plain weights is one line."""
    average = {"ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))}
    found = judged(None, CHECKS, beside=average)
    assert {one.status for one in found.values()} == {"error"}
    assert "Subject(beside={'ema': ...})" in found["beside_parity"].reason


def test_an_average_of_what_ddp_wraps():
    """Its names have one more "module." than those of the reference's average."""

    def average(model: nn.Module) -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def function(fsdp):
        made = load(fsdp, train_step=plain_step, beside={"ema": average})
        made.model = DistributedDataParallel(build())
        return made

    [found] = judged(None, ("beside_parity",), function=function).values()
    assert found.status == "passed", found


def test_torch_cannot_keep_plain_shards_of_uneven_sizes():
    def uneven() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(4, 3)

    def function(fsdp):
        made = load(fsdp, reference=uneven, beside={"ema": PlainAverage})
        made.model = fully_shard(uneven(), mesh=fsdp.mesh)
        return made

    found = judged(None, ("beside_round_trip", "resume_parity"), function=function)
    assert {one.status for one in found.values()} == {"skipped"}
    assert found["beside_round_trip"].reason == (
        "ema.weight is a plain tensor of another shape on other ranks, of which torch keeps one; declare "
        "Subject(save=..., resume=...)"
    )


def test_a_step_that_gets_everything_by_name():
    def step(batch, scheduler, beside, optimizer, model):
        found = plain_step(model, optimizer, batch)
        scheduler.step()
        beside["sum"].total += found.item()
        return found

    found = judged(step, CHECKS, scheduler=halve_each_step, beside={"sum": Sum()})
    assert {id: one.status for id, one in found.items()} == {
        "update_parity": "passed",
        "beside_parity": "skipped",
        "beside_round_trip": "skipped",
        "resume_parity": "passed",
    }, found
    assert "sum.total differs between the ranks, and torch.distributed.checkpoint keeps one rank's value" in (
        found["beside_round_trip"].reason
    )


@pytest.mark.parametrize("returns", [True, False])
def test_a_resume_that_makes_a_new_scheduler_returns_it(returns):
    def save(model, optimizer, folder, scheduler):
        for_torch(model, optimizer, folder)
        torch.save(scheduler and scheduler.state_dict(), folder / f"scheduler {dist.get_rank()}.pt")

    def resume(model, optimizer, folder, scheduler):
        from_torch(model, optimizer, folder)
        if scheduler is None:
            return None
        new = halve_each_step(optimizer)
        new.load_state_dict(torch.load(folder / f"scheduler {dist.get_rank()}.pt"))
        optimizer.param_groups[0]["lr"] = new.get_last_lr()[0]
        return new if returns else None

    found = judged(None, CHECKS, scheduler=halve_each_step, save=save, resume=resume, optimizer=plain)
    assert found["beside_round_trip"].status == ("passed" if returns else "failed")
    assert found["resume_parity"].status == ("passed" if returns else "skipped")  # the other finding explains it


def test_a_scheduler_that_steps_by_a_metric_is_refused():
    found = judged(None, CHECKS, scheduler=lambda optimizer: ReduceLROnPlateau(optimizer))
    assert found["update_parity"].status == "error"
    assert "ReduceLROnPlateau steps by a metric, which the reference lacks; leave it out" in (
        found["update_parity"].reason
    )


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"scheduler": lambda optimizer: 3},
            "Subject(scheduler=...): it returned int, but should return a scheduler with step() and state_dict()",
        ),
        (
            {"beside": {"ema": lambda model: 3}},
            "Subject(beside=...): 'ema' returned int, but should return an object with state_dict() and "
            "load_state_dict()",
        ),
    ],
)
def test_a_function_that_returns_something_else(declared, message):
    found = judged(None, CHECKS, **declared)
    assert all(one.status == "error" for one in found.values())
    assert found["update_parity"].reason.endswith(message)


def test_a_scheduler_that_the_reference_cannot_build():
    def function(fsdp):
        made = load(fsdp)
        optimizer = made.optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)
        mesh = fsdp.mesh
        made.scheduler = LambdaLR(optimizer, lambda step: 1.0 / mesh.size())
        return made

    found = judged(None, CHECKS, function=function)
    assert found["update_parity"].status == "error"
    assert "Subject(scheduler=...): the reference cannot build the same scheduler (it holds a DeviceMesh" in (
        found["update_parity"].reason
    )


class Nested(Sum):
    """Keeps its averages in a dict of its state dict, as diffusers' does, and counts updates."""

    def __init__(self, model, decay=0.5):
        self.decay = decay
        self.shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter, 1 - self.decay)

    def state_dict(self):
        return {"decay": 0.5, "shadow": dict(self.shadow)}

    def load_state_dict(self, state):
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


def test_averages_within_another_dict():
    found = judged(None, CHECKS, beside={"ema": Nested})
    assert {one.status for one in found.values()} == {"passed"}, found
    by_world = {"ema": lambda model: Nested(model, 0.5 if not torch.distributed.get_world_size() > 1 else 0.4)}
    [*findings] = judged(None, CHECKS, beside=by_world)["beside_parity"].findings
    assert {finding.tensor for finding in findings} == {
        f"ema.shadow.{n}.{kind}" for n in (0, 2) for kind in ("weight", "bias")
    }
    assert all(finding.actual.startswith(("moves 1.1", "changes differently")) for finding in findings), findings


def test_a_grad_scaler_that_a_function_builds():
    """Its update() takes no model, and the reference scales nothing."""

    def step(model, optimizer, batch, beside):
        found, scaler = loss(model, batch), beside["scaler"]
        scaler.scale(found).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return found

    found = judged(step, ["update_parity", "beside_round_trip"], beside={"scaler": lambda model: GradScaler("cpu")})
    assert {one.status for one in found.values()} == {"passed"}, found


def test_an_average_that_only_the_step_knows_how_to_update():
    class Own(Nested):
        update = property()

        def advance(self, model):
            Nested.update(self, model)

    def step(model, optimizer, batch, beside):
        found = plain_step(model, optimizer, batch)
        beside["ema"].advance(model)
        return found

    found = judged(step, ["beside_parity"], beside={"ema": Own})["beside_parity"]
    assert found.why == "differs"
    assert "does not in the reference, where only update_parameters(model) or update(model)" in found.reason


def test_a_state_that_cannot_be_read_names_the_field():
    class Broken(Sum):
        def state_dict(self):
            raise RuntimeError("no state")

    found = judged(None, CHECKS, beside={"ema": lambda model: Broken()})
    assert "RuntimeError in Subject(beside={'ema': ...}): no state" in found["beside_round_trip"].reason


def test_an_optimizer_that_chooses_its_own_learning_rate():
    def adaptive(parameters):
        return torch.optim.SGD([{"params": list(parameters)}], lr=0.1)

    def without_rate(parameters):
        optimizer = adaptive(parameters)
        optimizer.register_step_pre_hook(lambda own, *_: own.param_groups[0].update(lr=0.1))
        optimizer.register_step_post_hook(lambda own, *_: own.param_groups[0].update(lr=None))
        optimizer.param_groups[0]["lr"] = None
        return optimizer

    found = judged(None, ["update_parity"], optimizer=without_rate)["update_parity"]
    assert found.status == "passed", found.reason


class OfViews(PlainAverage):
    def __init__(self, model):
        super().__init__(model)
        self.shadow = {name: local(parameter.detach()) for name, parameter in model.named_parameters()}


class HoldsTheWeights:
    """Part of a loss that computes with weights of the model, and updates nothing."""

    def __init__(self, model):
        self.shadow = {name: parameter.detach() for name, parameter in model.named_parameters()}

    state_dict, load_state_dict = PlainAverage.state_dict, PlainAverage.load_state_dict


def test_objects_that_average_nothing_may_share_parameters_with_the_model():
    found = judged(plain_step, ("beside_parity",), beside={"loss": HoldsTheWeights})["beside_parity"]
    assert found.status == "passed", found


def test_an_average_that_is_the_parameters_themselves():
    found = judged(plain_step, ("beside_parity",), beside={"ema": OfViews})["beside_parity"]
    expected = [(f"ema.{name}", "is a parameter of the model itself") for name in build().state_dict()]
    assert [(finding.tensor, finding.actual) for finding in found.findings] == expected
    assert found.findings[0].remedy == "copy each parameter: parameter.detach().clone()"
