"""Test whole trials on real ranks, from the loader to the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict, built_in
from pytest_fsdp_meta.evidence import Evidence
from pytest_fsdp_meta.judging.registry import OBSERVATIONS
from pytest_fsdp_meta.trial import LoaderFailed
from pytest_fsdp_meta.trial.observations import NOTHING_FROZEN, ONE_LOAD, with_needed
from pytest_fsdp_meta.trial.reloading import MORE_LOADS
from pytest_fsdp_meta.worlds import Rank
from tests.checks.evidence_factory import findings_of
from tests.trial_help import batch, build, judge_all, loss, observe

TRAINABLE, PARITY = "requires_grad_matches_reference", "loss_parity"
TRAINED = [check.id for check in built_in() if "training" in check.needs]


def subject(fsdp: Rank, freeze: bool, **declared: Any) -> Subject:
    """Return a sharded model, with its first layer frozen or not."""
    model = build()
    model[0].requires_grad_(not freeze)
    fully_shard(model[0], mesh=fsdp.mesh)
    fully_shard(model, mesh=fsdp.mesh)
    return Subject(model, reference=build, batch=batch, loss=loss, **declared)


OBSERVED = {"inventory", "reference", "values", "verifier", "training"}


def judged(function: Callable[[Rank], Subject]) -> dict[str, Verdict]:
    return judge_all(observed(function), [check.id for check in built_in() if {*check.needs} <= OBSERVED])


def wrong(verdicts: dict[str, Verdict]) -> dict[str, tuple[str, str]]:
    return {id: (found.status, found.reason) for id, found in verdicts.items() if found.status in ("failed", "error")}


def observed(function: Callable[[Rank], Subject]) -> Evidence:
    return observe(function, wanted=OBSERVED)


@pytest.mark.parametrize(
    ("freeze", "declared", "actual", "expected"),
    [(True, {}, "frozen", "trainable"), (False, {"frozen": "0.*"}, "trainable", "frozen, as declared")],
    ids=["frozen and not declared", "declared and not frozen"],
)
def test_parameters_that_are_not_frozen_as_declared_are_found(freeze, declared, actual, expected):
    verdicts = judged(lambda fsdp: subject(fsdp, freeze, **declared))
    assert findings_of(verdicts[TRAINABLE]) == [(name, (0, 1), actual, expected, "") for name in ("0.weight", "0.bias")]
    assert verdicts[PARITY].status == "passed", "the reference trains what the ranks train"


@pytest.mark.parametrize(
    ("text", "alone", "status"),
    [
        ("the gradient of 0.weight is None", True, "error"),
        ("the gradient of 0.weight is None", False, "skipped"),
    ],
    ids=["the reference names a tensor", "the ranks name a tensor"],
)
def test_an_exception_of_the_author_is_an_error_unless_it_names_a_tensor_of_a_finding(text, alone, status):
    def raising(model: nn.Module, rows: dict[str, Tensor]) -> Tensor:
        if alone or torch.distributed.get_world_size() > 1:
            raise ValueError(text)
        return loss(model, rows)

    def loader(fsdp):
        model = subject(fsdp, freeze=False).model
        return Subject(model, reference=build, batch=batch, loss=raising, frozen="0.*")

    verdicts = judged(loader)
    assert verdicts[TRAINABLE].status == "failed"
    raised = f"{'the reference' if alone else 'ranks 0, 1'} raised ValueError in Subject(loss=...): {text}"
    explained = f", which the findings of {TRAINABLE} explain; fix those first" * (status == "skipped")
    assert {(found.status, found.reason) for id, found in verdicts.items() if id in TRAINED[1:]} >= {
        (status, raised + explained)
    }
    assert verdicts[PARITY].status == status


def failing() -> nn.Module:
    print("looking for the verifier")
    raise FileNotFoundError("verifier.safetensors")


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (
            {"frozen": {"0.*": "00.*"}},
            "Subject(frozen=...): the verifier has no tensor '00.weight' (for '0.weight'); the nearest is '0.weight'",
        ),
        ({"frozen": "0.*", "verifier": failing}, "the verifier raised FileNotFoundError: verifier.safetensors"),
    ],
    ids=["a typo", "a verifier that raises"],
)
def test_a_wrong_verifier_affects_its_own_check_only(declared, reason):
    def loader(fsdp):
        return subject(fsdp, freeze=True, **declared)

    verdicts = judged(loader)
    assert wrong(verdicts) == {"frozen_weights_equal_verifier": ("error", reason)}
    if declared.get("verifier") is failing:
        assert "output of the verifier:\nlooking for the verifier" in verdicts["frozen_weights_equal_verifier"].detail
    assert verdicts[PARITY].status == "passed"


def test_a_verifier_of_nothing_is_an_error():
    verdicts = judged(lambda fsdp: subject(fsdp, freeze=False, verifier=failing))
    assert wrong(verdicts) == {"frozen_weights_equal_verifier": ("error", NOTHING_FROZEN)}


def test_gradients_of_a_warm_up_are_not_added_to_the_first_step():
    def loader(fsdp):
        warm = subject(fsdp, freeze=False)
        loss(warm.model, batch(0)).backward()
        return warm

    assert judged(loader)[PARITY].status == "passed"


def test_a_rank_that_ends_in_training_affects_training_checks_only():
    def loader(fsdp):
        return Subject(subject(fsdp, freeze=False).model, reference=build, batch=batch, loss=dying_on_two)

    verdicts = judged(loader)
    assert wrong(verdicts) == dict.fromkeys(TRAINED, ("error", "ranks 0, 1 exited with code 5 before it answered"))


def dying_on_two(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    import os

    if torch.distributed.get_world_size() == 2:
        os._exit(5)
    return loss(model, batch)


def wrong_batch(step: int) -> dict[str, Tensor]:
    raise KeyError(step)


def detached(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return loss(model, batch).detach()


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ({"batch": wrong_batch}, "the reference raised KeyError in Subject(batch=...), batch(0): 0"),
        (
            {"optimizer": lambda: 1},
            "Subject(optimizer=...): give a function that can be called as optimizer(parameters); <lambda>() takes 0 "
            "positional arguments but 1 was given",
        ),
        (
            {"batch": lambda: None},
            "Subject(batch=...): give a function that can be called as batch(step); <lambda>() takes 0 positional "
            "arguments but 1 was given",
        ),
        (
            {"loss": lambda model: 1},
            "Subject(loss=...): give a function that can be called as loss(model, batch); <lambda>() takes 1 "
            "positional argument but 2 were given",
        ),
        (
            {"clip_grad_norm": lambda parameters: 1},
            "Subject(clip_grad_norm=...): give a function that can be called as clip_grad_norm(parameters, max_norm); "
            "<lambda>() takes 1 positional argument but 2 were given",
        ),
        (
            {"clip_grad_norm": lambda model, bound: model.parameters()},
            "ranks 0, 1 raised AttributeError in Subject(clip_grad_norm=...), called as clip_grad_norm(parameters, "
            "max_norm): 'list' object has no attribute 'parameters'",
        ),
        (
            {"loss": detached},
            "Subject(loss=...): the returned loss has no gradient: it is detached or was computed under no_grad",
        ),
        (
            {"loss": None},
            "Subject(loss=...): model(**batch) returned Tensor without a .loss; put labels into the batch or declare "
            "loss=lambda model, batch: ...",
        ),
    ],
    ids=["batch", "optimizer", "batch without step", "loss", "clip", "clip of a model", "detached", "no loss"],
)
def test_errors_in_declared_functions_name_the_field(declared, reason):
    def loader(fsdp):
        return Subject(
            subject(fsdp, freeze=False).model, **{"reference": build, "batch": batch, "loss": loss, **declared}
        )

    verdicts = judged(loader)
    assert wrong(verdicts) == dict.fromkeys(TRAINED, ("error", reason))


class NeedsArgument(torch.optim.SGD):
    def __init__(self, parameters: Any, more: int) -> None:
        super().__init__(parameters, lr=more)


def with_required_argument(model: nn.Module) -> torch.optim.Optimizer:
    return NeedsArgument(model.parameters(), more=1)


def holding_a_lock(model: nn.Module) -> torch.optim.Optimizer:
    import threading

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0]["lock"] = threading.Lock()
    return optimizer


def with_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[Rank], Subject]:
    def loader(fsdp):
        model = subject(fsdp, freeze=False).model
        return Subject(model, reference=build, batch=batch, loss=loss, optimizer=make(model))

    return loader


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (with_required_argument, "TypeError: NeedsArgument.__init__() missing 1 required positional argument: 'more'"),
        (holding_a_lock, "TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_an_optimizer_that_cannot_be_rebuilt_affects_training_checks_only(make, why):
    verdicts = judged(with_optimizer(make))
    wrong = {id: (found.status, found.reason) for id, found in verdicts.items() if found.status in ("failed", "error")}
    reason = (
        f"the reference cannot build the same optimizer ({why}); declare a callable: optimizer=lambda parameters: ... "
        "(the loader's own optimizer is then not judged)"
    )
    assert wrong == dict.fromkeys(TRAINED, ("error", f"Subject(optimizer=...): {reason}"))


class Verified(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.verifier = Rotating(offset)


class Rotating(nn.Module):
    """A module with a frozen weight that is in the checkpoint, and a buffer that is not."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.register_buffer("angles", torch.arange(2.0) + offset, persistent=False)


