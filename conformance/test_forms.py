"""(d) Every form of sharding, loaded rightly: not one finding, no error, and no skip but for the reason told."""

from __future__ import annotations

import pytest
import torch

from fixtures.forms import FORMS
from fixtures.forms_registry import MAY_SKIP

USUAL = "per_block_and_root"


@pytest.fixture(scope="session")
def usual_skips(checkpoint, judge_loader):
    """What is skipped whatever the form, because the model has nothing of the kind (nothing frozen, nothing tied)."""
    usual = FORMS[USUAL]
    verdicts = judge_loader(usual.load, usual.mesh, path=checkpoint(usual.architecture))
    return {id for id, verdict in verdicts.items() if verdict.status == "skipped"}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_conforms(name, checkpoint, judge_loader, usual_skips):
    form = FORMS[name]
    if form.needs_accelerator and not torch.accelerator.is_available():
        pytest.skip("torch refuses this form without an accelerator")
    path = checkpoint(form.architecture) if form.architecture else None
    verdicts = judge_loader(form.load, form.mesh, path=path)
    told = {id: (v.findings, v.reason) for id, v in verdicts.items() if v.status in ("failed", "error")}
    assert told == {}

    def may_skip(id: str, reason: str) -> bool:
        return id in form.skips or id in usual_skips or MAY_SKIP.get(id, reason + "!") in reason

    skipped = {id: v.reason for id, v in verdicts.items() if v.status == "skipped"}
    unexplained = {id: reason for id, reason in skipped.items() if not may_skip(id, reason)}
    assert unexplained == {}
    for id, words in form.skips.items():
        assert words in skipped.get(id, f"{id} is judged")
