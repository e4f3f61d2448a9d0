"""Test the observations that need more than one load, on real ranks: results, failures and their messages."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from fixtures.forms_beside import torch_states
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.evidence import Unavailable
from pytest_fsdp_meta.trial import LoaderFailed
from pytest_fsdp_meta.trial.giving import other_size
from pytest_fsdp_meta.worlds import Rank, WorldSpec
from tests.trial_help import batch, build, judge_all, loss, observe
from tests.world_help import is_running

REPEATABLE, NAMES, ROUND_TRIP = "load_is_repeatable", "state_dict_names_clean", "dcp_round_trip"
RESHARDS, EXPORTS = "dcp_reshards", "full_state_dict_exports"
OPTIMIZER, RESUME, AGAIN = "optimizer_state_round_trip", "resume_parity", "second_save_is_current"
ALL = (REPEATABLE, NAMES, ROUND_TRIP, RESHARDS, EXPORTS, OPTIMIZER, RESUME, AGAIN)
SAVING = (ROUND_TRIP, RESHARDS, OPTIMIZER, RESUME, AGAIN)


def sharded(fsdp: Rank, model: nn.Module) -> nn.Module:
    for module in model:
        fully_shard(module, mesh=fsdp.mesh)
    return fully_shard(model, mesh=fsdp.mesh)


def declared(fsdp: Rank, model: nn.Module, build: Callable[[], nn.Module] = build, **fields: Any) -> Subject:
    return Subject(sharded(fsdp, model), **{"reference": build, "batch": batch, "loss": loss, **fields})


def judged(
    function: Callable[..., Any], checks: Collection[str] = ALL, timeout: float = 60, **arguments: Any
) -> dict[str, Verdict]:
    """Return the verdicts of these checks; only the observations that they read are taken."""
    evidence = observe(function, checks, timeout=timeout, arguments=arguments)
    return judge_all(evidence, checks)


def statuses(verdicts: dict[str, Verdict]) -> dict[str, str]:
    return {id: found.status for id, found in verdicts.items()}


def for_torch(model: nn.Module, optimizer: Any, folder: Path) -> None:
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)


def from_torch(model: nn.Module, optimizer: Any, folder: Path) -> None:
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)


def plain(parameters: Iterable[nn.Parameter], lr: float = 0.1) -> torch.optim.Optimizer:
    """Return an optimizer without state."""
    return torch.optim.SGD(parameters, lr=lr, foreach=False)


def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    # The saved state has torch's own names, whatever a hook of the model makes of them.
    tensors = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
    torch.save([tensors, optimizer and optimizer.state_dict()], folder / f"{torch.distributed.get_rank()}.pt")


def resume(model: nn.Module, optimizer: Any, folder: Path) -> None:
    # The checkpoint has DTensors in the optimizer's state.
    tensors, state = torch.load(folder / f"{torch.distributed.get_rank()}.pt", weights_only=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.to_local().copy_(tensors[name])
    if optimizer is not None:
        optimizer.load_state_dict(state)


class Scaled(nn.Module):
    """A layer that shares a module with a non-persistent buffer, as decoder layers share torchtune's rotary one."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 4), shared

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input) * self.shared.scale


def test_a_reference_that_cannot_be_trained_is_built_again_for_the_export():
    verdicts = judged(lambda fsdp: declared(fsdp, build(), loss=lambda model: 0.0), (EXPORTS, "loss_parity"))
    assert statuses(verdicts) == {EXPORTS: "passed", "loss_parity": "error"}
    assert verdicts["loss_parity"].reason == (
        "Subject(loss=...): give a function that can be called as loss(model, batch); <lambda>() takes 1 positional "
        "argument but 2 were given"
    )


def test_wrong_values_that_torch_saves_and_gathers_of_fsdp1():
    def doubled(module, state, prefix, *_):
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]

    def loader(fsdp):
        model = build()
        model[1].register_state_dict_post_hook(doubled)
        sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=fsdp.device)
        return Subject(sharded, reference=build, batch=batch, loss=loss)

    verdicts = judged(loader, (ROUND_TRIP, EXPORTS))
    found = {id: [(f.tensor, f.actual) for f in verdicts[id].findings] for id in verdicts}
    assert found == {
        ROUND_TRIP: [("1.weight", "different values after loading")],
        EXPORTS: [("1.weight", "different values in the gathered state dict")],
    }


