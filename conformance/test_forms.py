"""Conforming loaders of every form of sharding: no finding, no error, only the declared skips, and no module is named.

The first step is traced on request. Forms that need a declaration fail without it. ``make slow`` has a form of each
file and those with checks that no other form passes; ``make nightly`` has all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conformance.contract import judge_all
from conformance.judging import require, unexpected
from fixtures.forms import FORMS
from pytest_fsdp_meta.checks.tracing.judge import describe_origin, find_place
from pytest_fsdp_meta.trial.departure import STAGES

pytestmark = pytest.mark.slow
FOLLOW, RESUME = "batches_follow_the_mesh", "batches_resume"
PASSED = {
    "data_of_a_loader_with_a_state": [RESUME],
    "data_of_a_sampler_that_fills_up": [FOLLOW],
    "data_saved_for_any_number_of_ranks": [RESUME],
    "data_along_tp": [FOLLOW, RESUME],
    "data_scattered_by_rank_0": [FOLLOW],
    "data_that_never_ends": [RESUME],
}
"""Form -> the checks that it passes, although the usual form skips them."""
FIRST = {form.load.__module__: name for name, form in reversed(FORMS.items())}.values()
OFTEN = {*FIRST, *PASSED}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.nightly) for n in FORMS])
def test_a_form_conforms(name, checkpoint, loader_judge, usual_skips):
    form = FORMS[name]
    if form.needs_accelerator and not torch.accelerator.is_available():
        pytest.skip("torch refuses this form without an accelerator")
    require(form.needs)
    path = checkpoint(form.architecture) if form.architecture else None
    evidence = loader_judge.observe(form.load, form.mesh, localise=True, smaller=True, path=path)
    verdicts = judge_all(evidence)
    assert unexpected(verdicts, form.skips, usual_skips) == {}
    assert {id: verdicts[id].status for id in PASSED.get(name, ())} == dict.fromkeys(PASSED.get(name, ()), "passed")
    assert evidence.traces is not None
    assert {trace.problem for trace in evidence.traces} == {STAGES if "pp" in form.mesh else ""}
    assert find_place(evidence.traces) is None, "no module departs: " + describe_origin(evidence.traces)


NEEDED = {
    "head_drawn_anew": ("drawn", (), "params_equal_reference"),
    "lora_adapters": ("drawn", (), "params_equal_reference"),
    "experts_numbered_per_rank": ("on_some_ranks", (), "same_manifest_on_every_rank"),
    "fused_qkv_of_own_heads": ("adapter", None, "shapes_match_reference"),
    "shares_of_the_loss": ("loss_over_ranks", "mean", "loss_parity"),
    "loss_of_all_ranks": ("loss_over_ranks", "sum", "loss_parity"),
}
"""Form -> the field that it has to declare, the value of a loader that does not, and the check that then fails."""


@pytest.mark.parametrize("name", NEEDED)
def test_a_form_needs_its_declaration(name, checkpoint, judge_loader):
    form, (field, default, check) = FORMS[name], NEEDED[name]

    def undeclared(fsdp, path):
        return replace(form.load(fsdp, path), **{field: default})

    path = checkpoint(form.architecture) if form.architecture else None
    assert judge_loader(undeclared, form.mesh, checks=[check], path=path)[check].status == "failed"
