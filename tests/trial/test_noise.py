"""The noise of the reference's training is measured where a difference is large enough to need it."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW

from fixtures.forms_optimizers import StochasticallyRounding, own, rounded_by_chance
from pytest_fsdp_meta import Subject
from pytest_fsdp_meta.catalogue import built_in, judge
from pytest_fsdp_meta.evidence import Evidence, Noise, autocast_of_ranks_only
from pytest_fsdp_meta.worlds import Rank
from tests import trial_help

PARITY = ("grad_parity", "grad_norm_parity", "second_grad_parity", "update_parity", "loss_parity")
ADAMW = partial(AdamW, lr=1e-2, foreach=False)


class Inner(nn.Module):
    def __init__(self, whimsical: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.whimsical = whimsical

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layer(rows)
        # A model may refuse to be nudged: here, because its own output comes back changed.
        assert not self.whimsical or type(out.grad_fn).__name__ != "_NudgeBackward", "what is this?"
        return out.tanh()


def network(whimsical: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Inner(whimsical), nn.LayerNorm(16), nn.Linear(16, 4))


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"]).float().square().mean()
    return loss


def batch(step: int) -> dict[str, Tensor]:
    return {"x": torch.randn(8, 16)}


def observe(
    precision: MixedPrecisionPolicy, whimsical: bool = False, scale: float = 1.0, prepare=lambda model: None, **declared
) -> Evidence:
    def build() -> nn.Module:
        model = network(whimsical)
        prepare(model)
        return model

    def load(fsdp: Rank) -> Subject:
        model = build()
        fully_shard(model, mesh=fsdp.mesh, mp_policy=precision)
        weight = model[2].weight
        weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(scale))
        fields = {"batch": batch, "loss": squared, "optimizer": ADAMW, **declared}
        return Subject(model, reference=build, **fields)

    return trial_help.observe(load, PARITY)


def noise_of(evidence: Evidence) -> Noise:
    noise = evidence.training[1].noise
    assert noise is not None
    return noise


def statuses(evidence: Evidence) -> set[str]:
    return {verdict.status for verdict in trial_help.judge_all(evidence, PARITY).values()}


STOCHASTIC = {
    "batch": lambda step: {"x": torch.randn(8, 16, dtype=torch.bfloat16)},
    "optimizer": partial(StochasticallyRounding, lr=1e-3),
}
SINGLE = MixedPrecisionPolicy()
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def test_float32_needs_no_noise():
    evidence = observe(SINGLE)
    assert [run.noise for run in evidence.training] == [None, None]
    assert statuses(evidence) == {"passed"}


def test_a_lower_precision_passes_within_its_noise():
    evidence = observe(BFLOAT16)
    noise, measures = noise_of(evidence), {c.name: c.measure for c in evidence.training[1].gradients}
    assert set(noise.gradients) == set(noise.second) == set(noise.updates) == set(noise.accumulated) == set(measures)
    assert all(1e-4 < noise.gradients[name].distance / m.truth < 0.2 for name, m in measures.items())
    assert all(n.factor < 0.1 for n in noise.gradients.values())
    assert len(noise.losses) == 3
    assert 0 < noise.losses[0] < 1e-2
    assert statuses(evidence) == {"passed"}


@pytest.mark.parametrize(("precision", "scale"), [(SINGLE, 1.01), (BFLOAT16, 1.1)])
def test_a_scaled_gradient_is_found_beyond_the_noise(precision, scale):
    found = judge(built_in()["grad_parity"], observe(precision, scale=scale), built_in())
    assert {(f.tensor, rank) for f in found.findings for rank in f.ranks} == {("2.weight", 0), ("2.weight", 1)}


def in_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return squared(model, batch)


def cast_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> Tensor:
    loss = in_autocast(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_autocast_in_the_step_alone_is_a_lower_precision():
    evidence = observe(SINGLE, train_step=cast_step)
    assert autocast_of_ranks_only(evidence.training, evidence.reference) == ("bfloat16",)
    assert statuses(evidence) == {"passed"}
    wrong = judge(built_in()["grad_parity"], observe(SINGLE, scale=1.1, train_step=cast_step), built_in()).findings
    assert {finding.tensor for finding in wrong} == {"2.weight"}


def test_autocast_in_the_reference_as_well_is_measured_there():
    evidence = observe(SINGLE, train_step=cast_step, loss=in_autocast)
    assert autocast_of_ranks_only(evidence.training, evidence.reference) == ()
    assert statuses(evidence) == {"passed"}


@pytest.mark.nightly
def test_a_model_that_cannot_be_nudged_is_judged_by_its_dtype():
    evidence = observe(BFLOAT16, whimsical=True)
    assert noise_of(evidence).problem == "AssertionError: what is this?"
    assert statuses(evidence) == {"passed"}
    wrong = judge(built_in()["grad_parity"], observe(BFLOAT16, whimsical=True, scale=1.7), built_in())
    assert {f.tensor for f in wrong.findings} == {"2.weight"}


@pytest.mark.nightly
def test_a_reference_that_is_killed_while_its_noise_is_measured_passes_nothing_by_dtype():
    def deadly(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if torch.distributed.get_world_size() == 1 and model._forward_hooks:  # those that nudge
            os.kill(os.getpid(), signal.SIGKILL)
        return squared(model, batch)

    evidence = observe(BFLOAT16, loss=deadly)
    assert noise_of(evidence) == Noise(problem="the reference was killed by SIGKILL", ended=True)
    found = judge(built_in()["grad_parity"], evidence, built_in())
    assert (found.status, found.why) == ("skipped", "partly checked")
    assert "measuring the reference's noise failed (the reference was killed by SIGKILL)" in found.reason


class RoundingTwice(AdamW):
    """Round by chance what the step in bfloat16 has already rounded to the nearest value."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            own(parameter).copy_(rounded_by_chance(own(parameter).float()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "unmoved"),
    # By chance, 0.1 elements of each norm's weight move in three steps.
    [(partial(StochasticallyRounding, lr=1e-7), []), (partial(RoundingTwice, lr=1e-3, foreach=False), ["2.weight"])],
    ids=["by chance", "to the nearest"],
)
def test_only_a_weight_that_no_chance_leaves_in_place_is_rounded_away(optimizer, unmoved):
    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.LayerNorm(16), nn.Linear(16, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4)
        return nn.Sequential(*layers).to(torch.bfloat16)

    def load(fsdp: Rank) -> Subject:
        model = build()
        fully_shard(model, mesh=fsdp.mesh)
        return Subject(model, reference=build, loss=far, batch=STOCHASTIC["batch"], optimizer=optimizer)

    def far(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return 1000 * (model(batch["x"]).float() - 1).square().mean()

    moves = "every_trainable_moves"
    evidence = trial_help.observe(load, [moves])
    assert evidence.training[0].steps_by_chance
    found = trial_help.judge_all(evidence, [moves])[moves].findings
    assert [finding.tensor for finding in found] == unmoved
    assert all(finding.cause.startswith("the step draws random numbers, but rounds this") for finding in found)


@pytest.mark.nightly
def test_the_dtype_of_a_frozen_weight_does_not_count():
    """Weights are stored in float8; nothing computes in it."""

    def store(model: nn.Module) -> None:
        model.scales = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn), requires_grad=False)

    evidence = observe(SINGLE, scale=1.02, prepare=store)
    assert noise_of(evidence).gradients["2.weight"].factor < 1e-4
    assert {f.tensor for f in judge(built_in()["grad_parity"], evidence, built_in()).findings} == {"2.weight"}