class LowRank(nn.Module):
    """A linear layer with an adapter beside it, whose weight an export has merged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((4, 4), (2, 4), (4, 2)))

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight + 2 * self.b @ self.a)


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(LowRank(), LowRank())


def merged(model: nn.Module) -> dict[str, Tensor]:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    exact = {name: tensor.double() for name, tensor in state.items()}  # rounds in another place than the reference
    return {f"{i}.weight": (exact[f"{i}.weight"] + 2 * exact[f"{i}.b"] @ exact[f"{i}.a"]).float() for i in "01"}


def merged_model() -> nn.Module:
    layers: Any = adapted()
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in layers))
    with torch.no_grad():
        for layer, linear in zip(layers, model, strict=True):
            linear.weight.copy_(layer.weight + 2 * layer.b @ layer.a)
    return model


@pytest.mark.parametrize("change", [None, {"1.weight": torch.zeros(5, 4)}, {"0.a": torch.zeros(2, 4)}])
@pytest.mark.parametrize("on_disk", [False, True])
def test_an_export_that_is_not_the_model_has_its_own_reference(change, on_disk, tmp_path):
    source: Any = merged_model
    if on_disk:
        source = tmp_path
        save_file(merged_model().state_dict(), tmp_path / "model.safetensors")

    def loader(fsdp):
        def exported(model):
            return merged(model) | (change or {})

        return declared(fsdp, adapted(), adapted, state_dict=exported, export_reference=source)

    verdicts = judged(loader, [NAMES, EXPORTS])
    assert verdicts[NAMES].status == "passed"
    findings = [(f.tensor, f.actual, f.expected) for f in verdicts[EXPORTS].findings]
    shape = "shape (5, 4) in the gathered state dict", "(4, 4), as in Subject(export_reference=...)"
    extra = "extra key in the gathered state dict: Subject(export_reference=...) has no such key", ""
    assert findings == [(name, *(shape if name == "1.weight" else extra)) for name in change or ()]


@pytest.mark.parametrize("on_disk", [False, True])
def test_an_export_without_a_model_to_compare_with_is_compared_as_loaded(on_disk, tmp_path):
    """As PEFT saves: adapters alone, by name."""

    def adapters(model: nn.Module) -> dict[str, Tensor]:
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {f"base.{name}": value for name, value in whole.items() if "weight" not in name}

    source: Any = lambda: adapters(adapted())  # noqa: E731
    if on_disk:
        source = tmp_path
        save_file(adapters(adapted()), tmp_path / "model.safetensors")

    def loader(fsdp, wrong=False):
        def exported(model):
            return {name: value * 2 if wrong else value for name, value in adapters(model).items()}

        sgd = partial(torch.optim.SGD, lr=1e-6)
        return declared(fsdp, adapted(), adapted, state_dict=exported, export_reference=source, optimizer=sgd)

    verdict = judged(loader, [EXPORTS])[EXPORTS]
    assert (verdict.status, verdict.reason[:37]) == ("passed", "the export is compared as loaded; whe")
    found = judged(partial(loader, wrong=True), [EXPORTS])[EXPORTS].findings
    assert {finding.tensor for finding in found} == set(adapters(adapted()))


def test_an_export_without_what_its_reference_adds_has_the_models_own_values():
    def own(model: nn.Module) -> dict[str, Tensor]:
        return {f"{i}.weight": model.get_parameter(f"{i}.weight").full_tensor() for i in "01"}  # type: ignore[attr-defined]

    def loader(fsdp):
        return declared(fsdp, adapted(), adapted, state_dict=own, export_reference=merged_model)

    findings = judged(loader, [EXPORTS])[EXPORTS].findings
    assert [finding.tensor for finding in findings] == ["0.weight", "1.weight"]
    assert all(finding.cause.startswith("the export has the model's own values") for finding in findings)


def test_of_a_tie_in_an_export_reference_one_name_is_enough():
    def tied() -> nn.Module:
        model = adapted()
        model[1].weight = model[0].weight
        return model

    def loader(fsdp):
        return declared(fsdp, adapted(), adapted, state_dict=lambda model: first_of_a_tie(model), export_reference=tied)

    def first_of_a_tie(model):
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: value for name, value in whole.items() if name != "1.weight"}

    assert judged(loader, [EXPORTS])[EXPORTS].status == "passed"


@pytest.mark.parametrize("by", ["state_dict", "save"])
def test_frozen_weights_that_are_merged_and_unmerged_are_rounded(by):
    """As modelscope/ms-swift#10154: what is added and subtracted again leaves rounding, at each call."""

    @torch.no_grad()
    def merging(model, *_):
        for sign in (1, -1):
            for layer in model:
                layer.weight.add_(1 / 3, alpha=sign)
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

    def save(model, optimizer, folder):
        for_torch(model, optimizer, folder)
        merging(model)

    def loader(fsdp):
        model = build()
        for layer in model:
            layer.weight.requires_grad_(False)
        with_author = {"state_dict": merging} if by == "state_dict" else {"save": save, "resume": from_torch}
        return declared(fsdp, model, **with_author, batch=None)

    check = EXPORTS if by == "state_dict" else ROUND_TRIP
    found = [finding for finding in judged(loader, [check])[check].findings if "itself changes" in finding.actual]
    assert {finding.tensor for finding in found} == {"0.weight", "1.weight"}


def test_an_export_reference_that_raises_is_named():
    def failing() -> nn.Module:
        raise FileNotFoundError("merged.safetensors")

    def loader(fsdp):
        return declared(fsdp, adapted(), adapted, state_dict=merged, export_reference=failing)

    verdict = judged(loader, [EXPORTS])[EXPORTS]
    reason = "the export_reference raised FileNotFoundError: merged.safetensors"
    assert (verdict.status, verdict.reason) == ("error", reason)


