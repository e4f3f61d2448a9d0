"""The author's own training step, on real ranks: what it may do, and one line for what it may not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import Verdict
from pytest_fsdp_meta.worlds import Rank
from tests.trial_help import batch, judge_all, loss, observe

TRAINING = ("loss_parity", "grad_parity", "second_grad_parity", "update_parity", "resume_parity")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def load(fsdp: Rank, **declared: Any) -> Subject:
    model = build()
    for module in model:
        fully_shard(module, mesh=fsdp.mesh)
    fully_shard(model, mesh=fsdp.mesh)
    return Subject(model, **{"reference": build, "batch": batch, "loss": loss, "optimizer": adam, **declared})


def judged(
    train_step: Any,
    checks: Iterable[str] = TRAINING,
    timeout: float = 60,
    steps: int = 3,
    function: Any = None,
    **declared: Any,
) -> dict[str, Verdict]:
    function = function or partial(load, train_step=train_step, **declared)
    return judge_all(observe(function, checks, timeout=timeout, steps=steps), checks)


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    found = loss(model, batch)
    found.backward()
    optimizer.step()
    optimizer.zero_grad()
    return found


def clipping(scale: float = 1.0, loss: Any = loss, clip: Any = nn.utils.clip_grad_norm_, bound: float = 0.01) -> Any:
    """Return a step that clips, after it has scaled the loss."""

    def step(model, optimizer, batch):
        found = loss(model, batch)
        (found * scale).backward()
        clip(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()
        return found

    return step


def test_a_step_in_training_mode_that_zeroes_first_and_returns_a_float():
    def step(model, optimizer, batch):
        model.train()
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()
        optimizer.step()
        return found.item()

    found = judged(step)
    assert {id: one.status for id, one in found.items()} == dict.fromkeys(TRAINING, "passed"), found


def test_gradients_are_compared_as_the_optimizer_gets_them():
    assert judged(clipping(), ["grad_parity"], max_grad_norm=0.01)["grad_parity"].status == "passed"
    undeclared = judged(clipping(), ["grad_parity"])["grad_parity"]
    assert undeclared.status == "failed"
    assert undeclared.findings[0].remedy.startswith("if train_step clips, declare Subject(max_grad_norm=<its bound>)")
    plain = judged(plain_step, ["grad_parity"], max_grad_norm=0.01)["grad_parity"]
    assert plain.status == "failed"


def test_the_reference_clips_with_the_function_of_the_author():
    def by_largest(parameters, bound):
        return nn.utils.clip_grad_norm_(parameters, bound, norm_type=float("inf"))

    step = clipping(clip=by_largest)
    checks = ("grad_parity", "second_grad_parity", "update_parity", "loss_parity")
    found = judged(step, checks, max_grad_norm=0.01, clip_grad_norm=by_largest)
    assert {id: one.status for id, one in found.items()} == dict.fromkeys(checks, "passed"), found
    assert judged(step, ["grad_parity"], max_grad_norm=0.01)["grad_parity"].status == "failed"


def test_a_part_of_the_model_in_training_mode_has_no_dropout():
    def step(model, optimizer, batch):
        model[1].train()
        return plain_step(model, optimizer, batch)

    assert judged(step, ["loss_parity"])["loss_parity"].status == "passed"


def forgets(model, optimizer, batch):
    loss(model, batch).backward()
    return 0.0


def steps_another(model, optimizer, batch):
    return plain_step(model, adam(model.parameters()), batch)


def steps_twice(model, optimizer, batch):
    found = loss(model, batch)
    for _ in range(2):
        found.backward(retain_graph=True)
        optimizer.step()
    return found


def returns_nothing(model, optimizer, batch):
    plain_step(model, optimizer, batch)


def returns_a_row(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    return torch.zeros(3)


async def is_awaited(model, optimizer, batch):
    return plain_step(model, optimizer, batch)


def yields(model, optimizer, batch):
    yield plain_step(model, optimizer, batch)


def returns_a_complex_number(model, optimizer, batch):
    return plain_step(model, optimizer, batch) * 1j


def returns_nothing_computed(model, optimizer, batch):
    return plain_step(model, optimizer, batch).to("meta")


def returns_too_much(model, optimizer, batch):
    plain_step(model, optimizer, batch)
    return 10**400


def raises(model, optimizer, batch):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (forgets, "it never stepped the optimizer in step 0, but should step it once; call step() of the optimizer"),
        (
            steps_another,
            "it never stepped the optimizer in step 0, but should step it once; declare the AdamW that it stepped",
        ),
        (steps_twice, "it stepped the optimizer 2 times in step 0, but should step it once; declare one update: "),
        (returns_nothing, "it returned NoneType, but should return the loss, a number"),
        (
            returns_a_row,
            "it returned Tensor of shape (3,), but should return the loss, a number; reduce it with .mean() or .sum()",
        ),
        (is_awaited, "it returned a coroutine and has not run; make it a plain function, without async or yield"),
        (yields, "it returned a generator and has not run; make it a plain function, without async or yield"),
        (returns_a_complex_number, "it returned a tensor of complex numbers, but should return the loss, a number"),
        (returns_nothing_computed, "it returned a tensor on meta, but should return the loss, a number"),
        (returns_too_much, "it returned a number that no float holds, but should return the loss, a number"),
    ],
)
def test_a_step_that_breaks_its_contract(step, message):
    found = judged(step, ["loss_parity"])["loss_parity"]
    assert found.status == "error"
    assert f"Subject(train_step=...): {message}" in found.reason
    assert "Traceback" not in found.detail


def test_a_step_that_raises():
    found = judged(raises, ["loss_parity"])["loss_parity"]
    assert found.status == "error"
    assert "raised KeyError in Subject(train_step=...): 'labels'" in found.reason


def test_an_error_of_an_observer_is_not_the_steps():
    def clip(parameters, bound):
        raise ArithmeticError("no norm")

    found = judged(plain_step, ["grad_norm_parity"], clip_grad_norm=clip)["grad_norm_parity"]
    assert found.status == "error"
    assert "raised ArithmeticError in Subject(clip_grad_norm=...): no norm" in found.reason


# A wrong scale that clipping hides.


def test_gradients_that_were_scaled_before_clipping():
    checks = ("grad_parity", "update_parity", "loss_parity")
    found = judged(clipping(65536), checks, max_grad_norm=0.01)
    assert [one.status for one in found.values()] == ["failed", "passed", "passed"], found
    [finding] = found["grad_parity"].findings
    assert (finding.tensor, finding.actual) == (None, "gradients before clipping are 65536 times the reference's")


def test_a_scale_that_takes_the_norm_below_the_bound_is_no_other_clipping():
    whole = build()
    loss(whole, batch(0)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    step = clipping(0.25, bound=0.6 * norm)
    first, *others = judged(step, ["grad_parity"], max_grad_norm=0.6 * norm)["grad_parity"].findings
    assert first.actual.startswith("gradients before clipping are ")  # a quarter is 0.264: the weights moved less
    causes = {finding.cause for finding in (first, *others)}
    assert causes == {"the losses that train_step differentiates add up to 1/4 of the right one"}
    other_bound = judged(clipping(0.25), ["grad_parity"], max_grad_norm=0.6 * norm)
    assert "add up to" not in other_bound["grad_parity"].findings[0].cause


class Fused(torch.autograd.Function):
    """A loss whose backward returns the gradients that the forward computed, whatever its factor is."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.save_for_backward(2 * output / output.numel())
        return output.square().mean()

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