@pytest.mark.parametrize(
    ("frozen", "field", "offset", "wrong"),
    [
        ("verifier.*", "verifier", 0.0, {}),
        ("verifier.*", "reference", 0.0, {}),
        ("verifier.*", "verifier", 1.0, {"buffers_equal_reference": "failed"}),
        ("verifier.angles", "verifier", 0.0, {"frozen_weights_equal_verifier": "error"}),
    ],
)
def test_a_frozen_pattern_with_a_checkpoint(tmp_path, frozen, field, offset, wrong):
    save_file({"verifier.weight": torch.arange(4.0)}, tmp_path / "model.safetensors")
    sources = {"reference": Verified, field: tmp_path}

    def loader(fsdp):
        model = Verified(offset)
        fully_shard(model, mesh=fsdp.mesh)
        return Subject(model, frozen=frozen, **sources)

    verdicts = judged(loader)
    assert {id: v.status for id, v in verdicts.items() if v.status in ("failed", "error")} == wrong
    if not wrong:
        assert verdicts["frozen_weights_equal_verifier"].status == "passed"


class Odd(nn.Module):
    """A layer with rare kinds of buffers: expanded, conjugated, complex128, large integers, packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("token_type_ids", torch.zeros(1, 8, dtype=torch.long).expand(4, 8), persistent=False)
        self.register_buffer("counts", torch.zeros(1, 2).expand(3, 2))
        self.register_buffer("frequencies", torch.polar(torch.ones(4), torch.arange(4.0)).conj(), persistent=False)
        self.register_buffer("precise", torch.tensor([1e-300 + 2j, 3.0], dtype=torch.complex128))
        self.register_buffer("large", torch.tensor([2**60 + 1]))
        self.register_buffer("packed", torch.arange(4, dtype=torch.uint8).view(torch.float8_e4m3fn))

    def forward(self, input: Tensor) -> Tensor:
        self.counts[:1] += 1.0  # a buffer that training changes
        return self.layer(input) * self.frequencies.real * self.counts[0, 0]


def test_odd_buffers_are_recorded_compared_and_restored():
    def loader(fsdp):
        model = Odd()
        fully_shard(model, mesh=fsdp.mesh)
        return Subject(model, reference=Odd, batch=batch, loss=loss)

    verdicts = judged(loader)
    assert wrong(verdicts) == {}
    assert {verdicts[id].status for id in (PARITY, "buffers_equal_reference")} == {"passed"}


def build_marked() -> nn.Sequential:
    model = build()
    model[0].weight._whole = True
    return model


def keeping_attribute(attribute: str, mark: bool = False, **sources: Any) -> Callable[[Rank], Subject]:
    def loader(fsdp):
        model = subject(fsdp, freeze=False).model
        if mark:
            model[0].weight._whole = True
        return Subject(model, kept_attributes=[attribute], **sources)

    return loader


@pytest.mark.parametrize("declared", [{"reference": build_marked}, {"mark": True, "reference": build}])
def test_an_attribute_of_any_parameter_is_accepted(declared):
    assert observed(keeping_attribute("_whole", **declared)).subject.kept_attributes == ("_whole",)


@pytest.mark.parametrize(
    ("declared", "where"),
    [
        ({"mark": True, "reference": build_marked}, "the model or the reference"),
        ({"mark": True, "reference": "checkpoint"}, "the model"),
    ],
    ids=["reference", "checkpoint"],
)
def test_an_attribute_that_no_parameter_has_is_an_error(tmp_path, declared, where):
    if declared.get("reference") == "checkpoint":
        save_file(build().state_dict(), tmp_path / "model.safetensors")
        declared = declared | {"reference": tmp_path}
    with pytest.raises(LoaderFailed) as caught:
        observed(keeping_attribute("_hole", **declared))
    summary = f"Subject(kept_attributes=...): no tensor of {where} has '_hole'; the nearest is '_whole'"
    assert caught.value.summary == summary


def test_an_unknown_attribute_without_a_similar_name():
    with pytest.raises(LoaderFailed) as caught:
        observed(keeping_attribute("zzz", mark=True))
    assert caught.value.summary == (
        "Subject(kept_attributes=...): no tensor of the model has 'zzz'; it has 1 custom attribute: '_whole'"
    )


ROWS = (*ONE_LOAD, *MORE_LOADS)
"""The tables of observations."""


def test_every_observation_has_a_row():
    """The inventory comes with the load, the simulation is another trial, and two serve others only."""
    names = [row.name for row in ROWS]
    assert sorted([*names, "inventory", "simulation"]) == sorted([*OBSERVATIONS, "kept", "trained"])


def test_rows_follow_those_that_they_need_or_use():
    names = [row.name for row in ROWS]
    assert all(names.index(other) < index for index, row in enumerate(ROWS) for other in (*row.needs, *row.uses))


def test_what_an_observation_needs_is_taken_too():
    assert with_needed({"restored_again"}, ROWS) == {"restored_again", "saved_again", "continued", "state_dict"}
    assert with_needed({"resharded"}, ROWS) == {"resharded", "kept", "state_dict", "reference"}
    assert with_needed({"memory"}, ROWS) == {"memory"}


class Tied(nn.Module):
    """A head that is the embedding; the forward uses the embedding in its place."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input: Tensor) -> Tensor:
        return self.embedding(input) @ self.embedding.weight