def test_a_divide_factor_needs_another_reduction_on_gloo():
    def loader(fsdp):
        found = declared(fsdp, build())
        for module in found.model:
            module.set_gradient_divide_factor(3.0)
        return found

    verdict = judged(loader, ["grad_parity"])["grad_parity"]
    assert verdict.reason.endswith("call set_force_sum_reduction_for_comms(True) on every FSDP module, too")


def test_a_bare_model_is_saved_and_loaded():
    verdicts = judged(lambda fsdp: sharded(fsdp, build()))
    reasons = {id: found.reason for id, found in verdicts.items() if found.status == "skipped"}
    assert reasons == {
        NAMES: "Subject(reference=...) is not declared",
        RESHARDS: "Subject(reference=...) is not declared",
        EXPORTS: "Subject(reference=...) is not declared",
        OPTIMIZER: "Subject(batch=...) is not declared",
        RESUME: "Subject(batch=...) is not declared",
        AGAIN: "Subject(batch=...) is not declared",
    }
    assert {verdicts[id].status for id in (REPEATABLE, ROUND_TRIP)} == {"passed"}


class Counted(nn.Module):
    """A module with extra state, which has a tensor, and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.seen = 0

    def forward(self, input: Tensor) -> Tensor:
        self.seen += 1
        return input * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "scales": [torch.full((2,), float(self.seen))]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def build_counted() -> nn.Sequential:
    return nn.Sequential(*build(), Counted())


def frozen_first(fsdp: Rank, **fields: Any) -> Subject:
    model = build()
    model[0].requires_grad_(False)
    return declared(fsdp, model, frozen="0.*", **fields)


def test_an_author_may_save_trained_parameters_only():
    def save(model, optimizer, folder):
        own = {name: p.to_local().clone() for name, p in model.named_parameters() if p.requires_grad}
        torch.save((own, optimizer and optimizer.state_dict()), folder / f"{torch.distributed.get_rank()}.pt")

    def resume(model, optimizer, folder):
        own, state = torch.load(folder / f"{torch.distributed.get_rank()}.pt", weights_only=False)
        with torch.no_grad():
            for name, value in own.items():
                model.get_parameter(name).to_local().copy_(value)
        if optimizer is not None:
            optimizer.load_state_dict(state)

    verdicts = judged(lambda fsdp: frozen_first(fsdp, save=save, resume=resume), (ROUND_TRIP, OPTIMIZER, RESUME))
    assert statuses(verdicts) == dict.fromkeys(verdicts, "passed")


def test_resuming_needs_no_more_batches_than_training():
    def few(step: int) -> dict[str, Tensor]:
        return [batch(0), batch(1), batch(2)][step]

    verdicts = judged(lambda fsdp: declared(fsdp, build(), batch=few), (RESUME,))
    assert verdicts[RESUME].status == "passed"


class Idle(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return input


def idle() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Idle(4, 4))


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def test_a_gradient_on_one_rank_only_cannot_be_loaded_by_torch():
    def loader(fsdp: Rank) -> Subject:
        model = nn.Sequential(nn.Linear(4, 4), (Idle if fsdp.rank else nn.Linear)(4, 4))
        return Subject(model, batch=batch, loss=loss)

    reason = judged(loader, (OPTIMIZER,))[OPTIMIZER].reason
    assert reason.startswith("1.bias got a gradient on rank 0 and none on rank 1, so the optimizer has state for it")


def test_nothing_to_train():
    def loader(fsdp):
        return declared(fsdp, build().requires_grad_(False), build=lambda: build().requires_grad_(False))

    found = judged(loader)
    assert {id: one.reason for id, one in found.items() if one.status != "passed"} == dict.fromkeys(
        (OPTIMIZER, RESUME, AGAIN), "nothing is trainable, so there is no optimizer"
    )


def test_a_loader_that_runs_only_once(tmp_path):
    def loader(fsdp, folder):
        print("the loader runs")
        (Path(folder) / f"rank{fsdp.rank}").mkdir()
        return declared(fsdp, build())

    found = judged(loader, folder=tmp_path)
    assert {id for id, one in found.items() if one.status == "passed"} == {NAMES}
    assert found[REPEATABLE].status == "error"
    assert " of the second load raised FileExistsError: " in found[REPEATABLE].reason
    assert found[REPEATABLE].detail.startswith(
        "the loader succeeded once, and failed when it ran again in a fresh world with the same fixtures:\n\nrank"
    )
    assert "output of rank 1 of the second load:\nthe loader runs" in found[REPEATABLE].detail


def test_the_first_load_has_ended_when_the_loader_runs_again(tmp_path):
    def load(fsdp: Rank) -> Subject:
        running = [path.name for path in tmp_path.glob(f"{fsdp.rank}-*") if is_running(int(path.suffix[1:]))]
        assert not running, f"{running} of an earlier load still runs"
        Path(tmp_path, f"{fsdp.rank}-of-{fsdp.world_size}.{os.getpid()}").touch()
        return declared(fsdp, build())

    verdicts = judged(load)
    assert [check for check, verdict in verdicts.items() if verdict.status != "passed"] == []
    assert len(list(tmp_path.iterdir())) == 2 + 2 + 1  # a load, a second one, and one in a world of another size


def test_a_loader_for_one_world_size_only():
    def loader(fsdp):
        assert fsdp.world_size == 2, "made for two"
        return declared(fsdp, build())

    found = judged(loader)
    assert {id for id, one in found.items() if one.status == "passed"} == set(ALL) - {RESHARDS}
    assert (found[RESHARDS].status, found[RESHARDS].why) == ("skipped", "partly checked")
    assert found[RESHARDS].reason.startswith("the loader fails in a world of 1 (dp_shard=1): ")
    assert "made for two" in found[RESHARDS].reason


def test_a_resume_that_needs_the_optimizer_gets_it_where_it_was_saved():
    def resume(model, optimizer, folder):
        from_torch(model, optimizer, folder)
        optimizer.state.clear()

    found = judged(lambda fsdp: declared(fsdp, build(), save=for_torch, resume=resume), (ROUND_TRIP, RESHARDS, RESUME))
    assert [found[id].status for id in (ROUND_TRIP, RESHARDS)] == ["passed", "passed"]
    model_alone = {"save": for_torch, "resume": resume, "batch": None, "loss": None}
    found = judged(lambda fsdp: declared(fsdp, build(), **model_alone), (RESHARDS,))
    assert found[RESHARDS].status == "error"
    assert "'NoneType' object has no attribute 'state'" in found[RESHARDS].reason


def test_an_optimizer_that_another_world_size_refuses():
    def refusing(model, optimizer, folder):
        if optimizer is not None and torch.distributed.get_world_size() == 1:
            raise ValueError("the optimizer was saved in another world")
        from_torch(model, optimizer, folder)

    found = judged(lambda fsdp: declared(fsdp, build(), save=for_torch, resume=refusing), (ROUND_TRIP, RESHARDS))
    assert statuses(found) == {ROUND_TRIP: "passed", RESHARDS: "failed"}
    raised = "ValueError in Subject(resume=...): the optimizer was saved in another world"
    assert [(one.tensor, one.ranks, one.actual) for one in found[RESHARDS].findings] == [
        (None, (0,), f"loading the optimizer in a world of 1 raises {raised}")
    ]


WHOLE = StateDictOptions(full_state_dict=True)


def whole_tensors(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    states = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"].items() if optimizer else ()
    momenta = {f"momentum of {name}": state["momentum_buffer"] for name, state in states}
    return {**get_model_state_dict(model, options=WHOLE), **momenta}


@pytest.mark.parametrize("how", ["loaded", "refused", "removed", "never saved over"])
def test_files_that_a_larger_world_left_in_the_folder(how):
    """Each rank saves its rows with the number of the first one, and resume() puts all files together."""

    def save(model, optimizer, folder):
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if how == "removed" and rank == 0:
            shutil.rmtree(folder)
            folder.mkdir()
        if how == "never saved over" and any(folder.iterdir()):
            raise FileExistsError(folder)
        torch.distributed.barrier()
        split = {name: value.tensor_split(ranks) for name, value in whole_tensors(model, optimizer).items()}
        own = {name: (sum(map(len, parts[:rank])), parts[rank].clone()) for name, parts in split.items()}
        torch.save((ranks, own), folder / f"{rank}.pt")
        torch.distributed.barrier()

    def resume(model, optimizer, folder):
        files, whole = [torch.load(path) for path in sorted(folder.iterdir())], whole_tensors(model, optimizer)
        if how == "refused" and len(files) != files[0][0]:
            raise ValueError(f"{len(files)} files of {files[0][0]} ranks")
        for _, own in files:
            for name, (first, rows) in own.items():
                whole[name][first : first + len(rows)] = rows
        set_model_state_dict(model, {name: whole[name] for name in model.state_dict()}, options=WHOLE)
        if optimizer:
            state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
            for name, own_state in state["state"].items():
                own_state["momentum_buffer"] = whole[f"momentum of {name}"]
            set_optimizer_state_dict(model, optimizer, state, options=WHOLE)

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=resume), SAVING)
    if how in ("loaded", "refused"):
        over = "in a world of 1 that has saved over a checkpoint of a world of 2"
        actual = {finding.actual.partition(" raises ")[0] for finding in found[RESHARDS].findings}
        values = {f"different values {over}", f"different momentum_buffer {over}"}
        assert actual == (values if how == "loaded" else {f"loading the checkpoint {over}"})
        assert {finding.cause for finding in found.pop(RESHARDS).findings} == {
            "files of the larger world that the smaller one does not replace stay in the folder, and are loaded"
        }
    assert statuses(found) == dict.fromkeys(found, "passed")


def test_a_pickled_model_brings_its_mesh_along():
    def save(model, optimizer, folder):
        torch.save(model.state_dict(), folder / f"{torch.distributed.get_rank()}.pt")

    def resume(model, optimizer, folder):
        own = torch.load(folder / f"{torch.distributed.get_rank()}.pt", weights_only=False)
        model.load_state_dict(own, assign=True)

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=resume, batch=None), (RESHARDS,))[RESHARDS]
    assert {(one.ranks, one.actual, one.expected) for one in found.findings} == {
        ((0,), "a DTensor on a mesh of another world", "on the mesh of a world of 1")
    }


def test_each_rank_may_pickle_whole_tensors():
    def save(model, optimizer, folder):
        states = [get_model_state_dict(model, options=WHOLE)]
        states += [] if optimizer is None else [get_optimizer_state_dict(model, optimizer, options=WHOLE)]
        torch.save(states, folder / f"{torch.distributed.get_rank()}.pt")

    def resume(model, optimizer, folder):
        states = torch.load(folder / f"{torch.distributed.get_rank()}.pt")
        set_model_state_dict(model, states[0], options=WHOLE)
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, states[1], options=WHOLE)

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=resume, optimizer=adam), SAVING)
    assert statuses(found) == dict.fromkeys(SAVING, "passed")


def test_what_diverges_in_training_was_saved_by_one_of_the_ranks():
    """torch saves a tensor that is on all ranks from any of them."""

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            for name in ("first", "second", "third"):
                self.register_buffer(name, torch.zeros(64))  # each rank saves some

        def forward(self, input):
            for buffer in self.buffers():
                buffer += 1.0 + torch.distributed.get_rank()
            return super().forward(input)

    def build_counting():
        torch.manual_seed(0)
        return nn.Sequential(Counting(), nn.Linear(4, 2))

    def loader(fsdp):
        return declared(fsdp, build_counting(), build_counting)

    assert judged(loader, (RESHARDS,))[RESHARDS].status == "passed"


def test_a_hanging_save_fails_only_the_checks_that_need_it():
    def save(model, optimizer, folder):
        if torch.distributed.get_rank() == 0:
            torch.distributed.barrier()

    def resume(model, optimizer, folder):
        time.sleep(0)

    found = judged(
        lambda fsdp: declared(fsdp, build(), save=save, resume=resume),
        (*ALL, "params_equal_reference", "loss_parity"),
        timeout=8,
    )
    passed = {REPEATABLE, NAMES, EXPORTS, "params_equal_reference", "loss_parity"}
    assert {id for id, one in found.items() if one.status == "passed"} == passed
    assert {id: one.status for id, one in found.items() if id not in passed} == dict.fromkeys(SAVING, "error")
    assert re.match(r"rank 0 hung in barrier, test_reloading.py:\d+; ", found[ROUND_TRIP].reason)


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["hangs", "ends"])
def test_saving_that_hangs_or_ends_a_rank_is_not_retried(tmp_path, how):
    def save(model, optimizer, folder):
        (tmp_path / f"{folder.name} of rank {torch.distributed.get_rank()}").touch()
        if how == "hangs":
            torch.distributed.barrier()
            time.sleep(60)
        os._exit(3)

    def resume(model, optimizer, folder):
        raise AssertionError("nothing was saved")

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=resume), SAVING, timeout=8)
    assert statuses(found) == dict.fromkeys(SAVING, "error")
    message = (
        "ranks 0, 1 hung in save, test_reloading.py:" if how == "hangs" else "exited with code 3 before it answered"
    )
    assert all(message in one.reason for one in found.values())
    assert found[ROUND_TRIP].detail.startswith("saving hung or ended a rank, and is not tried again:\n\nrank")
    assert {path.name.partition(" ")[0] for path in tmp_path.iterdir()} == {"continued"}


@pytest.mark.nightly
def test_a_checkpoint_that_cannot_be_loaded_is_not_tried_a_second_time(tmp_path):
    def resume(model, optimizer, folder):
        (tmp_path / f"{folder.name} of rank {torch.distributed.get_rank()}").touch()
        time.sleep(60)

    found = judged(
        lambda fsdp: declared(fsdp, build(), save=for_torch, resume=resume), (OPTIMIZER, RESUME, AGAIN), timeout=8
    )
    assert statuses(found) == dict.fromkeys((OPTIMIZER, RESUME, AGAIN), "error")
    assert {path.name.partition(" ")[0] for path in tmp_path.iterdir()} == {"continued"}


@pytest.mark.parametrize("how", ["a future", "a thread", "a process", "a daemon", "beside a dead proxy"])
def test_what_a_save_leaves_running_ends_before_it_is_loaded(how):
    """As when a process exits, which waits for all but daemons.

    A weakref.proxy whose object is gone raises when it is asked what it is an instance of.
    """
    writers = []

    def in_background(model, optimizer, folder):
        tensors = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}

        def write():
            time.sleep(2)
            torch.save([tensors, None], folder / f"{torch.distributed.get_rank()}.pt")

        if how == "a future":
            writers[:] = writers or [ThreadPoolExecutor(1)]
            writers[0].submit(write)  # its worker waits for more afterwards
        elif how == "a process":
            multiprocessing.get_context("fork").Process(target=write).start()
        else:
            threading.Thread(target=write, daemon=how == "a daemon").start()

    def load(model, optimizer, folder):
        resume(model, None, folder)

    def loader(fsdp):
        made = declared(fsdp, build(), save=in_background, resume=load, optimizer=plain)
        if how == "beside a dead proxy":
            made.model.watchers = [weakref.proxy(set())]
        return made

    found = judged(loader, (ROUND_TRIP, AGAIN))
    if how == "a daemon":
        assert statuses(found) == {ROUND_TRIP: "error", AGAIN: "error"}
        assert "raised FileNotFoundError in Subject(resume=...)" in found[ROUND_TRIP].reason
    else:
        assert statuses(found) == {ROUND_TRIP: "passed", AGAIN: "passed"}, found


def test_a_second_save_that_raises():
    def save(model, optimizer, folder):
        if folder.name == "again":
            raise FileExistsError("step_1")
        for_torch(model, optimizer, folder)

    found = judged(
        lambda fsdp: declared(fsdp, build(), save=save, resume=from_torch, optimizer=plain), (ROUND_TRIP, RESUME, AGAIN)
    )
    assert statuses(found) == {ROUND_TRIP: "passed", RESUME: "passed", AGAIN: "error"}
    assert "raised FileExistsError in Subject(save=...): step_1" in found[AGAIN].reason


def save_all(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    dcp.save(torch_states(model, optimizer), checkpoint_id=folder)


def resume_what_is_there(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Find nothing wrong with a checkpoint that lacks the optimizer or some tensor."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = torch_states(model, optimizer)
    has_optimizer = any(key.startswith("optimizer.") for key in saved)
    if not has_optimizer:
        state.pop("optimizer", None)
    state["model"] = {name: value for name, value in state["model"].items() if f"model.{name}" in saved}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=False))
    if optimizer is not None and has_optimizer:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def deleting_the_earlier(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    earlier = vars(model).setdefault("history", [])
    if earlier and torch.distributed.get_rank() == 0:
        for other in folder.parent.iterdir():  # whatever else lies there
            if other != folder:
                shutil.rmtree(other)
    earlier.append(folder)
    save_all(model, optimizer, folder)


def scaled() -> nn.Sequential:
    torch.manual_seed(0)
    shared = nn.Module()
    shared.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
    return nn.Sequential(Scaled(shared), Scaled(shared))


def counted(fsdp: Rank) -> Subject:
    model = build_counted()
    for module in model[:2]:
        fully_shard(module, mesh=fsdp.mesh)
    # Nobody reduces the gradients of parameters that are not sharded, so every rank gets every row.
    return Subject(model, reference=build_counted, batch=batch, loss=loss, unsharded="2.*", data_parallel=(0, 1))


def resume_once(model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Resume as only a job can that has just started: a parametrization, say, cannot be registered twice."""
    assert "resumed" not in vars(model), "resumed before"
    vars(model)["resumed"] = True
    resume_what_is_there(model, optimizer, folder)


