"""A step in training mode on real ranks: whose step it is, what it starts from, and what it must not disturb."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict, built_in
from pytest_fsdp_meta.checks.training.observe.training_mode import ModeWatch
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.worlds import Rank
from tests.trial.test_train_step import plain_step
from tests.trial_help import judge_all, loss, observe

FOLLOW = "random_numbers_follow_the_mesh"


class Scaled(nn.Dropout):
    """A dropout that only ranks in training mode run."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self.training else hidden


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scaled(0.5), nn.Linear(4, 2))


def batch(step: int) -> dict[str, Tensor]:
    return {"input": torch.rand(4, 4)}  # drawn, so that it disturbs the generators


def load(fsdp: Rank, seeds: bool = True, **declared: Any) -> Subject:
    model = build()
    for module in model:
        fully_shard(module, mesh=fsdp.mesh)
    fully_shard(model, mesh=fsdp.mesh)
    if seeds:
        torch.manual_seed(100 + fsdp.rank)
    return Subject(model, **{"reference": build, "batch": batch, "loss": loss, **declared})


def observed(checks: Iterable[str] = (FOLLOW,), function: Any = load, **declared: Any) -> Evidence:
    return observe(partial(function, **declared), checks)


def judged(evidence: Evidence, id: str = FOLLOW) -> Verdict:
    return judge_all(evidence, [id])[id]


def test_the_step_starts_from_the_random_state_that_the_loader_left():
    evidence = observed()
    first, second = evidence.training_mode or ()
    assert [draw.seed for draw in (*first.draws, *second.draws)] == [100, 101]
    assert (first.data_parallel, second.data_parallel) == ((0, 2), (1, 2))
    assert judged(evidence).status == "passed"


def test_a_seed_that_only_the_reference_needs_is_not_that_of_training():
    found = judged(observed(seeds=False))
    assert (found.status, found.why) == ("skipped", "not applicable")
    assert found.reason.startswith("how training seeds the ranks is unknown")


def test_the_authors_step_may_switch_the_mode():
    def step(model: Any, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
        model.eval()
        model[1].train()
        torch.manual_seed(7)
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    evidence = observed(train_step=step, optimizer=lambda parameters: torch.optim.AdamW(parameters))
    assert [draw.seed for rank in evidence.training_mode or () for draw in rank.draws] == [7, 7]
    found = [(finding.tensor, finding.actual) for finding in judged(evidence).findings]
    assert found == [
        ("1", "draws the same random numbers in each step"),
        ("1", "draws the same random numbers for different rows"),
    ]


@pytest.mark.parametrize("partly", [False, True])
def test_a_model_that_is_loaded_in_eval_is_put_into_train_once(partly):
    """from_pretrained() returns models in eval(), and a trainer calls train() before the loop that calls the step."""

    def load_in_evaluation(fsdp: Rank) -> Subject:
        subject = load(fsdp, train_step=plain_step)
        subject.model.eval()
        subject.model[0].train(partly)
        return subject

    evidence = observed(function=load_in_evaluation)
    assert [bool(rank.draws) for rank in evidence.training_mode or ()] == [not partly] * 2


def test_a_model_that_fails_in_training_mode_only():
    class Broken(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            if self.training:
                raise RuntimeError("needs a schedule")
            return super().forward(input)

    def broken(fsdp: Rank) -> Subject:
        return Subject(fully_shard(Broken(4, 4), mesh=fsdp.mesh), batch=batch, loss=loss)

    evidence = observed([FOLLOW, "dcp_round_trip"], broken)
    found = judged(evidence)
    assert found.status == "error"
    assert "raised RuntimeError in Subject(loss=...): needs a schedule" in found.reason
    assert "while a step with dropout" in found.detail
    assert judged(evidence, "dcp_round_trip").status == "passed"


def test_a_model_with_nothing_to_train():
    def frozen(fsdp: Rank) -> Subject:
        subject = load(fsdp)
        subject.model.requires_grad_(False)
        return subject

    assert judged(observed(function=frozen)).status == "passed"


def test_a_frozen_part_that_the_first_step_puts_into_evaluation_stays_there():
    """So does what it contains: a batch norm without parameters would move its statistics in train()."""

    def build_part() -> nn.Sequential:
        torch.manual_seed(0)
        part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).requires_grad_(False)
        return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2))

    def load_part(fsdp: Rank) -> Subject:
        def step(model: Any, optimizer: Optimizer, batch: dict[str, Tensor]) -> Tensor:
            if not begun:
                model.train()
                model[1].eval()
            begun.append(True)
            return plain_step(model, optimizer, batch)

        begun: list[bool] = []
        model = fully_shard(build_part(), mesh=fsdp.mesh)
        return Subject(model, reference=build_part, batch=batch, loss=loss, train_step=step, optimizer=torch.optim.SGD)

    assert judged(observed(["frozen_weights_stay_frozen"], load_part), "frozen_weights_stay_frozen").status == "passed"