def tied_in_two_groups(fsdp: Rank) -> Subject:
    model = Tied()
    fully_shard(model.head, mesh=fsdp.mesh)
    return Subject(fully_shard(model, mesh=fsdp.mesh), reference=Tied, batch=batch, loss=loss)


def came_apart(fsdp: Rank) -> Subject:
    """torch has no state to save of a head without a gradient, and refuses to load it."""
    model = Tied(tied=False)
    model.head.load_state_dict(model.embedding.state_dict())
    model = fully_shard(model, mesh=fsdp.mesh)
    declared = {"optimizer": torch.optim.AdamW, "save": save_by_torch, "resume": resume_by_torch}
    return Subject(model, reference=Tied, batch=batch, loss=loss, **declared)


def save_by_torch(model: nn.Module, optimizer: Any, folder: str) -> None:
    dcp.save(state_of(model, optimizer), checkpoint_id=folder)


def resume_by_torch(model: nn.Module, optimizer: Any, folder: str) -> None:
    dcp.load(state_of(model, optimizer), checkpoint_id=folder)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer or []), strict=True))


@pytest.mark.parametrize("loader", [tied_in_two_groups, came_apart])
def test_a_tie_that_came_apart_is_told_once(loader):
    verdicts = judge_all(observe(loader, built_in().ids()), built_in().ids())
    assert wrong(verdicts) == {"tied_weights_share_storage": ("failed", "")}
    raised = [found for found in verdicts.values() if " raised " in found.reason and "explain; fix" in found.reason]
    assert len(raised) > 3
    assert {found.by for found in raised} == {("tied_weights_share_storage",)}