def idle_with_built_adam(fsdp: Rank, stepped: bool = False, **fields: Any) -> Subject:
    found = declared(fsdp, idle(), idle, **fields)
    optimizer = adam(found.model.parameters())
    if stepped:  # torch creates no state where a warm-up has left some
        for parameter in found.model[0].parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return replace(found, optimizer=optimizer)


RIGHT: dict[str, Callable[[Rank], Subject]] = {
    "complete": lambda fsdp: declared(fsdp, build()),
    "a module that all layers share": lambda fsdp: declared(fsdp, scaled(), scaled),
    "extra state": counted,
    "no gradient and our optimizer": lambda fsdp: declared(fsdp, idle(), idle),
    "no gradient and an own optimizer": lambda fsdp: declared(fsdp, idle(), idle, optimizer=adam),
    "no gradient and a built optimizer": idle_with_built_adam,
    "no gradient and a stepped optimizer": partial(idle_with_built_adam, stepped=True),
    "a model that is resumed once": lambda fsdp: declared(fsdp, build(), save=save_all, resume=resume_once),
    "an earlier checkpoint is deleted": lambda fsdp: declared(
        fsdp, build(), save=deleting_the_earlier, resume=resume_what_is_there
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_subject_passes_all_checks(name):
    found = judged(RIGHT[name])
    assert {id: (one.status, one.reason) for id, one in found.items()} == dict.fromkeys(ALL, ("passed", ""))


def test_a_state_that_was_never_saved_is_explained():
    def resume(model, optimizer, folder):
        dcp.load(state := torch_states(model, optimizer), checkpoint_id=folder)
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            set_optimizer_state_dict(model, optimizer, state["optimizer"])

    def loader(fsdp):
        return idle_with_built_adam(fsdp, save=save_all, resume=resume)

    found = judged(loader, [ROUND_TRIP, OPTIMIZER, RESUME, AGAIN])
    assert found.pop(ROUND_TRIP).status == "passed"
    (reason,) = {one.reason for one in found.values()}
    assert reason.endswith(
        "Missing key in checkpoint state_dict: optimizer.state.1.weight.step.; 1.weight got no gradient, so no state "
        "of it was saved, but torch expects one for each trainable parameter of the optimizer: freeze it, or leave it "
        "out of the optimizer"
    )


@pytest.mark.parametrize("how", ["left out", "groups"])
def test_a_second_save_without_the_current_optimizer(how):
    def save(model, optimizer, folder):
        state, first = torch_states(model, optimizer), vars(model).setdefault("first", {})
        if optimizer is not None:
            first.setdefault("groups", copy.deepcopy(state["optimizer"]["param_groups"]))
        if folder.name == "again" and how == "left out":
            state.pop("optimizer")
        elif folder.name == "again":
            state["optimizer"]["param_groups"] = first["groups"]
        dcp.save(state, checkpoint_id=folder)

    def halve(optimizer, *_):
        optimizer.param_groups[0]["lr"] /= 2

    def halving(parameters):
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        optimizer.register_step_post_hook(halve)
        return optimizer

    fields = {"save": save, "resume": resume_what_is_there, "optimizer": halving}
    found = judged(lambda fsdp: declared(fsdp, build(), **fields), [ROUND_TRIP, OPTIMIZER, AGAIN])
    assert (found[ROUND_TRIP].status, found[OPTIMIZER].status) == ("passed", "passed"), found[OPTIMIZER]
    [lost] = {finding.actual for finding in found[AGAIN].findings if how == "groups" or finding.tensor}
    if how == "groups":
        assert lost.startswith("the second save has lr=")
    else:
        assert lost == "different step, exp_avg, exp_avg_sq after loading the second save"


def test_a_checkpoint_that_is_not_there_is_an_error_in_resume():
    """torch raises a BaseException then, and its text names neither the error nor a file."""

    def save(model, optimizer, folder):
        pass

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=from_torch), [ROUND_TRIP])[ROUND_TRIP]
    assert found.status == "error"
    assert "AssertionError in Subject(resume=...): metadata is None" in found.reason
    assert ".metadata" in found.reason