@pytest.mark.parametrize("train_step", [None, lambda model, optimizer, batch: 0.0])
def test_what_is_declared_decides(train_step):
    nothing = judged(observed(batch=None, train_step=train_step))
    assert (nothing.status, nothing.reason) == ("skipped", "Subject(batch=...) is not declared")


class Noise(nn.Module):
    """Noise that no dropout makes, so that the training is compared in ``eval()``."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.empty_like(hidden).uniform_(0.5, 1.5) if self.training else hidden


def build_noisy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Noise(), nn.Linear(4, 2))


def test_what_draws_in_training_and_has_no_loss_in_evaluation_is_not_compared():
    def loss_in_training(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if not model.training:
            raise KeyError("loss_classifier")
        return loss(model, batch)

    def load(fsdp: Rank) -> Subject:
        model = fully_shard(build_noisy(), mesh=fsdp.mesh)
        return Subject(model, reference=build_noisy, batch=batch, loss=loss_in_training)

    checks = built_in().ids_for(simulated=False)
    verdicts = judge_all(observe(load, checks), checks)
    assert {id: one.reason for id, one in verdicts.items() if one.status in ("failed", "error")} == {}
    assert verdicts["grad_parity"].reason == (
        "ranks and reference cannot be compared: 1 draws random numbers in train() that change the loss, and "
        "Subject(loss=...) raises KeyError in eval(): 'loss_classifier'"
    )
    for id in ("params_equal_reference", "dcp_round_trip", "resume_parity"):
        assert verdicts[id].status == "passed", verdicts[id]


def test_what_draws_in_evaluation_too_is_not_compared():
    def noisy_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return loss(model, batch) * torch.rand(())

    found = judged(observed(["loss_parity"], loss=noisy_loss), "loss_parity")
    assert (found.status, found.why) == ("skipped", "not applicable")
    assert found.reason.endswith(
        "that change the loss, in eval() as well; take noise from batch(step), which ranks and reference share"
    )


def watched(model: nn.Module) -> ModeWatch:
    modes = ModeWatch(model)
    with modes.watching():
        model(torch.ones(3, 2)).sum().backward()
    return modes


def test_a_part_in_evaluation_is_one_part_with_its_batch_norms():
    part = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.1)).eval()
    model = nn.Sequential(nn.Linear(2, 2), part, nn.BatchNorm1d(2).eval())
    assert watched(model).evaluating() == ("1",)


class Guided(nn.Linear):
    """Asks for its mode in a function inside of another one."""

    def forward(self, input: Tensor) -> Tensor:
        return self.choose()(super().forward(input))

    def choose(self) -> Any:
        return lambda hidden: hidden * 2 if self.training else hidden


@pytest.mark.parametrize(
    ("layers", "acts"),
    [
        ([], False),
        ([nn.LayerNorm(2), nn.BatchNorm1d(2)], False),
        ([nn.Dropout(0.0)], False),
        ([nn.Dropout(0.1)], True),
        ([Scaled(0.1)], True),
        ([Guided(2, 2)], True),
    ],
)
def test_a_part_whose_mode_changes_nothing_may_be_in_either(layers, acts):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), *layers).eval(), nn.Dropout(0.1))
    assert watched(model).evaluating() == (("1",) if acts else ())


def test_a_class_may_keep_a_part_in_evaluation():
    class Kept(nn.Sequential):
        def train(self, mode: bool = True) -> Kept:
            super().train(mode)
            self[1].eval()
            return self

    part = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    model = Kept(nn.Linear(2, 2), part, nn.Sequential(Guided(2, 2))).train()
    assert watched(model).evaluating() == ()
    model[2].eval()
    assert watched(model).evaluating() == ("2",)
    assert [module.training for module in model] == [True, False, False]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda model: model.eval(), ("",)),
        (lambda model: model[1].eval(), ("1",)),
        (lambda model: model[1][1].eval(), ("1.1",)),
        (lambda model: (model.eval(), [part.train() for part in model.children()]), ()),
        (lambda model: (model.eval(), model.register_forward_pre_hook(lambda own, _: own.train() and None)), ()),
        (lambda model: model[0].eval(), ()),
    ],
)
def test_what_a_step_leaves_in_evaluation_shows_in_the_next(change, left):
    part = nn.Sequential(Guided(2, 2), nn.Dropout(0.1), nn.Linear(2, 2))
    model = nn.Sequential(nn.Linear(2, 2), part, Guided(2, 2))
    first = watched(model)
    change(model)
    assert first.fallen()
    assert first.left(watched(model)) == left


def test_torch_does_not_warn_of_the_hooks_of_observers():
    def compiled(fsdp: Rank) -> Subject:
        found = load(fsdp, train_step=plain_step)
        found.model = torch.compile(found.model, backend="eager")
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # whatever is compiled there
        assert judged(observed(["modules_train"], compiled), "modules_train").status == "passed"