def test_a_loss_that_ignores_the_factor_of_its_backward_has_no_wrong_scale():
    step = clipping(loss=lambda model, batch: Fused.apply(model(**batch)))
    found = judged(step, ["grad_parity"], max_grad_norm=0.01)["grad_parity"]
    assert found.status == "passed", found.findings


def test_a_step_that_takes_gradients_without_a_backward_has_no_wrong_scale():
    def step(model, optimizer, batch):
        parameters = [p for p in model.parameters() if p.numel()]
        found = loss(model, batch)
        for parameter, gradient in zip(parameters, torch.autograd.grad(found, parameters), strict=True):
            parameter.grad = gradient
        for parameter in parameters:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= 2
        nn.utils.clip_grad_norm_(parameters, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return found

    def plain(fsdp):
        return Subject(
            build(), reference=build, batch=batch, loss=loss, optimizer=adam, train_step=step, max_grad_norm=0.01
        )

    found = judged(None, ["grad_parity"], function=plain)["grad_parity"]
    assert found.status == "passed", (found.findings, found.reason)


class Copies(torch.optim.Adam):
    """Steps float32 copies of the parameters, as DeepSpeed does, and gives them their values."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.own = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__([parameter.detach().clone() for parameter in self.own], lr=1e-2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for own, copy in zip(self.own, self.param_groups[0]["params"], strict=True):
            copy.grad = own.grad
        super().step(closure)
        self.give()

    @torch.no_grad()
    def give(self) -> None:
        for own, copy in zip(self.own, self.param_groups[0]["params"], strict=True):
            own.copy_(copy)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for own in self.own:
            own.grad = None


def test_copies_that_the_optimizer_steps_keep_their_values_in_steps_that_are_undone():
    def save(model: nn.Module, optimizer: Copies, folder: Path) -> None:
        copies = [copy.to_local() for copy in optimizer.param_groups[0]["params"]]
        torch.save(copies, folder.with_name(f"{folder.name}-{dist.get_rank()}"))

    @torch.no_grad()
    def resume(model: nn.Module, optimizer: Copies, folder: Path) -> None:
        copies = torch.load(folder.with_name(f"{folder.name}-{dist.get_rank()}"))
        for copy, saved in zip(optimizer.param_groups[0]["params"], copies, strict=True):
            copy.to_local().copy_(saved)
        optimizer.give()

    declared = {"optimizer": Copies, "max_grad_norm": 0.01, "save": save, "resume": resume}
    found = judged(clipping(), ["dcp_round_trip", "grad_parity"], **declared)
    assert {verdict.status for verdict in found.values()} == {"passed"}


def test_a_step_that_refuses_more_than_its_schedule_is_told():
    rates: list[Any] = []

    def step(model, optimizer, batch):
        if not rates:
            rates.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2))
        found = clipping()(model, optimizer, batch)
        rates[0].step()
        return found

    found = judged(step, ["grad_parity"], steps=2, max_grad_norm=0.01)["grad_parity"]
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert "one more step with small gradients raised ValueError: Tried to step" in found.reason


def test_gradients_that_are_clipped_in_another_precision_have_no_wrong_scale():
    def in_bfloat16(fsdp):
        model = build()
        for module in model:
            fully_shard(module, mesh=fsdp.mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        fully_shard(model, mesh=fsdp.mesh)
        declared = {"reference": build, "batch": batch, "loss": loss, "optimizer": adam}
        return Subject(model, train_step=clipping(), max_grad_norm=0.01, **declared)

    assert judged(None, ["grad_parity"], function=in_bfloat16)["grad_parity"].status == "passed"


# Other numbers of backwards on some ranks.


def uneven(divide: bool, closes: bool) -> Any:
    """Return a step with two micro-batches on rank 0 and one on rank 1.

    Without ``closes``, nothing is gathered again for the second micro-batch, so that no collective is left over.
    """

    def step(model, optimizer, batch):
        parts = batch["input"].chunk(2 - dist.get_rank())
        model.set_reshard_after_forward(closes)
        model.set_reshard_after_backward(closes)
        total = 0.0
        for number, part in enumerate(parts):
            model.set_requires_gradient_sync(number == len(parts) - 1)
            found = loss(model, {"input": part}) / (len(parts) if divide else 1)
            found.backward()
            total += found.item()
        model.reshard()
        for module in model:
            if isinstance(module, FSDPModule):
                module.reshard()
        optimizer.step()
        optimizer.zero_grad()
        return total / (1 if divide else len(parts))

    return step


def test_ranks_may_run_other_numbers_of_backwards_if_the_result_is_right():
    found = judged(uneven(divide=True, closes=False), ["loss_parity", "grad_parity", "update_parity"])
    assert {one.status for one in found.values()} == {"passed"}, found


def test_other_numbers_of_backwards_are_named_as_the_cause():
    found = judged(uneven(divide=False, closes=False), ["grad_parity"])["grad_parity"]
    assert found.status == "failed"
    assert {finding.cause.partition(", but")[0] for finding in found.findings} == {
        "Subject(train_step=...) ran 2 backwards on rank 0 and 1 backward on rank 1 in step 0"
    }


def test_a_rank_that_waits_for_a_micro_batch_of_another_is_a_hang():
    found = judged(uneven(divide=True, closes=True), ["loss_parity"], timeout=5)["loss_parity"]
    assert found.status == "error"
    assert re.match(r"rank \d (hung|waits) in all_gather, ", found.reason), found.reason
    assert "rank 0 waits in all_gather number 5 " in found.detail
    assert "rank 1 waits in all_reduce number 5 " in found.detail
    assert "mismatch: collective number 5 differs between these ranks" in found.detail


class Outputs(NamedTuple):
    hidden: Tensor


class Named(nn.Linear):
    def forward(self, input: Tensor) -> Outputs:
        return Outputs(super().forward(input))


def skipping_alone(calls_the_model: Callable[[], bool]) -> Callable[[Rank], Subject]:
    """Return a loader whose ranks decide alone whether they skip a step, without a collective in the model."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
        call = model if calls_the_model() else model.forward
        found = call(batch["input"]).hidden.square().mean()
        found.backward()
        if found.isfinite():
            optimizer.step()
        optimizer.zero_grad()
        return found

    return lambda fsdp: Subject(Named(4, 2), batch=batch, optimizer=adam, train_step=step)


def test_a_model_that_returns_a_named_tuple_can_return_nan():
    evidence = observe(skipping_alone(lambda: True), wanted=["not_finite"])
    assert [rank.moved for rank in evidence.not_finite or ()] == [(False,), (True,)]


def test_no_rank_waits_for_one_that_does_not_call_the_model():
    evidence = observe(skipping_alone(lambda: dist.get_rank() == 0), wanted=["not_finite"], timeout=20)
    assert [rank.moved for rank in evidence.not_finite or ()] == [(False,), ()]


def test_a_loss_in_chunks_goes_back_to_the_output_first():
    """A chunked cross-entropy or GradCache: the gradient of the output is that of backwards before."""

    def rows(step):
        return {"input": torch.linspace(-1.0, 1.0, 64).view(16, 4) + step}

    def step(model, optimizer, batch):
        total = 0.0
        for rows in batch["input"].split(len(batch["input"]) // 2):
            output = model(rows)
            leaf = output.detach().requires_grad_()
            for chunk in leaf.split(1, dim=1):
                part = chunk.square().sum() / (len(batch["input"]) * leaf.shape[1])
                part.backward()
                total += part.detach()
            output.backward(leaf.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return total

    found = judged(step, ["grad_parity", "grad_accumulation_parity", "loss_parity"], max_grad_norm=0.01, batch=rows)
    assert {id: verdict.status for id, verdict in found.items()} == dict.fromkeys(found, "passed"), found


@pytest.mark.parametrize("by", ["step", "step, group", "hook"])
def test_a_layer_that_is_unfrozen_needs_a_group_and_a_reference_that_does_so_too(by):
    def build_frozen() -> nn.Sequential:
        model = build()
        model[0].requires_grad_(False)
        return model

    def unfreeze(model: Any, optimizer: torch.optim.Optimizer) -> None:
        if by != "step" and not model[0].weight.requires_grad:
            optimizer.add_param_group({"params": [*model[0].parameters()]})
        model[0].requires_grad_(True)

    def with_hook(model: nn.Module) -> torch.optim.Optimizer:
        made = adam(parameter for parameter in model.parameters() if parameter.requires_grad)
        made.register_step_post_hook(lambda optimizer, *_: unfreeze(model, optimizer))
        return made

    def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
        found = plain_step(model, optimizer, batch)
        if by != "hook":
            unfreeze(model, optimizer)
        return found

    def load(fsdp: Rank) -> Subject:
        model = fully_shard(build_frozen(), mesh=fsdp.mesh)
        optimizer: Any = with_hook if by == "hook" else adam
        return Subject(model, reference=build_frozen, batch=batch, loss=loss, train_step=step, optimizer=optimizer)

    checks = ["optimizer_owns_parameters", "frozen_weights_stay_frozen", "loss_parity"]
    found = judge_all(observe(load, checks), checks)
    findings = [(one.tensor, one.actual) for check in checks[:2] for one in found[check].findings]
    alone = "unfrozen by a step, and in no group of AdamW"
    assert findings == ([("0.weight", alone), ("0.bias", alone)] if by == "step" else [])
    causes = [one.cause for one in found["loss_parity"].findings]
    assert causes == (
        ["train_step freezes or unfreezes 0.weight and 1 more, which the reference's plain training does not"]
        if by == "step, group"
        else []
    ), found["loss_parity"]


def in_pieces(found: Any = loss, reduced: Iterable[int] = (0, 1)) -> Any:
    """Return a step with two micro-batches, which reduces the gradients of these only."""

    def step(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
        total = torch.zeros(())
        for number, rows in enumerate(batch["input"].chunk(2)):
            for module in [*model, model]:
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(number in reduced, recurse=False)
            part = found(model, {"input": rows}) / 2
            part.backward()
            total += part.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def without_the_last_row(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    return plain_step(model, optimizer, {"input": batch["input"][:-1]})


def returns_more(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    return 1.3 * plain_step(model, optimizer, batch)


def with_another_term(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(**batch)
    return found.square().mean() + 0.1 * found.mean()


def detached(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(**batch)
    return (found.detach() * found).mean()


def spread(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(**batch)
    return (found - found.mean()).square().mean()


@pytest.mark.parametrize(
    ("step", "declared", "cause"),
    [
        (in_pieces(), loss, ""),
        (without_the_last_row, loss, "of the rows 0 to 1 that it gets, train_step trains on 0 to 0"),
        (
            returns_more,
            loss,
            "what train_step differentiates adds up to the right loss (0.087949), and it returns another",
        ),
        (in_pieces(reduced=[0]), loss, "backward 2 of 2 adds nothing to the gradients"),
        (
            in_pieces(with_another_term),
            loss,
            "train_step differentiates another loss than Subject(loss=...), not a mult",
        ),
        (in_pieces(detached), loss, "the gradient that train_step starts from is 0.5 times that of its loss"),
        (
            in_pieces(spread),
            spread,
            "of the first micro-batch, train_step differentiates a multiple of Subject(loss=...), and in all 0.053",
        ),
    ],
)
def test_what_the_step_differentiates_is_compared_with_the_declared_loss(step, declared, cause):
    found = judged(step, ["grad_parity", "loss_parity"], loss=declared, steps=2)
    causes = {one.cause for verdict in found.values() for one in verdict.findings}
    assert len(causes) == bool(cause)
    assert cause or {verdict.status for verdict in found.values()} == {"passed"}
    assert all(one.startswith(cause) for one in causes), causes


def test_a_divide_factor_on_the_root_alone_is_no_matter_of_the_loss():
    def step(model, optimizer, batch):
        share = loss(model, batch) / 2
        share.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := share.detach())
        return total

    def three() -> nn.Sequential:
        return nn.Sequential(*build(), nn.Linear(2, 2))

    def on_the_root(fsdp):
        model = three()
        fully_shard(model[0], mesh=fsdp.mesh)
        root: Any = fully_shard(model, mesh=fsdp.mesh)
        root.set_gradient_divide_factor(1.0)
        root.set_force_sum_reduction_for_comms(True)
        declared: dict[str, Any] = {"batch": batch, "loss": loss, "optimizer": adam, "train_step": step}
        return Subject(model, reference=three, loss_over_ranks="same", **declared)

    found = judged(None, ["grad_parity"], function=on_the_root)["grad_parity"].findings
    assert {finding.tensor for finding in found} == {"0.weight", "0.bias"}
    assert all(finding.cause.startswith("divided once too often (2 is the number of ") for finding in found)