def test_saving_that_raised_is_retried():
    def save(model, optimizer, folder):
        if folder.name in ("continued", "saved"):
            raise OSError("the disk is full")
        for_torch(model, optimizer, folder)

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=from_torch), (ROUND_TRIP, RESHARDS))
    assert statuses(found) == {ROUND_TRIP: "error", RESHARDS: "passed"}
    assert "raised OSError in Subject(save=...): the disk is full" in found[ROUND_TRIP].reason


def test_a_rank_that_ends_after_saving_does_not_fail_the_round_trip():
    class Fragile(nn.Linear):
        saved = False

        def forward(self, input: Tensor) -> Tensor:
            return os._exit(3) if self.saved else super().forward(input)

    def fragile() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Fragile(4, 4), nn.Linear(4, 2))

    def save(model, optimizer, folder):
        for_torch(model, optimizer, folder)
        model[0].saved = True

    def loader(fsdp):
        return declared(fsdp, fragile(), build=fragile, save=save, resume=from_torch)

    found = judged(loader, (ROUND_TRIP, RESUME))
    assert statuses(found) == {ROUND_TRIP: "passed", RESUME: "error"}
    assert "exited with code 3 before it answered" in found[RESUME].reason


def test_a_failing_load_is_reported_by_every_check():
    def save(model, optimizer, folder):
        pass

    def resume(model, optimizer, folder):
        raise ArithmeticError("no checkpoint here")

    found = judged(lambda fsdp: declared(fsdp, build(), save=save, resume=resume), SAVING)
    assert statuses(found) == dict.fromkeys(SAVING, "error")
    message = "raised ArithmeticError in Subject(resume=...): no checkpoint here"
    assert {id: one.reason for id, one in found.items() if message not in one.reason} == {}


