"""Conforming loaders of every form of sharding: no finding, no error, and only the declared skips.

Forms that need a declaration fail without it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fixtures.forms import FORMS
from fixtures.forms_registry import MAY_SKIP
from fixtures.needs import lacking

pytestmark = pytest.mark.slow
USUAL = "per_block_and_root"


@pytest.fixture(scope="session")
def usual_skips(checkpoint, judge_loader):
    """Return the checks that do not apply to the model in any form (nothing is frozen, nothing is tied)."""
    usual = FORMS[USUAL]
    verdicts = judge_loader(usual.load, usual.mesh, path=checkpoint(usual.architecture))
    return {id for id, verdict in verdicts.items() if verdict.status == "skipped"}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_conforms(name, checkpoint, judge_loader, usual_skips):
    form = FORMS[name]
    if form.needs_accelerator and not torch.accelerator.is_available():
        pytest.skip("torch refuses this form without an accelerator")
    if lack := lacking(form.needs):
        pytest.skip(lack)
    path = checkpoint(form.architecture) if form.architecture else None
    verdicts = judge_loader(form.load, form.mesh, path=path)
    problems = {id: (v.findings, v.reason) for id, v in verdicts.items() if v.status in ("failed", "error")}
    assert problems == {}

    def may_skip(id: str, reason: str) -> bool:
        return id in form.skips or id in usual_skips or MAY_SKIP.get(id, reason + "!") in reason

    skipped = {id: v.reason for id, v in verdicts.items() if v.status == "skipped"}
    unexplained = {id: reason for id, reason in skipped.items() if not may_skip(id, reason)}
    assert unexplained == {}
    for id, reason in form.skips.items():
        assert reason in skipped.get(id, f"{id} is judged")


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


FOLLOW, RESUME = "batches_follow_the_mesh", "batches_resume"
PASSED = {
    "data_of_a_loader_with_a_state": [RESUME],
    "data_of_a_sampler_that_fills_up": [FOLLOW],
    "data_saved_by_the_author": [RESUME],
    "data_along_tp": [FOLLOW, RESUME],
    "data_scattered_by_rank_0": [FOLLOW],
    "data_that_never_ends": [RESUME],
}
"""Form -> the checks that it passes, although the usual form skips them."""


@pytest.mark.parametrize("name", PASSED)
def test_a_form_is_judged_by_what_it_declares(name, checkpoint, judge_loader):
    form, checks = FORMS[name], PASSED[name]
    verdicts = judge_loader(form.load, form.mesh, checks=checks, path=checkpoint(form.architecture))
    assert {id: verdicts[id].status for id in checks} == dict.fromkeys(checks, "passed")