@pytest.mark.nightly
def test_the_dtype_of_the_reduction_excuses_no_forward():
    evidence = observe(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    first, *later = noise_of(evidence).losses
    assert first < 1e-4 < max(later)  # after updates by rounded gradients
    assert statuses(evidence) == {"passed"}


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_gradients_that_nearly_cancel_are_rounded_before_they_are_added(scale):
    """The rows of one rank count for, those of the other against: one rounding of either is large beside the sum."""

    def rows(step: int) -> dict[str, Tensor]:
        half = torch.randn(4, 16)
        return {"x": torch.cat([half, half + 0.1]), "sign": torch.tensor([1.0] * 4 + [-1.0] * 4)}

    def signed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]).float().sum(1) * batch["sign"]).mean()

    evidence = observe(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), scale=scale, batch=rows, loss=signed)
    assert ("failed" in statuses(evidence)) == (scale != 1)


@pytest.mark.nightly
def test_a_function_that_clips_may_replace_gradients():
    def clip(parameters, bound: float) -> Tensor:
        held = list(parameters)
        norm = torch.nn.utils.get_total_norm([p.grad for p in held]).full_tensor()
        for parameter in held:
            parameter.grad = parameter.grad * min(1.0, bound / (float(norm) + 1e-6))
        return norm

    evidence = observe(SINGLE, clip_grad_norm=clip)
    assert statuses(evidence) == {"passed"}
    assert judge(built_in()["grad_clip_parity"], evidence, built_in()).status == "passed"


@pytest.mark.nightly
def test_a_loss_that_is_computed_in_bfloat16_passes():
    """What the author's loss rounds is not in the noise of what the model returns."""
    evidence = observe(BFLOAT16, loss=lambda model, batch: model(batch["x"]).square().mean())
    assert {run.loss_dtype for run in evidence.training} == {"bfloat16"}
    assert statuses(evidence) == {"passed"}