def test_functions_that_need_an_optimizer_show_no_error_of_ours_after_a_failed_step():
    """After a failure, they are called for the model alone; without an optimizer, torch's functions raise TypeError."""

    def save(model, optimizer, folder, scheduler):
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)

    def resume(model, optimizer, folder, scheduler):
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    def cycle(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=3)

    fields = {"optimizer": torch.optim.AdamW, "scheduler": cycle, "save": save, "resume": resume}
    found = judged(lambda fsdp: declared(fsdp, build(), **fields), SAVING)
    assert statuses(found) == dict.fromkeys(SAVING, "error")
    assert {id: one.reason for id, one in found.items() if "Tried to step 4 times" not in one.reason} == {}


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (None, "NoneType"),
        (["0.weight"], "list"),
        ({1: "0.weight"}, "a dict with a key of int (1)"),
    ],
)
def test_a_state_dict_must_have_names_as_keys(given, shown):
    found = judged(lambda fsdp: declared(fsdp, build(), state_dict=lambda model: given), (NAMES,))[NAMES]
    assert found.status == "error"
    assert found.reason == f"Subject(state_dict=...): it returned {shown}, but should return a dict with names as keys"


def test_a_loader_that_destroys_the_process_group():
    def loader(fsdp):
        subject = declared(fsdp, build())
        torch.distributed.destroy_process_group()
        return subject

    with pytest.raises(LoaderFailed) as caught:
        judged(loader, (NAMES, "collectives_within_budget"))
    assert str(caught.value) == (
        "the loader destroyed the process group (destroy_process_group), which the checks need; "
        "leave that to the plugin"
    )


def test_failed_training_does_not_fail_the_checkpoints():
    def failing(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ArithmeticError("no loss here")
        return loss(model, batch)

    found = judged(lambda fsdp: declared(fsdp, build(), loss=failing), (*ALL, "loss_parity"))
    assert {id for id, one in found.items() if one.status == "error"} == {"loss_parity", OPTIMIZER, RESUME, AGAIN}
    assert {id for id, one in found.items() if one.status == "passed"} == {
        REPEATABLE, NAMES, ROUND_TRIP, RESHARDS, EXPORTS
    }  # fmt: skip


def test_plain_shards_with_one_name_are_not_saved_by_torch():
    def loader(fsdp):
        model = build()
        model[0].weight.data += fsdp.rank
        return Subject(model)

    found = judged(loader, (ROUND_TRIP,))[ROUND_TRIP]
    assert found.status == "skipped"
    assert "ranks hold different values of 0.weight in the same place of the tensor" in found.reason


@pytest.mark.parametrize(
    ("mesh", "other"),
    [
        ({"dp_shard": 4}, {"dp_shard": 2}),
        ({"dp_shard": 3}, {"dp_shard": 1}),
        ({"dp_replicate": 4, "dp_shard": 2}, {"dp_replicate": 4, "dp_shard": 1}),
        ({"dp_shard": 2, "tp": 4}, {"dp_shard": 1, "tp": 4}),
        ({"tp": 4}, {"tp": 2}),
        ({"dp_replicate": 2}, {"dp_replicate": 1}),
        ({"dp_shard": 1}, {"dp_shard": 2}),
        ({"tp": 1, "data": 1}, {"tp": 1, "data": 2}),
    ],
)
def test_the_other_world_size(mesh, other):
    assert other_size(WorldSpec(mesh)).mesh == other


def test_the_other_world_size_uses_available_devices():
    spec = WorldSpec({"dp_shard": 4}, "cuda", "nccl", devices=(4, 5, 6, 7))
    assert other_size(spec).devices == (4, 5)
    assert other_size(WorldSpec({"dp_shard": 1}, "cuda", "gloo", devices=(3,))).devices == (3, 3)
    alone = other_size(WorldSpec({"dp_shard": 1}, "cuda", "nccl", devices=(3,)))
    assert alone == Unavailable("a world of 2 needs another GPU than this world of 1 has")


def test_torch_cannot_load_an_empty_group():
    def with_empty_group(fsdp):
        model = sharded(fsdp, build())
        groups = [{"params": [], "weight_decay": 0.1}, {"params": list(model.parameters())}]
        optimizer = torch.optim.AdamW(groups, foreach=False)
        return Subject(model, reference=build, batch=batch, loss=loss, optimizer=optimizer)

    verdicts = judged(with_empty_group, (OPTIMIZER, RESUME))
    assert statuses(verdicts) == {OPTIMIZER: "skipped", RESUME: "skipped"}
    assert verdicts[OPTIMIZER].reason == (
        "group 0 of the optimizer is empty, and torch does not load the settings of an empty group; declare "
        "Subject(save=..., resume=...)"
    )


def test_optimizer_state_with_other_placements_than_its_parameter():
    """The gradient of a vocabulary-parallel embedding, from which SGD creates the momentum, is whole on every rank."""

    def embedding() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 2))

    def loader(fsdp):
        model = embedding()
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
        parallelize_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), {"0": plan})
        tokens = {"input": torch.arange(8).view(4, 2)}
        return Subject(model, reference=embedding, batch=lambda step: tokens, loss=loss, data_parallel=(0, 1))

    assert statuses(judged(loader, (ROUND_TRIP, OPTIMIZER))) == {ROUND_TRIP: "passed", OPTIMIZER: "passed"}


def rename_first(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    state["first.weight"] = state.pop("0.weight")


def undo_renaming(model: nn.Module) -> dict[str, Any]:
    return {name.replace("first.", "0."): value for name, value in model.state_dict().items()}


def with_renamed_keys(fsdp: Rank, **fields: Any) -> Subject:
    subject = declared(fsdp, build(), **fields)
    subject.model.register_state_dict_post_hook(rename_first)
    return subject


def test_a_refused_state_dict_asks_for_what_is_not_declared():
    refuses = "torch's get_model_state_dict refuses the model ("
    for fields, lacking in (
        ({}, {EXPORTS: "Subject(state_dict=...)", ROUND_TRIP: "Subject(save=..., resume=...)"}),
        ({"save": save, "resume": resume}, {EXPORTS: "Subject(state_dict=...)"}),
        ({"save": save, "resume": resume, "state_dict": undo_renaming}, {}),
    ):
        verdicts = judged(lambda fsdp, fields=fields: with_renamed_keys(fsdp, **fields), (EXPORTS, ROUND_TRIP))
        found = {id: v.reason for id, v in verdicts.items() if v.reason.startswith(refuses)}
        assert {id: reason.split("; declare ")[1] for id, reason in found.items()} == lacking
        if not lacking:
            assert {v.status for v in verdicts.values()} == {"passed"}
